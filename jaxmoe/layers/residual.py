# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines how the halves of a layer read the residual stream and write to it.

With a the mixer, f the feed-forward and m the multiplier of the residual:

    standard   x = x + m a(norm x)                   x = x + m f(norm x)
    ladder     x = x + m a';  a' = a(norm x)         x = x + m f';  f' = f(norm x)
    parallel   x = x + m a(norm x) + m f(norm x)     at once, with one norm or two
    weighted   x = s x + b m a(norm x)               x = s' x + b' m f(norm x)
               with s norm(x) in place of s x if it `adds_to_norm`
    hyper      n streams, see `jaxmoe.contrib.depth.hyper_connections`

In parallel halves (GPT-J, PaLM, Cohere) the feed-forward does not read the output of the mixer.
Weights s and b of stream and branch are constants (DeepNorm, arXiv 2203.00555; MiniMax-01).

In a ladder a' and f' on the right are the outputs of the layer before, zero before the first layer;
after the last layer both are added. A half does not read the output of the half before it, so the
collective that sums that output over the tensor axis has a whole half of time (Ladder-residual,
arXiv 2501.06589), where the compiler makes it asynchronous: 6 of 47 on v5e:2x4 with four tensor
shards (libtpu 0.0.42), and no more with the options that `execution.halves` names. It is another
model, and weights of the one are not weights of the other.

To add a residual: a config that extends `Residual`, its row under `residual` in
`jaxmoe/catalog/layers.py`, a row of VARIANTS in `tests/jaxmoe/models/test_block_variants.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.catalog import Registry
from jaxmoe.layers.carry import CarriedArray, Carry
from jaxmoe.layers.records import Half, Stream
from jaxmoe.layers.rows import RowTransform
from sharding import axes as ax
from sharding.constrain import Placement

if TYPE_CHECKING:
    from jaxmoe.execution import ExecutionConfig
    from jaxmoe.layers.context import LayerContext


class ResidualHalf(Protocol):
    """How one half of a layer reads the stream and writes to it."""

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], Any]:
        """Return the input of the half, and what `write` needs beside the stream."""
        ...

    def write(
        self, stream: Stream, memory: Any, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the stream after the half.

        Args:
            stream: Stream that was read.
            memory: Second result of `read`.
            y: Output of the half.
            multiplier: Factor of the output.
        """
        ...


class Residual(Carry, RowTransform, abc.ABC):
    """Base class of the ways in which the halves of a layer share the residual stream."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    has_one_norm: bool
    """Whether the feed-forward reads the stream through the norm of the mixer."""
    adds_to_norm: bool
    """Whether a half adds its output to the norm of the stream instead of the stream."""

    @property
    @abc.abstractmethod
    def arrays(self) -> int:
        """Arrays [B S D] that flow from layer to layer."""

    @abc.abstractmethod
    def flops_per_token(self, embed_dim: int) -> float:
        """Return the FLOPs of one half beyond the parameters', forward and backward.

        Additions are not counted.

        Args:
            embed_dim: D.
        """

    @abc.abstractmethod
    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> ResidualHalf:
        """Return what a half reads the stream with and writes to it with.

        It may be a Linen module, whose parameters are in the layer under `mixer_residual` and
        `feed_forward_residual`.

        Args:
            half: The half.
            embed_dim: D.
            epsilon: Term added to the mean square of the streams.
            placement: Layout rules.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardResidualConfig(Residual):
    """Each half adds its output to the stream at once."""

    name: ClassVar[str] = "standard"
    has_one_norm: ClassVar[bool] = False
    adds_to_norm: ClassVar[bool] = False
    arrays: ClassVar[int] = 1

    def flops_per_token(self, embed_dim: int) -> float:
        """Return 0: it adds."""
        del embed_dim
        return 0.0

    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> StandardHalf:
        """Return the half that adds its output."""
        del half, embed_dim, epsilon, placement
        return StandardHalf()


class StandardHalf:
    """A half that adds its output to the stream."""

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], None]:
        """Return the stream."""
        return stream.x, None

    def write(
        self, stream: Stream, memory: None, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the stream with the output."""
        return dataclasses.replace(stream, x=stream.x + _scale(y, multiplier, stream.x))


LATE: Final = {"mixer": "first_half", "feed_forward": "second_half"}
"""Names in the carry of the outputs that are added one layer later. They sort as the halves come,
because the order of a carry decides how the compiler fuses their sum."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LadderResidualConfig(Residual):
    """Each half adds its output to the stream one layer later, beside which it is summed."""

    name: ClassVar[str] = "ladder"
    has_one_norm: ClassVar[bool] = False
    adds_to_norm: ClassVar[bool] = False
    arrays: ClassVar[int] = 3

    def flops_per_token(self, embed_dim: int) -> float:
        """Return 0: it adds."""
        del embed_dim
        return 0.0

    def carries(self, context: LayerContext, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return the outputs that are added one layer later."""
        del execution
        output = CarriedArray(
            features=(context.embed_dim,),
            axes=(ax.ACT_EMBED,),
            dtype=None,
        )
        return {LATE["mixer"]: output, LATE["feed_forward"]: output}

    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> LadderHalf:
        """Return the half whose output is added one layer later."""
        del embed_dim, epsilon, placement
        return LadderHalf(half)

    def leave(self, stream: Stream, context: LayerContext, execution: ExecutionConfig) -> Stream:
        """Return the stream with both outputs."""
        del context, execution
        late = stream.carry
        x = stream.x + late[LATE["mixer"]] + late[LATE["feed_forward"]]
        return dataclasses.replace(stream, x=x)


@dataclasses.dataclass(frozen=True, slots=True)
class LadderHalf:
    """A half whose output is added one layer later."""

    half: Half

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"]]:
        """Return the stream with the output of the same half of the layer before, twice."""
        x = stream.x + stream.carry[LATE[self.half]]
        return x, x

    def write(
        self,
        stream: Stream,
        memory: Float[Array, "B S D"],
        y: Float[Array, "B S D"],
        multiplier: float,
    ) -> Stream:
        """Return the stream after the half, with its output to be added later."""
        late = {LATE[self.half]: _scale(y, multiplier, memory)}
        return dataclasses.replace(stream, x=memory, carry=stream.carry | late)


_BRANCH: Final = "mixer_branch"
"""Name in the carry of the mixer's output, between the halves of a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelResidualConfig(Residual):
    """Both halves read the stream before the layer, and add their outputs to it together."""

    name: ClassVar[str] = "parallel"
    adds_to_norm: ClassVar[bool] = False
    arrays: ClassVar[int] = 1

    has_one_norm: bool = True
    """Whether the feed-forward reads the stream through the norm of the mixer, as in Cohere's
    models; False gives it a norm of its own."""

    def flops_per_token(self, embed_dim: int) -> float:
        """Return 0: it adds."""
        del embed_dim
        return 0.0

    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> ParallelHalf:
        """Return the half that reads the stream before the layer."""
        del embed_dim, epsilon, placement
        return ParallelHalf(half)


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelHalf:
    """A half that reads the stream before the layer; the second one adds both outputs to it."""

    half: Half

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], None]:
        """Return the stream."""
        return stream.x, None

    def write(
        self, stream: Stream, memory: None, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the stream with the output in its carry, or with the outputs of both halves."""
        carry = dict(stream.carry)
        branch = _scale(y, multiplier, stream.x)
        if self.half == "mixer":
            return dataclasses.replace(stream, carry=carry | {_BRANCH: branch})
        x = stream.x + carry.pop(_BRANCH) + branch
        return dataclasses.replace(stream, x=x, carry=carry)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightedResidualConfig(Residual):
    """Each half adds its output to the stream, each with a constant factor."""

    name: ClassVar[str] = "weighted"
    arrays: ClassVar[int] = 1
    has_one_norm: ClassVar[bool] = False

    mixer_stream: float = 1.0
    """Factor of the stream to which the output of a mixer is added."""
    mixer_branch: float = 1.0
    """Factor of the output of a mixer."""
    feed_forward_stream: float = 1.0
    """Factor of the stream to which the output of a feed-forward is added."""
    feed_forward_branch: float = 1.0
    """Factor of the output of a feed-forward."""
    adds_to_norm: bool = False
    """Whether the norm of the stream, which a half reads, takes the place of the stream that its
    output is added to: s norm(x) + b a(norm x), as in MiniMax-01 and post-norm transformers."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ValueError(f"model.residual.{field.name}={value} must be a finite number")

    def flops_per_token(self, embed_dim: int) -> float:
        """Return 0: it scales and adds."""
        del embed_dim
        return 0.0

    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> WeightedHalf:
        """Return the half with its factors."""
        del embed_dim, epsilon, placement
        if half == "mixer":
            return WeightedHalf(self.mixer_stream, self.mixer_branch)
        return WeightedHalf(self.feed_forward_stream, self.feed_forward_branch)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedHalf:
    """A half that adds its output to the stream with constant factors."""

    stream_factor: float
    branch_factor: float

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], None]:
        """Return the stream."""
        return stream.x, None

    def write(
        self, stream: Stream, memory: None, y: Float[Array, "B S D"], multiplier: float
    ) -> Stream:
        """Return the weighted sum of stream and output."""
        x = jnp.asarray(self.stream_factor, stream.x.dtype) * stream.x
        x = x + _scale(y, self.branch_factor * multiplier, x)
        return dataclasses.replace(stream, x=x)


def _scale(y: Array, multiplier: float, x: Array) -> Array:
    return jnp.asarray(multiplier, x.dtype) * y.astype(x.dtype)


RESIDUALS = Registry("residual")
