# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A gated convolution over a few positions in place of attention, as in LFM2.

    b, c, x = u Wb, u Wc, u Wx
    out     = (c convolve(b x)) Wo            per channel, causal, within a document

A cache holds the last inputs b x of the convolution and nothing else. Channels are split over the
tensor axis, rows over the seq axis.
Source: transformers' `Lfm2MoeShortConv`; LFM2, arXiv 2511.23404.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, Role, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, MixerActivations, RecurrentMixer, require_positive
from jaxmoe.layers.convolution import convolve, last_inputs
from jaxmoe.layers.mixers.cut_rows import inputs_before
from jaxmoe.layers.mixers.recurrent import (
    ScanAxes,
    scan_layer,
    with_biases,
)
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolutionConfig(RecurrentMixer):
    """A gated convolution over a few positions in place of attention (LFM2)."""

    name: ClassVar[str] = "short_convolution"
    width_fields: ClassVar[tuple[str, ...]] = ("num_channels",)
    axis_fields: ClassVar[Mapping[str, str]] = {ax.MLP: "num_channels"}

    num_channels: int = 128
    """Channels (C), each with a convolution of its own; usually model.embed_dim."""
    conv_length: int = 3
    """Positions that the convolution reads, the own one included."""
    has_conv_bias: bool = False
    """Whether the convolution has a bias per channel."""
    has_projection_bias: bool = False
    """Whether the projections from and to the residual stream have biases."""

    def __post_init__(self):
        require_positive("short_convolution", self, "num_channels", "conv_length")

    @property
    def num_heads(self) -> int:
        """Channels, each with a state of its own."""
        return self.num_channels

    @property
    def head_dim(self) -> int:
        """Width of one channel."""
        return 1

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        return 4 * embed_dim * self.num_channels

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of the convolution and its gates per token, at any length."""
        del length
        return 6.0 * self.num_channels * (self.conv_length + 1)

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer."""
        channels = self.num_channels / shards(ax.ACT_MLP) * itemsize
        return MixerActivations(
            projected=3 * channels,
            output=channels,
            kept=6 * channels,  # the projections, b x, its convolution, the output
            working=10 * channels,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> ShortConvolutionCache:
        """Return the inputs before a sequence of any length, cut as the mesh is."""
        del slots
        shape = (layers, batch, self.conv_length - 1, self.num_channels)
        inputs = jnp.zeros(shape, execution.precision.compute_dtype)
        return ShortConvolutionCache(x=execution.placement.place(inputs, (None, *_X)))


class ShortConvolutionCache(NamedTuple):
    """Last inputs of the convolution, by layer."""

    x: Float[Array, "L B R C"]


_X = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)


class ShortConvolution(nn.Module):
    """One layer of gated convolutions."""

    config: ShortConvolutionConfig
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
        channels = self.config.num_channels
        width = self.context.embed_dim
        placement = self.execution.placement
        dtype = self.execution.precision.compute_dtype
        form = self.execution.tensor_products
        products = {}
        for name in "bcx":
            weight = self._declare(name, (width, channels), (ax.EMBED, ax.MLP))
            products[name] = Product("bsd,dc->bsc", weight.astype(dtype), (None, ax.MLP), _X)
        projected = out_of_stream(x.astype(dtype), products, placement, form=form)
        weights, axes = self._weights()
        scan_axes = ScanAxes(dict.fromkeys("bcx", _X), axes, _X, {"x": _X})
        y, outputs = scan_layer(
            self._convolve, projected, weights, tokens, cache, placement, scan_axes
        )
        weight = self._declare("o", (channels, width), (ax.MLP, ax.EMBED), role="attention_out")
        product = Product("bsc,cd->bsd", weight.astype(dtype), (ax.MLP, None), _X)
        y = into_stream(y, product, placement, form=form)
        if self.config.has_projection_bias:
            y = y + self._vector("o_bias", width, ax.NORM).astype(dtype)[None, None]
        return y, outputs

    def _convolve(
        self,
        projected: dict[str, Array],
        weights: dict[str, Array],
        segments: Array,
        layer_cache: dict[str, Array],
        *,
        parts: tuple[str, ...],
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gated output of the channels of this device, and their last inputs."""
        if self.config.has_projection_bias:
            projected = with_biases(projected, weights)
        x = projected["b"] * projected["x"]
        before = layer_cache.get("x")
        if parts:
            before = inputs_before(x, segments, self.config.conv_length - 1, parts)
        taps = weights["taps"]
        y = convolve(x, taps, weights.get("bias"), segment_ids=segments, before=before)
        new = {}
        if layer_cache:
            lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
            new["x"] = last_inputs(x, layer_cache["x"], lengths)
        return projected["c"] * y, new

    def _weights(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the f32 parameters of the channels, and their axes in use."""
        config = self.config
        channels = config.num_channels
        taps = Declaration(
            shape=(config.conv_length, channels),
            axes=(ax.TAPS, ax.MLP),
            role="state",
            init="fan_in",
        )
        weights = {"taps": declare(self, "taps", taps)}
        axes: dict[str, Any] = {"taps": (None, ax.MLP)}
        names = ["bias"] if config.has_conv_bias else []
        if config.has_projection_bias:
            names += [f"{name}_in_bias" for name in "bcx"]
        for name in names:
            weights[name] = self._vector(name, channels, ax.MLP)
            axes[name] = (ax.MLP,)
        return weights, axes

    def _declare(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], role: Role = "attention_in"
    ) -> Array:
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role))

    def _vector(self, name: str, size: int, axis: str) -> Array:
        row = Declaration(shape=(size,), axes=(axis,), role="state", matrix=None, init="zeros")
        return declare(self, name, row)


ShortConvolutionConfig.module = ShortConvolution
