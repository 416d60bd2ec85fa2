# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of attention heads: a router chooses for each token who makes its queries and outputs.

    z     = x Wr                                        [E], f32
    e_k   = the K experts of highest z                  g = softmax of their z
    q_k   = x Wq[e_k]                                   M heads of H features for each k
    k, v  = x Wk, x Wv                                  M heads, shared by all experts
    o_km  = softmax(scale RoPE(q_km) RoPE(k_m)^T + mask) v_m
    y     = sum_k g_k concat_m(o_km) Wo[e_k] + b

A cache holds the M heads of keys and values. Rows are sorted by expert on each device, which has
the matrices of all experts whole, or its heads of them: no token moves. The router has no balancing
loss.

Sources: mixture of attention heads (arXiv 2210.05144), JetMoE (arXiv 2404.07413, section 2.2).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int

from jaxmoe.declarations import Declaration, declare
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive
from jaxmoe.layers.mixers.attention import Attention, AttentionConfig
from jaxmoe.layers.mixers.attention_parts import add_output_bias
from jaxmoe.layers.observer import observer_of
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from pallas_kernels import grouped_matmul
from sharding import axes as ax
from sharding.expert_parallel.permute import sort_by_expert
from sharding.products.tensor_parallel import Product, out_of_stream

_ROWS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
_HEADS = (*_ROWS, ax.ACT_HEADS, None)
_CHOICE = (*_ROWS, None)
_IN = ((-3,), (-2, -1))
_OUT = ((-3, -2), (-1,))


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertHeadsConfig(AttentionConfig):
    """Attention whose queries and outputs are made by experts that a router chooses."""

    name: ClassVar[str] = "expert_heads"
    can_quantize: ClassVar[bool] = False
    width_fields: ClassVar[tuple[str, ...]] = ("num_kv_heads",)

    num_heads: int = 8
    """Query heads of a token (N): top_k times num_kv_heads."""
    num_experts: int = 8
    """Experts of queries and outputs (E)."""
    top_k: int = 2
    """Experts of a token (K)."""

    def __post_init__(self):
        AttentionConfig.__post_init__(self)
        require_positive("attention", self, "num_experts", "top_k")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"attention.top_k={self.top_k} must not exceed"
                f" attention.num_experts={self.num_experts}"
            )
        if self.num_heads != self.top_k * self.num_kv_heads:
            raise ValueError(
                f"attention.num_heads={self.num_heads} must be attention.top_k={self.top_k} times"
                f" attention.num_kv_heads={self.num_kv_heads}: every expert has a query for each"
                " head of keys"
            )
        if self.is_gated or (self.options and (self.options.has_bias or self.options.has_sinks)):
            raise ValueError(
                "attention.is_gated and the biases and sinks of attention.options are not for"
                " expert_heads, whose only bias is that of the output: leave them out"
            )

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer, all experts included."""
        heads = self.num_kv_heads * self.head_dim
        return embed_dim * (2 * heads + self.num_experts * (2 * heads + 1))


class ExpertHeads(Attention):
    """One layer of attention with experts of heads."""

    config: ExpertHeadsConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None = None,
    ) -> tuple[Float[Array, "B S D"], MixerOutputs]:
        """Attend; see `jaxmoe.layers.mixers.attention.Attention`."""
        config = self.config
        config.check_precision(self.execution.precision)
        placement = self.execution.placement
        x = x.astype(self.execution.precision.compute_dtype)
        heads = out_of_stream(x, self._keys_and_values(x.dtype), placement)
        chosen, gates, heads["q"] = self._choose(x)
        placed = self._place(heads, tokens)
        out, logits, entries, carry = self.attend(placed, tokens, cache, layer)
        y = self._combine(out, chosen, gates)
        if config.extras.has_output_bias:
            y = add_output_bias(self, y)
        observations = observer_of(self.execution).attention(logits, tokens.token_mask)
        return y, MixerOutputs(cache=entries, observations=observations, carry=carry)

    def _keys_and_values(self, dtype: Any) -> dict[str, Product]:
        """Return the products for keys and values."""
        config = self.config
        shape = (self.context.embed_dim, config.num_kv_heads, config.head_dim)
        axes = (ax.EMBED, ax.KV_HEADS, ax.HEAD_DIM)
        spread = (*_ROWS, ax.ACT_KV_HEADS, None)
        products = {}
        for name in "kv":
            row = Declaration(shape=shape, axes=axes, role="attention_in", matrix=_IN)
            weight = declare(self, name, row).astype(dtype)
            products[name] = Product("bsd,dnh->bsnh", weight, (None, ax.KV_HEADS, None), spread)
        return products

    def _choose(
        self, x: Float[Array, "B S D"]
    ) -> tuple[Int[Array, "B S K"], Float32[Array, "B S K"], Float[Array, "B S N H"]]:
        """Return the experts of each token, their gates, and their queries."""
        config = self.config
        width = self.context.embed_dim
        share = config.top_k / config.num_experts
        router = declare(
            self,
            "router",
            Declaration(
                shape=(width, config.num_experts), axes=(ax.EMBED, ax.ROUTER_OUT), role="router"
            ),
        )
        weight = declare(
            self,
            "q",
            Declaration(
                shape=(config.num_experts, width, config.num_kv_heads, config.head_dim),
                axes=(ax.HEAD_EXPERTS, ax.EMBED, ax.KV_HEADS, ax.HEAD_DIM),
                role="attention_in",
                matrix=_IN,
                share=share,
            ),
        )

        def run(x: Array, router: Array, weight: Array, *, batch_axes: tuple[str, ...]) -> Any:
            del batch_axes
            logits = jnp.einsum(
                "bsd,de->bse", x.astype(jnp.float32), router, preferred_element_type=jnp.float32
            )
            values, chosen = jax.lax.top_k(logits, config.top_k)
            rows = jnp.repeat(x.reshape(-1, x.shape[-1]), config.top_k, axis=0)
            queries = _multiply(rows, weight.reshape(*weight.shape[:2], -1), chosen)
            # A head of keys is shared by neighbours: K queries of it, one of each expert.
            queries = queries.reshape(*chosen.shape, *weight.shape[2:]).swapaxes(2, 3)
            queries = queries.reshape(*x.shape[:2], -1, weight.shape[-1])
            return chosen, jax.nn.softmax(values, axis=-1), queries

        region = self.execution.placement.region(
            run,
            in_axes=(_CHOICE, (None, None), (None, None, ax.KV_HEADS, None)),
            out_axes=(_CHOICE, _CHOICE, _HEADS),
        )
        return region(x, router.astype(jnp.float32), weight.astype(x.dtype))

    def _combine(
        self,
        out: Float[Array, "B S N H"],
        chosen: Int[Array, "B S K"],
        gates: Float32[Array, "B S K"],
    ) -> Float[Array, "B S D"]:
        """Return the outputs of the experts of each token, times their gates, in the stream."""
        config = self.config
        placement = self.execution.placement
        row = Declaration(
            shape=(
                config.num_experts,
                config.num_kv_heads,
                config.head_dim,
                self.context.embed_dim,
            ),
            axes=(ax.HEAD_EXPERTS, ax.KV_HEADS, ax.HEAD_DIM, ax.EMBED),
            role="attention_out",
            matrix=_OUT,
            share=config.top_k / config.num_experts,
        )
        weight = declare(self, "o", row).astype(out.dtype)
        axes = placement.mesh_axes(ax.ACT_HEADS)

        def run(
            out: Array, chosen: Array, gates: Array, weight: Array, *, batch_axes: Any
        ) -> Array:
            del batch_axes
            rows = out.reshape(*out.shape[:2], -1, config.top_k, out.shape[-1]).swapaxes(2, 3)
            matrix = weight.reshape(weight.shape[0], -1, weight.shape[-1])
            y = _multiply(rows.reshape(-1, matrix.shape[1]), matrix, chosen)
            y = y.reshape(*chosen.shape, -1).astype(jnp.float32) * gates[..., None]
            y = jnp.sum(y, axis=2).astype(out.dtype)
            return jax.lax.psum(y, axes) if axes else y

        region = placement.region(
            run,
            in_axes=(_HEADS, _CHOICE, _CHOICE, (None, ax.KV_HEADS, None, None)),
            out_axes=_CHOICE,
        )
        y = region(out, chosen, gates, weight)
        return placement.place(y, (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))


ExpertHeadsConfig.module = ExpertHeads


def _multiply(
    rows: Float[Array, "A k"], weight: Float[Array, "E k n"], chosen: Int[Array, "B S K"]
) -> Float[Array, "A n"]:
    """Return the product of each row with the matrix of its expert."""
    order = sort_by_expert(chosen.reshape(-1), weight.shape[0])
    return grouped_matmul(rows[order.order], weight, order.group_sizes)[order.inverse]
