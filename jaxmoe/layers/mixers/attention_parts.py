# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optional parts of grouped-query attention: biases, gates and sinks of heads, temperature, chunks.

    q += b_q                                a bias for each head and feature; k, v and y alike
    o *= sigmoid(x Wg)                      a gate for each head, or for each feature
    o *= sigmoid(lse - sink)                a logit without a value in the softmax's denominator
    q *= a log(1 + floor((p + 1) / f)) + 1  p: position of the query
    p // c == t // c                        key at t that a query at p may see

The sink of a head: exp(lse) / (exp(lse) + exp(sink)) is the share of the softmax that its keys
have, so that attention returns its log-sum-exp and computes no further column.

Sources: biases arXiv 2309.16609; gates arXiv 2505.06708; sinks arXiv 2508.10925;
temperature arXiv 2501.19399.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmoe.configs import check_choices
from jaxmoe.declarations import Declaration, declare
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive
from jaxmoe.layers.rotary import RopeLayout, RopeScaling
from sharding import axes as ax
from sharding.constrain import Placement

GateForm = Literal["head", "element"]
"""A gate for each head, or for each feature of a head."""


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryTemperatureConfig:
    """Queries that grow with the logarithm of their positions, for rows longer than in training."""

    floor_scale: float = 8192.0
    """Positions from one step of the factor to the next (f)."""
    attn_scale: float = 0.1
    """Weight of the logarithm (a)."""

    def __post_init__(self):
        require_positive("attention.query_temperature", self, "floor_scale", "attn_scale")

    def factor(self, positions: Int[Array, "#B S"]) -> Float[Array, "#B S 1 1"]:
        """Return the factor of the queries at these positions, f32."""
        steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / self.floor_scale)
        return (jnp.log1p(steps) * self.attn_scale + 1.0)[:, :, None, None]


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunksConfig:
    """Chunks of equal length from the first position of a document on; a query sees its own."""

    size: int = 8192
    """Positions of a chunk."""

    def __post_init__(self):
        require_positive("attention.chunks", self, "size")

    def segments(
        self,
        positions: Int[Array, "#B S"],
        segment_ids: Int[Array, "B S"] | None,
        shape: tuple[int, ...],
    ) -> Int[Array, "B S"]:
        """Return a segment for each chunk, so that any attention within segments is within chunks.

        Args:
            positions: Positions in the document.
            segment_ids: Document of each token, 0 for padding; None: one document a row.
            shape: Sequences and positions (B, S).
        """
        chunks = positions // jnp.int32(self.size)
        if segment_ids is None:
            return jnp.broadcast_to(chunks, shape) + jnp.int32(1)
        # A row has at most S documents, so that no two of its pairs have the same number.
        most = jnp.int32((2**31 - 1) // (shape[1] + 2))
        segments = segment_ids * most + jnp.minimum(chunks, most - 1)
        return jnp.where(segment_ids == 0, jnp.int32(0), segments)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What published models add to grouped-query attention; the defaults add nothing."""

    name: ClassVar[str] = "options"

    has_bias: bool = False
    """Whether queries, keys and values have biases."""
    has_output_bias: bool = False
    """Whether the output has a bias."""
    qk_norm_place: Literal["before", "after"] = "before"
    """Whether queries and keys are normed before or after RoPE turns them."""
    qkv_clip: float | None = None
    """Bound of the absolute values of q, k and v before RoPE, norms before it included; off when
    None."""
    rotary_dim: int | None = None
    """First features of a head that RoPE turns, an even number; all when None."""
    rope_layout: RopeLayout = "halves"
    """Features that RoPE turns together: h and h + rotary_dim / 2, or 2h and 2h + 1."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the wavelengths for rows longer than those of pretraining; None for none."""
    gate_form: GateForm = "head"
    """Whether `is_gated` has a gate for each head or for each feature of it."""
    has_sinks: bool = False
    """Whether each head has a learned logit in the softmax's denominator that has no value."""

    def __post_init__(self):
        check_choices("attention.options", self)
        if self.qkv_clip is not None and self.qkv_clip <= 0:
            raise ValueError(
                f"attention.options.qkv_clip={self.qkv_clip} must be above 0, or None for off"
            )

    def rope_dim(self, head_dim: int) -> int:
        """Return the features of a head that RoPE turns.

        Args:
            head_dim: H.
        """
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def check_rotary(self, head_dim: int) -> None:
        """Check that RoPE can turn heads of a width.

        Args:
            head_dim: H.

        Raises:
            ValueError: The features that turn are no pairs of the head.
        """
        width = self.rotary_dim
        if width is None and head_dim % 2:
            raise ValueError(f"attention.head_dim={head_dim} must be even: RoPE turns pairs")
        if width is not None and (width % 2 or not 0 < width <= head_dim):
            raise ValueError(
                f"attention.options.rotary_dim={width} must be an even number from 2 to"
                f" attention.head_dim={head_dim}, or None for all"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rope_dim(head_dim) // 2)


NO_OPTIONS = AttentionOptions()
"""Options that add nothing."""
_ROWS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
_BIASES = {
    "q": (ax.HEADS, ax.ACT_HEADS),
    "k": (ax.KV_HEADS, ax.ACT_KV_HEADS),
    "v": (ax.KV_HEADS, ax.ACT_KV_HEADS),
}
"""Logical axes of the heads of each bias, and of what it is added to."""


def declare_vector(module: nn.Module, name: str, shape: tuple[int, ...], axes: Any) -> Array:
    """Return a parameter that starts at 0 and is no matrix.

    Args:
        module: Module that owns it.
        name: Name in the module.
        shape: Its shape.
        axes: Logical axis of each dimension.
    """
    row = Declaration(shape=shape, axes=axes, role="state", matrix=None, init="zeros")
    return declare(module, name, row)


def add_biases(
    module: nn.Module, heads: dict[str, Float[Array, "B S n H"]], placement: Placement
) -> dict[str, Float[Array, "B S n H"]]:
    """Return queries, keys and values with their biases; other projections as they are.

    Args:
        module: Module that owns the biases.
        heads: Projections of the stream by name.
        placement: Layout rules.
    """
    biases = {
        name: declare_vector(module, f"{name}_bias", heads[name].shape[2:], (axis, ax.HEAD_DIM))
        for name, (axis, _) in _BIASES.items()
    }

    def add(part: dict[str, Array], biases: dict[str, Array], *, batch_axes: Any) -> Any:
        del batch_axes
        return {name: x + biases[name].astype(x.dtype)[None, None] for name, x in part.items()}

    spread = {name: (*_ROWS, axis, None) for name, (_, axis) in _BIASES.items()}
    in_use = {name: (axis, None) for name, (axis, _) in _BIASES.items()}
    region = placement.region(add, in_axes=(spread, in_use), out_axes=spread)
    return heads | region({name: heads[name] for name in _BIASES}, biases)


def add_output_bias(module: nn.Module, y: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Return the output with its bias, which is added once, to the sum over all heads.

    Args:
        module: Module that owns the bias.
        y: Output in the layout of the stream.
    """
    bias = declare_vector(module, "o_bias", y.shape[-1:], (ax.NORM,))
    return y + bias.astype(y.dtype)[None, None]


def weigh_against_sinks(
    module: nn.Module,
    out: Float[Array, "B S N H"],
    lse: Float[Array, "B N S"],
    placement: Placement,
) -> Float[Array, "B S N H"]:
    """Return the output of each head with a learned logit in the denominator of its softmax.

    Args:
        module: Module that owns the logits.
        out: Output without them.
        lse: Log-sum-exp of the logits of every query, with its gradient.
        placement: Layout rules.
    """
    sinks = declare_vector(module, "sinks", out.shape[2:3], (ax.HEADS,))

    def weigh(out: Array, lse: Array, sinks: Array, *, batch_axes: Any) -> Array:
        del batch_axes
        share = jax.nn.sigmoid(lse - sinks.astype(lse.dtype)[None, :, None])
        return out * share.swapaxes(1, 2)[..., None].astype(out.dtype)

    heads = (*_ROWS, ax.ACT_HEADS, None)
    sums = (ax.ACT_BATCH, ax.ACT_HEADS, ax.ACT_SEQ_INNER)
    region = placement.region(weigh, in_axes=(heads, sums, (ax.HEADS,)), out_axes=heads)
    return region(out, lse, sinks)


def gate_heads(
    out: Float[Array, "B S N H"], logits: Float[Array, "B S N ..."], form: GateForm
) -> Float[Array, "B S N H"]:
    """Return the output of each head, multiplied by the sigmoid of its gates.

    Args:
        out: Output of each head.
        logits: Logits of the gates, f32.
        form: Whether there is one for each head or for each feature.
    """
    gates = jax.nn.sigmoid(logits)
    return out * (gates[..., None] if form == "head" else gates).astype(out.dtype)
