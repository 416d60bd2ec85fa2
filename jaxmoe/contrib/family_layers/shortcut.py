# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in pairs, in which the experts of the second read what the first read.

    x = x + a1(norm x)         h = norm x         x = x + f1(h)         carry h
    x = x + a2(norm x)                            x = x + f2(norm x) + experts(h)

f1 is the feed-forward of this file, and f2 is the shared branch of a MoE layer with
`moe.options.routed_input` shortcut. As the experts wait for neither f1 nor a2, their dispatch has
the time of both.

Sources: shortcut-connected mixtures (arXiv 2404.05019), LongCat-Flash (arXiv 2509.01322).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.carry import CarriedArray
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.feed_forwards.dense import DenseConfig, FeedForward
from jaxmoe.layers.feed_forwards.moe.config import SHORTCUT
from jaxmoe.layers.records import FeedForwardOutputs
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutDenseConfig(DenseConfig):
    """A dense feed-forward that hands its input on to the experts of a later layer."""

    name: ClassVar[str] = "shortcut_dense"

    def carries(self, context: LayerContext, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return the input, in the compute dtype."""
        del execution
        return {SHORTCUT: CarriedArray((context.embed_dim,), (ax.ACT_EMBED,), dtype=None)}


class ShortcutFeedForward(FeedForward):
    """A dense feed-forward that returns its input in the carry."""

    def __call__(
        self, x: Float[Array, "B S D"], routing: Any = None
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Compute the layer.

        Args:
            x: Normed input.
            routing: As in `FeedForward`.

        Returns:
            The output in the compute dtype, and the input in the carry.
        """
        y, outputs = FeedForward.__call__(self, x, routing)
        placement = self.execution.placement
        carried = placement.place(x.astype(y.dtype), (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))
        return y, dataclasses.replace(outputs, carry={SHORTCUT: carried})


ShortcutDenseConfig.module = ShortcutFeedForward
