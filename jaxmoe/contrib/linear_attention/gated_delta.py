# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: a state per head that decays, and forgets under a key before it writes to it.

    q, k, v, z = u Wq, u Wk, u Wv, u Wz
    q, k, v    = silu(convolve(q)), silu(convolve(k)), silu(convolve(v))
    q, k       = q / |q| / sqrt(K), k / |k|
    beta, g    = sigmoid(u Wbeta), -exp(a_log) softplus(u Wdt + dt_bias)
    y          = delta_rule(q, k, v, g, beta)                     `delta_rule.py`
    out        = (RMSNorm of each head(y) silu(z)) Wo

Heads of values share heads of keys in groups of neighbours. Heads are split over the tensor axis,
rows over the seq axis (`delta_rows.py`).
Sources: arXiv 2412.06464; layout: transformers' `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32

from jaxmoe.contrib.linear_attention.delta_rows import state_before_part
from jaxmoe.contrib.linear_attention.delta_rule import delta_rule
from jaxmoe.declarations import Declaration, Role, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, MixerActivations, RecurrentMixer, require_positive
from jaxmoe.layers.convolution import last_inputs
from jaxmoe.layers.mixers.recurrent import (
    ScanAxes,
    convolve_silu,
    scan_layer,
)
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream

_NORM_EPSILON = 1e-6
"""Term added to the squared norm of queries and keys."""


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaConfig(RecurrentMixer):
    """Gated DeltaNet: a state that decays and is corrected, in place of attention."""

    name: ClassVar[str] = "gated_delta"
    width_fields: ClassVar[tuple[str, ...]] = ("num_heads", "num_key_heads")
    axis_fields: ClassVar[Mapping[str, str]] = {
        ax.HEADS: "num_heads",
        ax.KV_HEADS: "num_key_heads",
    }

    num_heads: int = 8
    """Heads of values (N), each with a state of its own."""
    num_key_heads: int = 4
    """Heads of queries and keys (M), each shared by N / M heads of values."""
    head_dim: int = 32
    """Width of one value (V)."""
    key_dim: int = 32
    """Width of one query or key (K)."""
    conv_length: int = 4
    """Positions that the convolution before the state reads, the own one included."""
    chunk: int = 64
    """Tokens that are multiplied together between two states; changes the speed only."""

    def __post_init__(self):
        fields = ("num_heads", "num_key_heads", "head_dim", "key_dim", "conv_length", "chunk")
        require_positive(self.name, self, *fields)
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"{self.name}.num_heads={self.num_heads} must be a multiple of"
                f" {self.name}.num_key_heads={self.num_key_heads}"
            )

    @property
    def inner_dim(self) -> int:
        """Channels of the values of all heads."""
        return self.num_heads * self.head_dim

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        keys = 2 * self.num_key_heads * self.key_dim
        return embed_dim * (3 * self.inner_dim + keys + 2 * self.num_heads)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of reading, correcting and reading the state, at any length."""
        del length
        return 18.0 * self.inner_dim * self.key_dim

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer, whose backward pass stores one state per chunk."""
        heads = self.num_heads / shards(ax.ACT_HEADS)
        keys = 2 * self.num_key_heads / shards(ax.ACT_KV_HEADS) * self.key_dim
        values = heads * self.head_dim
        projected = (keys + 2 * values) * itemsize + 8 * heads
        states = 4 * values * self.key_dim / self.chunk
        return MixerActivations(
            projected=projected,
            output=values * itemsize,
            kept=2 * projected + 4 * values + states,
            working=2 * projected + 24 * (keys + values) + 24 * heads * self.chunk + 2 * states,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> DeltaCache:
        """Return the state before a sequence of any length, cut as the mesh is."""
        del slots
        reach = self.conv_length - 1
        keys = (reach, self.num_key_heads, self.key_dim)
        values = (reach, self.num_heads, self.head_dim)
        state = (self.num_heads, self.key_dim, self.head_dim)
        dtype = execution.precision.compute_dtype
        place = execution.placement.place

        def empty(shape: tuple[int, ...], axes: Any, dtype: Any) -> Array:
            return place(jnp.zeros((layers, batch, *shape), dtype), (None, *axes))

        return DeltaCache(
            q=empty(keys, _KEYS, dtype),
            k=empty(keys, _KEYS, dtype),
            v=empty(values, _VALUES, dtype),
            state=empty(state, _STATE, jnp.float32),
        )


class DeltaCache(NamedTuple):
    """State of earlier tokens, and the last inputs of the convolutions, by layer."""

    q: Float[Array, "L B R M K"]
    k: Float[Array, "L B R M K"]
    v: Float[Array, "L B R N V"]
    state: Float32[Array, "L B N K V"]


_KEYS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_KV_HEADS, None)
_VALUES = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
_STATE = (ax.ACT_BATCH, ax.ACT_HEADS, None, None)
_CACHE = {"q": _KEYS, "k": _KEYS, "v": _VALUES, "state": _STATE}
_OF_KEYS = (ax.KV_HEADS, ax.HEAD_DIM)
_OF_VALUES = (ax.HEADS, ax.HEAD_DIM)
Axes = tuple[str | None, ...]


class GatedDelta(nn.Module):
    """One layer of Gated DeltaNet."""

    config: GatedDeltaConfig
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
        """Mix the tokens of each document; see `jaxmoe.layers.mixers.mamba2.Mamba2`."""
        del layer
        placement = self.execution.placement
        dtype = self.execution.precision.compute_dtype
        projected, projected_axes = self.project(x.astype(dtype))
        weights, axes = self._weights()
        scan_axes = ScanAxes(projected_axes, axes, _VALUES, _CACHE)
        y, outputs = scan_layer(self._scan, projected, weights, tokens, cache, placement, scan_axes)
        config = self.config
        weight = self.matrix(
            "o",
            (config.num_heads, config.head_dim, self.context.embed_dim),
            (*_OF_VALUES, ax.EMBED),
            ((-3, -2), (-1,)),
            role="attention_out",
        )
        product = Product("bsnv,nvd->bsd", weight.astype(dtype), (ax.HEADS, None, None), _VALUES)
        y = into_stream(y, product, placement, form=self.execution.tensor_products)
        return y, outputs

    def _scan(
        self,
        projected: dict[str, Array],
        weights: dict[str, Array],
        segments: Array,
        layer_cache: dict[str, Array],
        *,
        parts: tuple[str, ...],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gated and normed output of the heads of this device, and the new state.

        Args:
            projected: Projections of the stream.
            weights: Parameters of heads and channels.
            segments: Document of each token, 0 for padding.
            layer_cache: Arrays of the layer's cache; none without one.
            parts: Mesh axes over which rows are cut.
        """
        new = {}
        inputs = {}
        for name in "qkv":
            before = layer_cache.get(name)
            taps = weights[f"{name}_taps"]
            inputs[name] = convolve_silu(projected[name], taps, None, before, segments, parts)
            if layer_cache:
                lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
                new[name] = last_inputs(projected[name], layer_cache[name], lengths)
        dtype = inputs["v"].dtype
        q = _unit(inputs["q"]) * jnp.float32(self.config.key_dim**-0.5)
        k = _unit(inputs["k"])
        beta = jax.nn.sigmoid(projected["beta"])
        decay = self.decay(projected, weights)
        arrays = (q.astype(dtype), k.astype(dtype), inputs["v"], decay, beta)
        initial = layer_cache.get("state")
        chunk = self.config.chunk
        if parts:
            initial = state_before_part(arrays, segments, parts, chunk=chunk)
        y, state = delta_rule(*arrays, segment_ids=segments, initial=initial, chunk=chunk)
        if layer_cache:
            new["state"] = state
        y = rms_norm(y, weights["norm"], self.context.norm_epsilon)
        return (y * self.gate(projected, weights)).astype(dtype), new

    def project(self, x: Float[Array, "B S D"]) -> tuple[dict[str, Array], dict[str, Axes]]:
        """Return the projections of the stream by name, and their logical axes.

        Args:
            x: Normed input in the compute dtype.
        """
        products = self.head_products("z", "dt")
        projected = out_of_stream(
            x, products, self.execution.placement, form=self.execution.tensor_products
        )
        return projected, {name: product.spread_axes for name, product in products.items()}

    def decay(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the logarithm of the decays of the heads of this device [B S N].

        Args:
            projected: Projections of the stream.
            weights: Parameters of heads and channels.
        """
        step = jax.nn.softplus(projected["dt"] + weights["dt_bias"][None, None])
        return -jnp.exp(weights["a_log"])[None, None] * step

    def gate(self, projected: dict[str, Array], weights: dict[str, Array]) -> Float32[Array, ...]:
        """Return the factors of the normed output of the heads of this device [B S N V].

        Args:
            projected: Projections of the stream.
            weights: Parameters of heads and channels.
        """
        del weights
        return jax.nn.silu(projected["z"].astype(jnp.float32))

    def head_products(self, *names: str) -> dict[str, Product]:
        """Return the products for queries, keys, values, strengths of writing, and more by name.

        Args:
            names: Further products: `z`, of the width of values, and `dt`, a number per head.
        """
        config = self.config
        width = self.context.embed_dim
        dtype = self.execution.precision.compute_dtype
        products = {}
        keys = (width, config.num_key_heads, config.key_dim)
        values = (width, config.num_heads, config.head_dim)
        for name in ("q", "k", "v", *names, "beta"):
            if name in ("dt", "beta"):
                weight = self.matrix(name, values[:2], (ax.EMBED, ax.HEADS), ((-2,), (-1,)))
                options = (None, ax.HEADS), _VALUES[:3], jnp.float32
                products[name] = Product("bsd,dn->bsn", weight.astype(dtype), *options)
                continue
            is_key = name in "qk"
            axes = _OF_KEYS if is_key else _OF_VALUES
            shape = keys if is_key else values
            weight = self.matrix(name, shape, (ax.EMBED, *axes), ((-3,), (-2, -1)))
            use = (None, axes[0], None), _KEYS if is_key else _VALUES
            products[name] = Product("bsd,dnh->bsnh", weight.astype(dtype), *use)
        return products

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        matrix: Any,
        role: Role = "attention_in",
    ) -> Array:
        """Declare a matrix.

        Args:
            name: Name in the module.
            shape: Sizes of its dimensions.
            axes: Logical axes.
            matrix: Its input and output dimensions.
            role: Role in the table of parameters.
        """
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role, matrix=matrix))

    def vectors(self) -> dict[str, Declaration]:
        """Return the declarations of the parameters of heads and of the norm."""
        heads = (self.config.num_heads,)
        return {
            "a_log": _vector(heads, (ax.HEADS,), "log_range"),
            "dt_bias": _vector(heads, (ax.HEADS,), "softplus_range"),
            "norm": _vector((self.config.head_dim,), (ax.NORM,), "ones", "norm"),
        }

    def _weights(self) -> tuple[dict[str, Array], dict[str, Axes]]:
        """Return the f32 parameters of heads and channels, and their axes in use."""
        config = self.config
        rows = self.vectors()
        keys = (config.num_key_heads, config.key_dim)
        values = (config.num_heads, config.head_dim)
        for name, sizes, axes in (
            ("q", keys, _OF_KEYS),
            ("k", keys, _OF_KEYS),
            ("v", values, _OF_VALUES),
        ):
            rows[f"{name}_taps"] = Declaration(
                shape=(config.conv_length, *sizes),
                axes=(ax.TAPS, *axes),
                role="state",
                matrix=((-3,), (-2, -1)),
                init="fan_in",
            )
        split = (ax.HEADS, ax.KV_HEADS)
        in_use = {
            name: tuple(axis if axis in split else None for axis in row.axes)
            for name, row in rows.items()
        }
        return {name: declare(self, name, row) for name, row in rows.items()}, in_use


GatedDeltaConfig.module = GatedDelta


def _unit(x: Float[Array, "B S M K"]) -> Float32[Array, "B S M K"]:
    """Return the vectors with norm 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(_NORM_EPSILON))


def _vector(
    shape: tuple[int, ...], axes: tuple[str, ...], init: Any, role: Role = "state"
) -> Declaration:
    return Declaration(shape=shape, axes=axes, role=role, matrix=None, init=init)
