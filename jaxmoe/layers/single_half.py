# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that have a mixer alone: no feed-forward, and no norm in front of one.

Nemotron-H (arXiv 2504.03624) has layers of one half each. A mixer before a feed-forward is a layer
here; a mixer before another mixer is a layer with this feed-forward.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import FeedForwardSizes, LayerContext, UnroutedFeedForward


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoFeedForwardConfig(UnroutedFeedForward):
    """No feed-forward: the layer is its mixer, without parameters of a second half."""

    name: ClassVar[str] = "none"
    module_name: ClassVar[str] = "feed_forward"
    width_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""
        return FeedForwardSizes()

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> None:
        """Return None: there is nothing to compute."""
        del context, execution, train, name
