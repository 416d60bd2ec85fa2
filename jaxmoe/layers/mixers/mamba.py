# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mamba: a recurrent state per channel whose step, input and output depend on the token.

    x, z      = u Wx, u Wz
    x         = silu(convolve(x))
    r, b, c   = x Wr, x Wb, x Wc
    step      = softplus(r Wdt + dt_bias)
    h_t       = exp(-exp(a_log) step_t) h_{t-1} + step_t x_t b_t^T        [C H]
    out       = ((h_t c_t + skip x_t) silu(z)) Wo

With `inner_norms="rms"` r, b and c are normed before they are used (arXiv 2403.19887, section 3).
Channels are split over the tensor axis, rows over the seq axis (`cut_rows.py`).
Source: arXiv 2312.00752 (section 3); initial values as in transformers' `MambaMixer`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
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
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from pallas_kernels import selective_scan
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig(SelectiveMixer):
    """Mamba: a selective state per channel in place of attention."""

    name: ClassVar[str] = "mamba"
    operation: ClassVar[str] = "selective_scan"
    width_fields: ClassVar[tuple[str, ...]] = ("inner_dim", "step_rank")
    axis_fields: ClassVar[Mapping[str, str]] = {ax.MLP: "inner_dim"}

    inner_dim: int = 256
    """Channels (C); usually twice model.embed_dim."""
    state_dim: int = 16
    """Values of the state per channel (H)."""
    step_rank: int = 8
    """Width through which the step of a channel is computed; usually model.embed_dim / 16."""
    inner_norms: Literal["none", "rms"] = "none"
    """Norm of what the step, the input and the output of the state are computed from: none, or
    RMSNorm (Jamba)."""
    chunk: int = 16
    """Tokens that are computed together between two states; changes the speed only."""

    def __post_init__(self):
        fields = ("inner_dim", "state_dim", "step_rank", "conv_length", "chunk")
        require_positive("mamba", self, *fields)

    @property
    def num_heads(self) -> int:
        """Channels, each with a state of its own."""
        return self.inner_dim

    @property
    def head_dim(self) -> int:
        """Width of one channel."""
        return 1

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        inside = 2 * self.state_dim + 2 * self.step_rank
        return self.inner_dim * (3 * embed_dim + inside)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of writing and reading the state per token, at any length."""
        del length
        return 18.0 * self.inner_dim * self.state_dim

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer, which keeps one state per chunk."""
        channels = self.inner_dim / shards(ax.ACT_MLP)
        narrow = channels * itemsize
        wide = 4 * channels
        states = wide * self.state_dim / self.chunk
        return MixerActivations(
            projected=2 * narrow,
            output=narrow,
            kept=4 * narrow + wide + states,  # also of the scan: inputs, steps, outputs, states
            working=6 * narrow + 6 * wide + 2 * states,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> MambaCache:
        """Return the state before a sequence of any length, cut as the mesh is."""
        del slots
        inputs = (layers, batch, self.conv_length - 1, self.inner_dim)
        state = (layers, batch, self.inner_dim, self.state_dim)
        place = execution.placement.place
        dtype = execution.precision.compute_dtype
        return MambaCache(
            x=place(jnp.zeros(inputs, dtype), (None, *_X)),
            state=place(jnp.zeros(state, jnp.float32), (None, *_STATE)),
        )


class MambaCache(NamedTuple):
    """State of earlier tokens, and the last inputs of the convolution, by layer."""

    x: Float[Array, "L B R C"]
    state: Float[Array, "L B C H"]


_X = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)
_STATE = (ax.ACT_BATCH, ax.ACT_MLP, None)


class Mamba(nn.Module):
    """One layer of Mamba."""

    config: MambaConfig
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
        config = self.config
        placement = self.execution.placement
        width = self.context.embed_dim
        dtype = self.execution.precision.compute_dtype
        form = self.execution.tensor_products
        products = {}
        for name in "xz":
            weight = self._declare(name, (width, config.inner_dim), (ax.EMBED, ax.MLP))
            products[name] = Product("bsd,dc->bsc", weight.astype(dtype), (None, ax.MLP), _X)
        projected = out_of_stream(x.astype(dtype), products, placement, form=form)
        weights, axes = self._weights(dtype)
        scan = functools.partial(self._scan, axes=placement.mesh_axes(ax.ACT_MLP))
        scan_axes = ScanAxes(dict.fromkeys("xz", _X), axes, _X, {"x": _X, "state": _STATE})
        y, outputs = scan_layer(scan, projected, weights, tokens, cache, placement, scan_axes)
        weight = self._declare(
            "o", (config.inner_dim, width), (ax.MLP, ax.EMBED), role="attention_out"
        )
        product = Product("bsc,cd->bsd", weight.astype(dtype), (ax.MLP, None), _X)
        y = into_stream(y, product, placement, form=form)
        if config.has_projection_bias:
            y = y + self._vector("o_bias", (width,), (ax.NORM,)).astype(dtype)[None, None]
        return y, outputs

    def _scan(
        self,
        projected: dict[str, Array],
        weights: dict[str, Array],
        segments: Array,
        layer_cache: dict[str, Array],
        *,
        axes: tuple[str, ...],
        parts: tuple[str, ...],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gated output of the channels of this device, and the new state."""
        new = {}
        if self.config.has_projection_bias:
            projected = with_biases(projected, weights)
        taps = weights["taps"]
        bias = weights.get("bias")
        x = convolve_silu(projected["x"], taps, bias, layer_cache.get("x"), segments, parts)
        outputs = {
            name: jnp.einsum("bsc,ch->bsh", x, weights[name], preferred_element_type=jnp.float32)
            for name in "rbc"
        }
        if axes:
            outputs = jax.lax.psum(outputs, axes)
        if self.config.inner_norms == "rms":
            epsilon = self.context.norm_epsilon
            outputs = {
                name: rms_norm(part, weights[f"{name}_norm"], epsilon)
                for name, part in outputs.items()
            }
        low = outputs["r"].astype(x.dtype)
        step = jnp.einsum("bsr,rc->bsc", low, weights["dt"], preferred_element_type=jnp.float32)
        step = jax.nn.softplus(step + weights["dt_bias"][None, None])
        decay = -jnp.exp(weights["a_log"])
        run = functools.partial(
            selective_scan,
            x,
            step,
            decay,
            outputs["b"].astype(x.dtype),
            outputs["c"].astype(x.dtype),
            segment_ids=segments,
            chunk=self.config.chunk,
            implementation=self.execution.implementations.selective_scan,
        )

        def factor(time: Array) -> Array:
            return jnp.exp(time[..., None] * decay[None])

        y, state = run_rows(run, layer_cache.get("state"), step, factor, segments, parts)
        if layer_cache:
            lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
            new = {"x": last_inputs(projected["x"], layer_cache["x"], lengths), "state": state}
        return gate_output(y, x, projected["z"], weights["skip"]).astype(x.dtype), new

    def _weights(self, dtype: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return what is used beside the projections of the stream, and its axes in use."""
        config = self.config
        channels = self.config.inner_dim
        sizes = {"r": config.step_rank, "b": config.state_dim, "c": config.state_dim}
        weights = {
            name: self._declare(name, (channels, size), (ax.MLP, ax.STATE)).astype(dtype)
            for name, size in sizes.items()
        }
        dt = self._declare("dt", (config.step_rank, channels), (ax.STATE, ax.MLP))
        weights["dt"] = dt.astype(dtype)
        taps = Declaration(
            shape=(config.conv_length, channels),
            axes=(ax.TAPS, ax.MLP),
            role="state",
            init="fan_in",
        )
        weights["taps"] = declare(self, "taps", taps)
        vectors: dict[str, tuple[tuple[int, ...], Any]] = {
            "skip": ((channels,), "ones"),
            "dt_bias": ((channels,), "softplus_range"),
            "a_log": ((channels, config.state_dim), "log_range"),
        }
        if config.has_conv_bias:
            vectors["bias"] = ((channels,), "zeros")
        if config.has_projection_bias:
            vectors |= {f"{name}_in_bias": ((channels,), "zeros") for name in "xz"}
        for name, (shape, init) in vectors.items():
            weights[name] = self._vector(name, shape, (ax.MLP, ax.STATE)[: len(shape)], init)
        in_use: dict[str, tuple[str | None, ...]] = {name: (ax.MLP,) for name in vectors}
        in_use |= {"dt": (None, ax.MLP), "taps": (None, ax.MLP)}
        in_use |= {name: (ax.MLP, None) for name in ("r", "b", "c", "a_log")}
        if config.inner_norms == "rms":
            for name, size in sizes.items():
                gain = self._vector(f"{name}_norm", (size,), (ax.NORM,), "ones", "norm")
                weights[f"{name}_norm"], in_use[f"{name}_norm"] = gain, (None,)
        return weights, in_use

    def _declare(self, name, shape, axes, role: Any = "attention_in") -> Array:
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role))

    def _vector(self, name, shape, axes, init: Any = "zeros", role: Any = "state") -> Array:
        row = Declaration(shape=shape, axes=axes, role=role, matrix=None, init=init)
        return declare(self, name, row)


MambaConfig.module = Mamba
