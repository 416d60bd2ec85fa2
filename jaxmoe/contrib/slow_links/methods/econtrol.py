# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""EControl: workers send increments of their gradients with a controlled error (arXiv 2311.05645).

sent_i = C(gain * e_i + g_i - h_i);  e_i = e_i + g_i - h_i - sent_i;  h_i = h_i + sent_i

Receivers hold the mean of all h_i, to which they add the mean increment of every step; the
optimiser takes it as the gradient. C sends the largest numbers of every tile. Theory asks for a
gain of the order of the share that C keeps; published code has 0.001, and its documentation 0.1,
which is taken here. h and the mean begin at 0.

A worker that is left out sends no increment: its last h_i stays in the mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmoe.contrib.slow_links.codec import Codec, Payload, controlled_codec, plain
from jaxmoe.contrib.slow_links.codecs.largest import largest
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, gather_around
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, is_small
from jaxmoe.contrib.slow_links.gradient_base import GradientBase, stacked_dimensions
from jaxmoe.contrib.slow_links.gradient_method import GradientMethod, separately


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EControlConfig(GradientBase):
    """Sends the largest changes of the gradient, with a controlled error."""

    name: ClassVar[str] = "econtrol"

    share: float = 0.01
    """Share of the numbers of a tile that are sent, at least one of them; 1 sends all. Norms and
    routers are always sent whole."""
    gain: float = 0.1
    """Share of the error in a message; 0 is EF21."""
    tile: int = 64
    """Largest size of a tile along a dimension."""

    def __post_init__(self):
        GradientBase.__post_init__(self)
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"replicas.share={self.share} must lie in (0, 1]")
        if not 0.0 <= self.gain <= 1.0:
            raise ValueError(f"replicas.gain={self.gain} must lie in [0, 1]")
        if not 1 <= self.tile <= 256:
            raise ValueError(
                f"replicas.tile={self.tile} must be from 1 to 256: places in a tile have 16 bits"
            )

    def build(self, facts: TrainingFacts) -> GradientMethod:
        """Return the method; see the base class."""

        def codec(leaf: Leaf, setting: About | None) -> Codec:
            del setting
            if is_small(leaf):
                return controlled_codec(plain(), self.gain)
            return controlled_codec(
                largest(self.share, stacked_dimensions(leaf), self.tile), self.gain
            )

        leaves = {leaf.path: leaf for leaf in facts.leaves}
        exchange = separately(leaves, lambda leaf, setting: added_increments())
        return GradientMethod(codec=codec, exchange=exchange)


def added_increments() -> Exchange:
    """Return the exchange whose receivers add up the mean increments."""

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        alive = setting.alive
        assert alive is not None  # set in every exchange of gradients

        def add(total: Array, increment: tuple[Payload, Bool[Array, ""]]) -> tuple[Array, None]:
            sent, is_alive = increment
            return total + jnp.where(is_alive, decode(sent, slow), jnp.zeros_like(slow)), None

        gathered = gather_around(payload, setting)
        total, _ = jax.lax.scan(add, jnp.zeros_like(slow), (gathered, alive))
        estimate = state + total / setting.workers
        return estimate, estimate

    return Exchange(init=jnp.zeros_like, mix=mix, copies=lambda workers: workers - 1)
