# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: a layer reads a weighted sum of n residual streams and writes to all of them.

With the streams X [n D], a branch F and z the streams of a token divided by their root mean square:

    u, v, w = a z W + b                 pre, post, res = sigmoid(u), 2 sigmoid(v), mix(w)
    X       = res X + post F(norm(pre X))^T

`mix` makes n n numbers a matrix of non-negative entries whose rows and columns sum to 1, so that
the mean of the streams passes unchanged (mHC, arXiv 2512.24880):

    sinkhorn       exp(w), then 20 times rows and columns divided by their sums: rows to 1e-3
    permutations   the mean of all n! permutation matrices with weights softmax(w) (mHC-lite)
    diagonal       diag(sigmoid(w)), of n numbers, whose rows do not sum to 1 (Hyperloop)

Streams begin as copies of the embedding and end as their mean. At W = 0 the connection of a new
model is the standard residual: pre is 1/n, post 1, and res the identity to e^-8. Choices of this
library where the sources differ: the mean at the end, no term beside the sigmoid of pre, a
parameter-free norm of z, and a starting at 0.01 [mHC].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.records import Half, Stream, TokenInputs
from jaxmoe.layers.residual import Residual
from sharding import axes as ax
from sharding.constrain import Placement

Mixing = Literal["sinkhorn", "permutations", "diagonal"]

SINKHORN_STEPS: Final = 20
MOST_PERMUTED: Final = 4
"""Most streams whose permutations are listed: 24 matrices."""

_GATE: Final = 0.01
_AWAY: Final = -8.0
"""Initial logit of what should not be mixed."""
_CERTAIN: Final = 20.0
"""A logit whose sigmoid is 1 in f32."""

_STREAMS = (ax.ACT_BATCH, ax.ACT_SEQ, None, ax.ACT_EMBED)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HyperResidualConfig(Residual):
    """Each half reads from and writes to n streams with learned weights (hyper-connections)."""

    name: ClassVar[str] = "hyper"
    has_one_norm: ClassVar[bool] = False
    adds_to_norm: ClassVar[bool] = False

    streams: int = 4
    """Residual streams (n)."""
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    """What keeps the mixing of the streams doubly stochastic: sinkhorn (mHC) to 1e-3, permutations
    (mHC-lite, at most 4 streams) exactly."""

    def __post_init__(self):
        check_streams("model.residual.streams", self.streams, self.mixing)

    @property
    def arrays(self) -> int:
        """Arrays [B S D] that flow from layer to layer."""
        return self.streams

    def flops_per_token(self, embed_dim: int) -> float:
        """Return the FLOPs of one half: of reading, mixing and writing the streams."""
        return connection_flops(self.streams, embed_dim, self.mixing)

    def enter(
        self,
        stream: Stream,
        tokens: TokenInputs,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        has_cache: bool = False,
    ) -> tuple[Stream, TokenInputs]:
        """Return the stream before the first layer as n copies."""
        del context, execution, has_cache
        return dataclasses.replace(stream, x=spread(stream.x, self.streams)), tokens

    def build(
        self, half: Half, *, embed_dim: int, epsilon: float, placement: Placement
    ) -> HyperHalf:
        """Return the module with which a half reads the streams and writes to them."""
        return HyperHalf(
            self.streams, self.mixing, embed_dim, epsilon, placement, name=f"{half}_residual"
        )

    def leave(self, stream: Stream, context: LayerContext, execution: ExecutionConfig) -> Stream:
        """Return the stream after the last layer: the mean."""
        del context, execution
        return dataclasses.replace(stream, x=mean_stream(stream.x))


class HyperConnection(nn.Module):
    """Weights with which one branch reads n streams and writes to them.

    Attributes:
        streams: n.
        mixing: How the streams are mixed.
        embed_dim: D.
        epsilon: Term added to the mean square of the streams.
        placement: Layout rules.
    """

    streams: int
    mixing: Mixing
    embed_dim: int
    epsilon: float
    placement: Placement

    def declare_maps(self) -> None:
        """Declare the matrix of all weights' logits, their biases, and a factor for each map."""
        count = 2 * self.streams + mixed_logits(self.streams, self.mixing)
        weight = Declaration(
            shape=(self.streams, self.embed_dim, count),
            axes=(ax.STREAMS, ax.EMBED, ax.CONNECTIONS),
            role="connection",
            matrix=((-3, -2), (-1,)),
        )
        self._weight = declare(self, "weight", weight)
        for name, size in (("bias", count), ("scale", 3)):
            zeros = Declaration(
                shape=(size,),
                axes=(ax.CONNECTIONS,),
                role="connection_bias",
                matrix=None,
                init="zeros",
            )
            setattr(self, f"_{name}", declare(self, name, zeros))

    def maps(
        self, x: Float[Array, "B S n D"]
    ) -> tuple[Float[Array, "B S n"], Float[Array, "B S n"], Array]:
        """Return `pre`, `post` and `res` of each token in f32; `res` is [B S n] if diagonal.

        Args:
            x: Streams.
        """
        n = self.streams
        place = self.placement.place
        wide = x.astype(jnp.float32)
        size = jnp.mean(wide * wide, axis=(2, 3)) + self.epsilon
        weight = place(self._weight.astype(jnp.float32), (None, None, None))
        logits = jnp.einsum("bsnd,ndm->bsm", wide, weight, preferred_element_type=jnp.float32)
        logits = jnp.einsum("bsm,bs->bsm", logits, jax.lax.rsqrt(size))
        parts = (n, n, mixed_logits(n, self.mixing))
        of_map = np.repeat(np.eye(3, dtype=np.float32), parts, axis=1)
        factor = place(self._scale.astype(jnp.float32), (None,)) + _GATE
        factor = jnp.einsum("k,km->m", factor, of_map, preferred_element_type=jnp.float32)
        start = jnp.asarray(np.concatenate(_initial_logits(n, self.mixing)), jnp.float32)
        bias = place(self._bias.astype(jnp.float32), (None,)) + start
        logits = logits * factor[None, None] + bias[None, None]
        pre, post, mixed = jnp.split(logits, np.cumsum(parts)[:2].tolist(), axis=-1)
        return jax.nn.sigmoid(pre), 2.0 * jax.nn.sigmoid(post), mix(mixed, n, self.mixing)


class HyperHalf(HyperConnection):
    """The connection of a half of a layer."""

    def setup(self):
        """Declare the parameters."""
        self.declare_maps()

    def read(self, stream: Stream) -> tuple[Float[Array, "B S D"], tuple[Array, Array]]:
        """Return the input of the half, and the maps by which it is written."""
        pre, post, res = self.maps(stream.x)
        return read_streams(stream.x, pre), (post, res)

    def write(
        self,
        stream: Stream,
        memory: tuple[Array, Array],
        y: Float[Array, "B S D"],
        multiplier: float,
    ) -> Stream:
        """Return the stream after the half; see `jaxmoe.layers.residual`."""
        x = stream.x
        y = jnp.asarray(multiplier, x.dtype) * y.astype(x.dtype)
        return dataclasses.replace(stream, x=write_streams(x, y, *memory))


def spread(x: Float[Array, "B S D"], streams: int) -> Float[Array, "B S n D"]:
    """Return n copies of a stream."""
    return jnp.repeat(x[:, :, None], streams, axis=2)


def mean_stream(x: Float[Array, "B S n D"]) -> Float[Array, "B S D"]:
    """Return the mean of the streams, in their dtype."""
    return jnp.mean(x.astype(jnp.float32), axis=2).astype(x.dtype)


def read_streams(x: Float[Array, "B S n D"], pre: Float[Array, "B S n"]) -> Float[Array, "B S D"]:
    """Return the weighted sum of the streams, in their dtype.

    Args:
        x: Streams.
        pre: Weight of each.
    """
    read = jnp.einsum(
        "bsn,bsnd->bsd", pre, x.astype(jnp.float32), preferred_element_type=jnp.float32
    )
    return read.astype(x.dtype)


def write_streams(
    x: Float[Array, "B S n D"], y: Float[Array, "B S D"], post: Float[Array, "B S n"], res: Array
) -> Float[Array, "B S n D"]:
    """Return the mixed streams, each with its share of an output.

    Args:
        x: Streams.
        y: Output.
        post: Factor of the output for each stream.
        res: Matrix [B S n n] that mixes the streams, or its diagonal [B S n].
    """
    wide = x.astype(jnp.float32)
    form = "bsij,bsjd->bsid" if res.ndim == 4 else "bsi,bsid->bsid"
    mixed = jnp.einsum(form, res, wide, preferred_element_type=jnp.float32)
    written = jnp.einsum("bsn,bsd->bsnd", post, y.astype(jnp.float32))
    return (mixed + written).astype(x.dtype)


def mix(logits: Float[Array, "*B w"], streams: int, mixing: Mixing) -> Array:
    """Return the matrices [*B n n] that mix the streams, or with "diagonal" diagonals [*B n].

    Args:
        logits: Numbers of each matrix, `mixed_logits` of them.
        streams: n.
        mixing: How the logits become a matrix.
    """
    match mixing:
        case "diagonal":
            return jax.nn.sigmoid(logits)
        case "permutations":
            weights = jax.nn.softmax(logits, axis=-1)
            matrices = jnp.asarray(_permutations(streams))
            return jnp.einsum(
                "...p,pij->...ij", weights, matrices, preferred_element_type=jnp.float32
            )
    square = logits.reshape(*logits.shape[:-1], streams, streams)
    largest = jax.lax.stop_gradient(jnp.max(square, axis=(-2, -1), keepdims=True))

    def normalise(_: Array | int, matrix: Array) -> Array:
        matrix = matrix / jnp.sum(matrix, axis=-1, keepdims=True)
        return matrix / jnp.sum(matrix, axis=-2, keepdims=True)

    return jax.lax.fori_loop(0, SINKHORN_STEPS, normalise, jnp.exp(square - largest))


def mixed_logits(streams: int, mixing: Mixing) -> int:
    """Return how many logits make one mixing matrix."""
    sizes = {"sinkhorn": streams**2, "diagonal": streams}
    return math.factorial(streams) if mixing == "permutations" else sizes[mixing]


def connection_flops(streams: int, embed_dim: int, mixing: Mixing) -> float:
    """Return the FLOPs per token of reading, mixing and writing n streams, forward and backward.

    Args:
        streams: n.
        embed_dim: D.
        mixing: How the streams are mixed.
    """
    mixed = streams if mixing == "diagonal" else streams**2
    return 6.0 * (mixed + 2 * streams) * embed_dim


def check_streams(path: str, streams: int, mixing: Mixing) -> None:
    """Refuse a number of streams that cannot be mixed.

    Args:
        path: Dotted field of the number.
        streams: n.
        mixing: How the streams are mixed.

    Raises:
        ValueError: There is no stream, or more than can be permuted.
    """
    if streams < 1:
        raise ValueError(f"{path}={streams} must be at least 1")
    if mixing == "permutations" and streams > MOST_PERMUTED:
        raise ValueError(
            f"{path}={streams} has {math.factorial(streams)} permutations: choose at most"
            f" {MOST_PERMUTED} streams, or the mixing sinkhorn"
        )


def _permutations(streams: int) -> np.ndarray:
    """Return the permutation matrices [n! n n], the identity first."""
    return np.eye(streams, dtype=np.float32)[list(itertools.permutations(range(streams)))]


def _initial_logits(streams: int, mixing: Mixing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the logits of `pre`, `post` and `res` of a new model at W = 0."""
    read = -math.log(streams - 1) if streams > 1 else _CERTAIN
    match mixing:
        case "diagonal":
            mixed = np.full(streams, -_AWAY)
        case "permutations":
            mixed = np.where(np.arange(math.factorial(streams)) == 0, 0.0, _AWAY)
        case _:
            mixed = np.where(np.eye(streams) == 1, 0.0, _AWAY).reshape(-1)
    return np.full(streams, read), np.zeros(streams), mixed
