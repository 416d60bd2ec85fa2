# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention whose heads are gated by the layer's input.

    o_n *= sigmoid(x Wg)_n                  one gate per head

All else is latent attention as it is; a cache holds no more.

Source: Ling 3.0, as published for transformers (`BailingHybridAttention`); the gate is that of
arXiv 2505.06708.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.mixers.attention_parts import gate_heads
from jaxmoe.layers.mixers.latent_attention import LatentAttention, LatentAttentionConfig
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, out_of_stream

_GATES = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatedLatentConfig(LatentAttentionConfig):
    """Latent attention whose heads are gated by the layer's input."""

    name: ClassVar[str] = "gated_latent"


class GatedLatentAttention(LatentAttention):
    """One layer of latent attention with gates of heads."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None = None,
    ) -> tuple[Float[Array, "B S D"], MixerOutputs]:
        """Attend; see `jaxmoe.layers.mixers.attention.Attention`."""
        del layer
        out, outputs = self._of_heads(x, tokens, cache)
        x = x.astype(out.dtype)
        shape = (self.context.embed_dim, self.config.num_heads)
        axes = (ax.EMBED, ax.HEADS)
        weight = self._declare("gate", shape, axes, ((-2,), (-1,)), role="attention_gate")
        product = Product(
            "bsd,dn->bsn", weight.astype(x.dtype), (None, ax.HEADS), _GATES, jnp.float32
        )
        placement = self.execution.placement
        form = self.execution.tensor_products
        logits = out_of_stream(x, {"gate": product}, placement, form=form)["gate"]
        return self._leave(gate_heads(out, logits, "head")), outputs


GatedLatentConfig.module = GatedLatentAttention
