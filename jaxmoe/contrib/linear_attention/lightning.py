# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lightning attention: linear attention with a fixed decay per head, as in MiniMax-01.

    q, k, v, z = silu(u Wq), silu(u Wk), silu(u Wv), u Wz
    S_t        = exp(-rate) S_{t-1} + v_t k_t^T                   [H H] per head
    y_t        = S_t q_t
    out        = (RMSNorm over all heads(y) sigmoid(z)) Wo
    rate       = 2^(-8 (n + 1) / N) (1 - l / (L - 1 + e) + e)     head n, layer l of L, e = 1e-5

That is Mamba-2's recurrence with steps of length 1. Where the decay depends on the layer, `l` is
first_layer + layer_step i, with i the number of the layer in its stack (`LayerInputs`): a loop
over layers computes one program for all of them. Heads are split over the tensor axis, rows over
the seq axis.
Sources: arXiv 2501.08313 (section 2.2), 2405.17381; rates: transformers'
`MiniMaxLightningAttention`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import (
    LayerContext,
    MixerActivations,
    MixerBase,
    RecurrentMixer,
    require_positive,
)
from jaxmoe.layers.mixers.recurrent import (
    ScanAxes,
    run_rows,
    scan_layer,
)
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from pallas_kernels import state_space_dual
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream

_RATE_EPSILON = 1e-5


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LightningConfig(RecurrentMixer):
    """Lightning attention: linear attention with a fixed decay per head, in place of attention."""

    name: ClassVar[str] = "lightning"
    operation: ClassVar[str | None] = "state_space_dual"
    layer_fields: ClassVar[tuple[str, ...]] = ("first_layer", "layer_step")

    num_heads: int = 4
    """Heads (N), each with a state of its own."""
    head_dim: int = 32
    """Width of one query, key or value (H)."""
    decay_layers: int | None = None
    """Layers of the model (L), over which the decay falls to almost none; None: each layer has the
    decay of the first."""
    first_layer: int = 0
    """Number in the model of the first layer of the stack; read with decay_layers alone."""
    layer_step: int = 1
    """Layers of the model from one layer of the stack to the next: the length of the period in
    model.layers; read with decay_layers alone."""
    norm_epsilon: float = 1e-6
    """Term added to the mean square in the RMSNorm of the output; MiniMax has 1e-6 here in models
    of another model.norm_epsilon."""
    chunk: int = 64
    """Tokens that are multiplied together between two states; changes the speed only."""

    def __post_init__(self):
        fields = ("num_heads", "head_dim", "layer_step", "norm_epsilon", "chunk")
        require_positive("lightning", self, *fields)
        if self.decay_layers is None:
            return
        require_positive("lightning", self, "decay_layers")
        if not 0 <= self.first_layer < self.decay_layers:
            raise ValueError(
                f"lightning.first_layer={self.first_layer} must be in 0 to"
                f" {self.decay_layers - 1}: lightning.decay_layers={self.decay_layers}"
            )

    @staticmethod
    def number_layers(mixers: Sequence[MixerBase]) -> tuple[MixerBase, ...]:
        """Return the mixers of a model with the layer numbers of those that are lightning.

        Args:
            mixers: Mixer of each layer of the model, in order.
        """
        count = len(mixers)
        period = next((p for p in range(1, count // 2 + 1) if _repeats(mixers, p)), 0)
        looped = count - count % period if period else 0
        numbered = []
        for index, mixer in enumerate(mixers):
            if isinstance(mixer, LightningConfig):
                place, step = (index % period, period) if index < looped else (index, 1)
                mixer = dataclasses.replace(mixer, first_layer=place, layer_step=step)
            numbered.append(mixer)
        return tuple(numbered)

    def check_layers(
        self, mixers: Sequence[MixerBase], periods: Callable[[], Sequence[Sequence[MixerBase]]]
    ) -> None:
        """Refuse numbers of layers that are not those of the model, where that shows."""
        if self.decay_layers is None:
            return
        places = [
            (scan, len(period), place)
            for scan, period in enumerate(periods())
            for place, mixer in enumerate(period)
            if mixer == self
        ]
        scan, length, place = places[0]
        is_wrong = self.layer_step != length or (scan == 0 and self.first_layer != place)
        if len(places) > 1 or is_wrong:
            raise ValueError(
                f"model.layers: lightning with first_layer={self.first_layer} and"
                f" layer_step={self.layer_step} is layer {place} of {len(places)} periods of"
                f" {length} layers, and its decay depends on the number of the layer: let"
                " LightningConfig.number_layers fill both in for the mixers of all layers, or set"
                " decay_layers to None"
            )

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    def rates(self, layer: LayerInputs | None) -> Float32[Array, " N"]:
        """Return by how much the logarithm of each head's state falls per token.

        Args:
            layer: Number of the layer in its stack; None for the first.
        """
        heads = jnp.arange(1, self.num_heads + 1, dtype=jnp.float32)
        rates = jnp.exp2(-8.0 / self.num_heads * heads)
        if self.decay_layers is None:
            return rates
        place = jnp.int32(0) if layer is None else layer.stack_layer
        number = (self.first_layer + self.layer_step * place).astype(jnp.float32)
        share = 1.0 - number / (self.decay_layers - 1 + _RATE_EPSILON) + _RATE_EPSILON
        return rates * share[None]

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        return 5 * embed_dim * self.inner_dim

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of writing and reading the state per token, at any length."""
        del length
        return 12.0 * self.inner_dim * self.head_dim

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer, whose backward pass stores one state per chunk."""
        channels = self.inner_dim / shards(ax.ACT_HEADS)
        narrow = channels * itemsize
        states = 4 * channels * self.head_dim / self.chunk
        return MixerActivations(
            projected=4 * narrow,
            output=narrow,
            kept=9 * narrow,
            working=8 * narrow + 24 * channels + states,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> LightningCache:
        """Return the state before a sequence of any length, cut as the mesh is."""
        del slots
        shape = (layers, batch, self.num_heads, self.head_dim, self.head_dim)
        state = jnp.zeros(shape, jnp.float32)
        return LightningCache(state=execution.placement.place(state, (None, *_STATE)))


class LightningCache(NamedTuple):
    """State of earlier tokens, by layer; values come before keys."""

    state: Float32[Array, "L B N H H"]


_X = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
_STATE = (ax.ACT_BATCH, ax.ACT_HEADS, None, None)
_HEADS = (ax.HEADS, ax.HEAD_DIM)


class Lightning(nn.Module):
    """One layer of lightning attention."""

    config: LightningConfig
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
        config = self.config
        placement = self.execution.placement
        dtype = self.execution.precision.compute_dtype
        form = self.execution.tensor_products
        sizes = (config.num_heads, config.head_dim)
        products = {}
        for name in "qkvz":
            row = Declaration(
                shape=(self.context.embed_dim, *sizes),
                axes=(ax.EMBED, *_HEADS),
                role="attention_in",
                matrix=((-3,), (-2, -1)),
            )
            weight = declare(self, name, row).astype(dtype)
            products[name] = Product("bsd,dnh->bsnh", weight, (None, ax.HEADS, None), _X)
        projected = out_of_stream(x.astype(dtype), products, placement, form=form)
        projected |= self.heads({name: projected[name] for name in "qkv"}, tokens)
        gain = Declaration(shape=sizes, axes=_HEADS, role="norm", matrix=None, init="ones")
        weights = {"norm": declare(self, "norm", gain), "rates": config.rates(layer)}
        scan = functools.partial(self._scan, axes=placement.mesh_axes(ax.ACT_HEADS))
        weight_axes = {"norm": (ax.HEADS, None), "rates": (ax.HEADS,)}
        scan_axes = ScanAxes(dict.fromkeys("qkvz", _X), weight_axes, _X, {"state": _STATE})
        y, outputs = scan_layer(scan, projected, weights, tokens, cache, placement, scan_axes)
        row = Declaration(
            shape=(*sizes, self.context.embed_dim),
            axes=(*_HEADS, ax.EMBED),
            role="attention_out",
            matrix=((-3, -2), (-1,)),
        )
        weight = declare(self, "o", row).astype(dtype)
        product = Product("bsnh,nhd->bsd", weight, (ax.HEADS, None, None), _X)
        y = into_stream(y, product, placement, form=form)
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
        """Return the normed and gated output of the heads of this device, and the new state.

        Args:
            projected: Projections of the stream.
            weights: Gains of the norm, and rates of decay.
            segments: Document of each token, 0 for padding.
            layer_cache: Arrays of the layer's cache; none without one.
            axes: Mesh axes over which heads are split.
            parts: Mesh axes over which rows are cut.
        """
        q, k, v = (projected[name] for name in "qkv")
        step = jnp.ones(v.shape[:3], jnp.float32)
        decay = -weights["rates"]
        run: Callable[..., Any] = functools.partial(
            state_space_dual,
            v,
            step,
            decay,
            k,
            q,
            segment_ids=segments,
            chunk=self.config.chunk,
            implementation=self.execution.implementations.state_space_dual,
        )

        def factor(time: Array) -> Array:
            return jnp.exp(time * decay[None])[..., None, None]

        y, state = run_rows(run, layer_cache.get("state"), step, factor, segments, parts)
        y = self.norm(y.astype(jnp.float32), axes)
        y = y * weights["norm"][None, None] * jax.nn.sigmoid(projected["z"].astype(jnp.float32))
        return y.astype(v.dtype), {"state": state} if layer_cache else {}

    def heads(self, projected: dict[str, Array], tokens: TokenInputs) -> dict[str, Array]:
        """Return queries, keys and values of the projections of the stream.

        Args:
            projected: Projections [B S N H] by name.
            tokens: Positions.
        """
        del tokens
        return {name: jax.nn.silu(x) for name, x in projected.items()}

    def norm(self, y: Float32[Array, "B S n H"], axes: tuple[str, ...]) -> Float32[Array, ...]:
        """Return the output of the heads of this device, normed over the heads of all devices.

        Args:
            y: Output of the heads of this device.
            axes: Mesh axes over which heads are split.
        """
        total = jnp.sum(y * y, axis=(-2, -1), keepdims=True)
        if axes:
            total = jax.lax.psum(total, axes)
        mean = total / jnp.float32(self.config.inner_dim)
        return y * jax.lax.rsqrt(mean + jnp.float32(self.config.norm_epsilon))


LightningConfig.module = Lightning


def _repeats(mixers: Sequence[MixerBase], period: int) -> bool:
    """Return whether the mixers repeat with a period, apart from a rest shorter than it."""
    looped = len(mixers) - len(mixers) % period
    return all(mixers[i] == mixers[i % period] for i in range(looped))
