# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines how the halves of a layer read the residual stream and write to it.

With a the mixer, f the feed-forward and m the multiplier of the residual:

    standard   x = x + m a(norm x)                   x = x + m f(norm x)
    ladder     x = x + m a';  a' = a(norm x)         x = x + m f';  f' = f(norm x)

where a' and f' on the right are the outputs of the layer before, zero before the first layer; after
the last layer both are added. In a ladder a half does not read the output of the half before it, so
the collective that sums that output over the tensor axis has a whole half of time (Ladder-residual,
arXiv 2501.06589). It is another model, and weights of the one are not weights of the other.

To add a residual: a config in `jaxmoe/layers/residual.py`, its line in the union `Residuals`, a row
of RESIDUALS in `tests/jaxmoe/layers/test_residual.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.layers.records import Stream

Half = Literal["mixer", "feed_forward"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardResidualConfig:
    """Each half adds its output to the stream at once."""

    name: ClassVar[str] = "standard"
    arrays: ClassVar[int] = 1
    """Arrays [B S D] that flow from layer to layer."""

    def begin(self, stream: Stream) -> Stream:
        """Return the stream before the first layer."""
        return stream

    def read(self, stream: Stream, half: Half) -> Stream:
        """Return the stream whose `x` is the input of a half."""
        del half
        return stream

    def write(
        self, stream: Stream, half: Half, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the stream after a half.

        Args:
            stream: Stream that the half has read.
            half: The half.
            y: Its output.
            multiplier: m, factor of the output.
        """
        del half
        return dataclasses.replace(stream, x=stream.x + _scaled(y, multiplier, stream.x))

    def end(self, stream: Stream) -> Stream:
        """Return the stream after the last layer."""
        return stream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LadderResidualConfig:
    """Each half adds its output to the stream one layer later, beside which it is summed."""

    name: ClassVar[str] = "ladder"
    arrays: ClassVar[int] = 3
    """Arrays [B S D] that flow from layer to layer."""

    def begin(self, stream: Stream) -> Stream:
        """Return the stream before the first layer, with outputs of zero."""
        none = jnp.zeros_like(stream.x)
        return dataclasses.replace(stream, mixed=none, fed=none)

    def read(self, stream: Stream, half: Half) -> Stream:
        """Return the stream with the output of the same half of the layer before."""
        late = stream.mixed if half == "mixer" else stream.fed
        assert late is not None  # `begin` made it
        return dataclasses.replace(stream, x=stream.x + late)

    def write(
        self, stream: Stream, half: Half, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the stream after a half, with its output to be added later."""
        y = _scaled(y, multiplier, stream.x)
        if half == "mixer":
            return dataclasses.replace(stream, mixed=y)
        return dataclasses.replace(stream, fed=y)

    def end(self, stream: Stream) -> Stream:
        """Return the stream with both outputs."""
        assert stream.mixed is not None and stream.fed is not None  # `begin` made them
        x = stream.x + stream.mixed + stream.fed
        return dataclasses.replace(stream, x=x, mixed=None, fed=None)


def _scaled(y: Array, multiplier: float, x: Array) -> Array:
    return jnp.asarray(multiplier, x.dtype) * y.astype(x.dtype)


Residuals = StandardResidualConfig | LadderResidualConfig
"""Union of the residuals, the registry that the command line reads."""
