# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a recurrent state per head that decays, is written and is read at each token.

    z, x, b, c, dt = u Wz, u Wx, u Wb, u Wc, u Wdt
    x, b, c        = silu(convolve(x)), silu(convolve(b)), silu(convolve(c))
    step           = softplus(dt + dt_bias)
    h_t            = exp(-exp(a_log) step_t) h_{t-1} + step_t x_t b_t^T        [P H] per head
    y_t            = h_t c_t + skip x_t
    out            = RMSNorm over each group of heads(y silu(z)) Wo

The heads of a group share b and c. Heads are split over the tensor axis, rows over the seq axis
(`cut_rows.py`).
Sources: arXiv 2405.21060 (sections 6 and 7); layout of the norm: transformers' `Mamba2Mixer`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, Role, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, MixerActivations, require_positive
from jaxmoe.layers.convolution import last_inputs
from jaxmoe.layers.mixers.recurrent import (
    ScanAxes,
    SelectiveMixer,
    convolve_silu,
    gate_output,
    run_rows,
    scan_layer,
    with_biases,
)
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from pallas_kernels import state_space_dual
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream, into_stream, out_of_stream


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(SelectiveMixer):
    """Mamba-2: a decaying state per head in place of attention."""

    name: ClassVar[str] = "mamba2"
    operation: ClassVar[str] = "state_space_dual"

    num_heads: int = 8
    """Heads (N), each with a state of its own."""
    head_dim: int = 32
    """Channels of one head (P); num_heads * head_dim is usually twice model.embed_dim."""
    state_dim: int = 64
    """Values of the state per channel (H)."""
    num_groups: int = 1
    """Groups of heads that share what is written into and read from their states (G)."""
    chunk: int = 64
    """Tokens that are multiplied together between two states; changes the speed only."""

    def __post_init__(self):
        fields = ("num_heads", "head_dim", "state_dim", "num_groups", "conv_length", "chunk")
        require_positive("mamba2", self, *fields)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"mamba2.num_heads={self.num_heads} must be a multiple of"
                f" mamba2.num_groups={self.num_groups}"
            )

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        read = 2 * self.num_groups * self.state_dim + self.num_heads
        return embed_dim * (3 * self.inner_dim + read)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of writing and reading the state per token, at any length."""
        del length
        return 12.0 * self.inner_dim * self.state_dim

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer, whose backward pass stores one state per chunk."""
        heads = self.num_heads / shards(ax.ACT_HEADS)
        narrow = heads * self.head_dim * itemsize
        wide = heads * self.head_dim * 4
        shared = 2 * self.num_groups * self.state_dim * itemsize
        states = wide * self.state_dim / self.chunk
        projected = 2 * narrow + shared + 4 * heads
        return MixerActivations(
            projected=projected,
            output=narrow,
            kept=projected + narrow,
            working=6 * narrow + 6 * wide + states,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> Mamba2Cache:
        """Return the state before a sequence of any length, cut as the mesh is."""
        del slots
        reach = self.conv_length - 1
        groups = (self.num_groups, self.state_dim)
        heads = (self.num_heads, self.head_dim)
        dtype = execution.precision.compute_dtype
        placement = execution.placement

        def empty(shape: tuple[int, ...], axes: Any, dtype: Any) -> Array:
            return placement.place(jnp.zeros((layers, batch, *shape), dtype), (None, *axes))

        return Mamba2Cache(
            x=empty((reach, *heads), _X, dtype),
            b=empty((reach, *groups), _SHARED, dtype),
            c=empty((reach, *groups), _SHARED, dtype),
            state=empty((*heads, self.state_dim), _STATE, jnp.float32),
        )


class Mamba2Cache(NamedTuple):
    """State of earlier tokens, and the last inputs of the convolutions, by layer."""

    x: Float[Array, "L B R N P"]
    b: Float[Array, "L B R G H"]
    c: Float[Array, "L B R G H"]
    state: Float[Array, "L B N P H"]


_X = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
_SHARED = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None, None)
_STATE = (ax.ACT_BATCH, ax.ACT_HEADS, None, None)


class Mamba2(nn.Module):
    """One layer of Mamba-2."""

    config: Mamba2Config
    context: LayerContext
    execution: ExecutionConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None = None,
    ) -> tuple[Float[Array, "B S D"], MixerOutputs]:
        """Mix the tokens of each document.

        Args:
            x: Normed input.
            tokens: Segments and padding.
            cache: State of this layer, which follows the last token that is not padding.
            layer: Not read.

        Returns:
            The output [B S D] in the compute dtype, and the new `Mamba2Cache`.
        """
        del layer
        placement = self.execution.placement
        dtype = self.execution.precision.compute_dtype
        form = self.execution.tensor_products
        x = x.astype(dtype)
        projected = out_of_stream(x, self._of_heads(dtype), placement, form=form)
        projected |= along_stream(x, self._of_groups(dtype), placement)
        vectors, axes = self._vectors()
        scan = functools.partial(self._scan, axes=placement.mesh_axes(ax.ACT_HEADS))
        shared = dict.fromkeys("bc", _SHARED)
        projected_axes = dict.fromkeys("zx", _X) | shared | {"dt": _X[:3]}
        scan_axes = ScanAxes(projected_axes, axes, _X, {"x": _X, **shared, "state": _STATE})
        y, outputs = scan_layer(scan, projected, vectors, tokens, cache, placement, scan_axes)
        weight = self._matrix(
            "o", (*self._heads, self.context.embed_dim), ((-3, -2), (-1,)), is_output=True
        )
        product = Product("bsnp,npd->bsd", weight.astype(dtype), (ax.HEADS, None, None), _X)
        out = into_stream(y, product, placement, form=form)
        if self.config.has_projection_bias:
            row = _vector((self.context.embed_dim,), (ax.NORM,), "zeros")
            out = out + declare(self, "o_bias", row).astype(dtype)[None, None]
        return out, outputs

    def _scan(
        self,
        projected: dict[str, Array],
        vectors: dict[str, Array],
        segments: Array,
        layer_cache: dict[str, Array],
        *,
        axes: tuple[str, ...],
        parts: tuple[str, ...],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gated and normed output of the heads of this device, and the new state.

        Args:
            projected: Projections of the stream.
            vectors: Parameters of heads and channels.
            segments: Document of each token, 0 for padding.
            layer_cache: Arrays of the layer's cache; none without one.
            axes: Mesh axes over which heads are split.
            parts: Mesh axes over which rows are cut.
        """
        config = self.config
        new = {}
        if config.has_projection_bias:
            projected = with_biases(projected, vectors)
        inputs = {}
        for name in "xbc":
            taps = vectors[f"{name}_taps"]
            bias = vectors.get(f"{name}_bias")
            inputs[name] = convolve_silu(
                projected[name], taps, bias, layer_cache.get(name), segments, parts
            )
            if layer_cache:
                lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
                new[name] = last_inputs(projected[name], layer_cache[name], lengths)
        groups = self._groups_of_heads(projected["x"].shape[2], axes)
        b, c = (self._own_groups(inputs[name], groups) for name in "bc")
        step = jax.nn.softplus(projected["dt"].astype(jnp.float32) + vectors["dt_bias"][None, None])
        decay = -jnp.exp(vectors["a_log"])
        run = functools.partial(
            state_space_dual,
            inputs["x"],
            step,
            decay,
            b,
            c,
            segment_ids=segments,
            chunk=config.chunk,
            implementation=self.execution.implementations.state_space_dual,
        )

        def factor(time: Array) -> Array:
            return jnp.exp(time * decay[None])[..., None, None]

        y, state = run_rows(run, layer_cache.get("state"), step, factor, segments, parts)
        if layer_cache:
            new["state"] = state
        y = gate_output(y, inputs["x"], projected["z"], vectors["skip"][:, None])
        y = self._normalize(y, groups, axes) * vectors["norm"][None, None]
        return y.astype(projected["x"].dtype), new

    def _normalize(
        self, y: Float[Array, "B S n P"], groups: Int[Array, " n"], axes: tuple[str, ...]
    ) -> Float[Array, "B S n P"]:
        """Divide by the root mean square of each group of heads, some on other devices."""
        config = self.config
        group_mask = jax.nn.one_hot(groups, config.num_groups, dtype=jnp.float32)
        sums = jnp.einsum("bsn,ng->bsg", jnp.sum(jnp.square(y), axis=-1), group_mask)
        if axes:
            sums = jax.lax.psum(sums, axes)
        mean = sums * jnp.float32(config.num_groups / config.inner_dim)
        scale = jax.lax.rsqrt(mean + jnp.float32(self.context.norm_epsilon))
        return y * jnp.einsum("bsg,ng->bsn", scale, group_mask)[..., None]

    def _groups_of_heads(self, number: int, axes: tuple[str, ...]) -> Int[Array, " n"]:
        """Return the group of each head of this device."""
        first = jax.lax.axis_index(axes).astype(jnp.int32) * number if axes else 0
        heads = jnp.arange(number, dtype=jnp.int32) + first
        return heads // (self.config.num_heads // self.config.num_groups)

    def _own_groups(self, shared: Float[Array, "B S G H"], groups: Int[Array, " n"]) -> Array:
        """Return the groups of the heads of this device."""
        number = groups.shape[0]
        size = self.config.num_heads // self.config.num_groups
        if number == self.config.num_heads:
            return shared
        if number % size and size % number:
            raise ValueError(
                f"mamba2.num_groups={self.config.num_groups} and mesh.tensor="
                f"{self.config.num_heads // number}: one must divide the other"
            )
        return jax.lax.dynamic_slice_in_dim(shared, groups[0], max(1, number // size), axis=2)

    @property
    def _heads(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.head_dim

    @property
    def _groups(self) -> tuple[int, int]:
        return self.config.num_groups, self.config.state_dim

    def _of_heads(self, dtype: Any) -> dict[str, Product]:
        """Return the products for gates, inputs and steps of the heads."""
        shape = (self.context.embed_dim, *self._heads)
        products = {}
        for name in "zx":
            weight = self._matrix(name, shape, ((-3,), (-2, -1))).astype(dtype)
            products[name] = Product("bsd,dnp->bsnp", weight, (None, ax.HEADS, None), _X)
        weight = self._matrix("dt", shape[:2], ((-2,), (-1,))).astype(dtype)
        steps = Product("bsd,dn->bsn", weight, (None, ax.HEADS), _X[:3], jnp.float32)
        return products | {"dt": steps}

    def _of_groups(self, dtype: Any) -> dict[str, Product]:
        """Return the products for what groups of heads write and read, which no axis splits."""
        shape = (self.context.embed_dim, *self._groups)
        products = {}
        for name in "bc":
            weight = self._matrix(name, shape, ((-3,), (-2, -1))).astype(dtype)
            products[name] = Product("bsd,dgh->bsgh", weight, (None, None, None), _SHARED)
        return products

    def _matrix(self, name: str, shape: tuple[int, ...], matrix: Any, *, is_output=False) -> Array:
        shared = (ax.STATE_GROUPS, ax.STATE) if name in "bc" else (ax.HEADS, ax.HEAD_DIM)
        axes = (*shared, ax.EMBED) if is_output else (ax.EMBED, *shared)[: len(shape)]
        role = "attention_out" if is_output else "attention_in"
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role, matrix=matrix))

    def _vectors(self) -> tuple[dict[str, Array], dict[str, tuple[str | None, ...]]]:
        """Return the f32 parameters of each head or channel, and their axes in use."""
        config = self.config
        heads = self._heads
        groups = self._groups
        of_heads = (ax.HEADS, ax.HEAD_DIM)
        of_groups = (ax.STATE_GROUPS, ax.STATE)
        rows: dict[str, Declaration] = {
            "a_log": _vector(heads[:1], of_heads[:1], "log_range"),
            "dt_bias": _vector(heads[:1], of_heads[:1], "softplus_range"),
            "skip": _vector(heads[:1], of_heads[:1], "ones"),
            "norm": _vector(heads, of_heads, "ones", "norm"),
        }
        for name, sizes, axes in (
            ("x", heads, of_heads),
            ("b", groups, of_groups),
            ("c", groups, of_groups),
        ):
            rows[f"{name}_taps"] = Declaration(
                shape=(config.conv_length, *sizes),
                axes=(ax.TAPS, *axes),
                role="state",
                matrix=((-3,), (-2, -1)),
                init="fan_in",
            )
            if config.has_conv_bias:
                rows[f"{name}_bias"] = _vector(sizes, axes, "zeros")
            if config.has_projection_bias:
                rows[f"{name}_in_bias"] = _vector(sizes, axes, "zeros")
        if config.has_projection_bias:
            rows["z_in_bias"] = _vector(heads, of_heads, "zeros")
            rows["dt_in_bias"] = _vector(heads[:1], of_heads[:1], "zeros")
        in_use = {
            name: tuple(axis if axis == ax.HEADS else None for axis in row.axes)
            for name, row in rows.items()
        }
        return {name: declare(self, name, row) for name, row in rows.items()}, in_use


Mamba2Config.module = Mamba2


def _vector(
    shape: tuple[int, ...], axes: tuple[str, ...], init: Any, role: Role = "state"
) -> Declaration:
    return Declaration(shape=shape, axes=axes, role=role, matrix=None, init=init)
