# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention with rotary positions, QK-norm and an optional gate per head.

    q, k, v = x Wq, x Wk, x Wv;  q, k normed, then turned by RoPE
    o_n     = softmax(scale * q_n k_m^T + mask) v_m          m = n // (N / M)
    o_n    *= sigmoid(x Wg)_n                                  if is_gated
    y       = concat_n(o_n) Wo

Where the arithmetic of the softmax runs is the business of `sharding.sequence_parallel`.
Sources: GQA arXiv 2305.13245, QK-norm arXiv 2302.05442, head gate arXiv 2505.06708.
"""

from __future__ import annotations

import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.rotary import rotary_angles, rotate
from jaxmoe.layers.sequences import current_form, current_order, places_of
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.parameters import Declaration, Role, as_factor, declare, declare_matrix
from pallas_kernels import QuantizedArray
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream
from sharding.sequence_parallel import (
    AttentionRules,
    CacheSlots,
    as_cached,
    attend,
    attend_cached,
)


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class KVCache:
    """Keys and values of the tokens seen so far; stacked over layers it has a leading L."""

    k: Float[Array, "*L B U M H"] | QuantizedArray
    v: Float[Array, "*L B U M H"] | QuantizedArray
    length: Int[Array, "*L"]
    """Positions filled."""


@typing.no_type_check
@struct.dataclass
class AttentionOutputs:
    """What attention returns beside the activations."""

    cache: Any
    """With the new entries, if one was given; of the kind of the layer."""
    logits: dict[str, Float[Array, "B N S"]] = struct.field(default_factory=dict)
    """Detailed telemetry: of every query the log-sum-exp `lse` and the largest logit `top`."""


class Attention(nn.Module):
    """One attention layer."""

    model: ModelConfig
    execution: ExecutionConfig

    @property
    def _config(self) -> AttentionConfig:
        assert isinstance(self.model.attention, AttentionConfig)  # `Block` has chosen by it
        return self.model.attention

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "B S"] | None,
        segment_ids: Int[Array, "B S"] | None,
        cache: KVCache | None,
        places: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], AttentionOutputs]:
        """Attends.

        Args:
            x: normed input.
            positions: of the tokens; their places in the row when None. Within a segment they
                rise with the row.
            segment_ids: tokens see only their own segment.
            cache: of this layer; the new keys and values are written at its length.
            places: of the tokens in their rows, where these are laid out each in its own way.

        Returns:
            The output, and what else there is to know.
        """
        config, placement = self._config, self.execution.placement
        dtype = self.execution.precision.compute_dtype
        heads = out_of_stream(x.astype(dtype), self._projections(dtype), placement)
        q, k, v = self._norm("q_norm", heads["q"]), self._norm("k_norm", heads["k"]), heads["v"]

        where = places if positions is None else positions
        if where is not None:
            where = placement.place(where, (ax.ACT_BATCH, ax.ACT_SEQ_INNER))
        else:
            order = current_order(self.model, self.execution, x.shape[1])
            where = places_of(order, x.shape[1])
        angles = rotary_angles(where, config.head_dim, config.rope_theta)
        q, k = rotate(q, angles), rotate(k, angles)
        out, logits, cache = self._attend(
            q, k, v.astype(dtype), positions, segment_ids, cache, places
        )
        if config.is_gated:
            out = out * jax.nn.sigmoid(heads["gate"])[..., None].astype(dtype)
        weight = self._declare(
            "o",
            (config.num_heads, config.head_dim, self.model.embed_dim),
            (ax.HEADS, ax.HEAD_DIM, ax.EMBED),
            "attention_out",
            ((-3, -2), (-1,)),
        )
        spread = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
        product = Product(
            "bsnh,nhd->bsd",
            as_factor(weight, dtype),
            (ax.HEADS, None, None),
            spread,
            activations=self.execution.precision.activations,
            halo=self.execution.halo,
        )
        y = into_stream(out, product, placement)
        return y, AttentionOutputs(cache=cache, logits=logits)

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Array | None,
        segment_ids: Array | None,
        cache: KVCache | None,
        places: Array | None,
    ) -> tuple[Array, dict[str, Array], KVCache | None]:
        """The softmax, over the tokens themselves or over a cache."""
        config, placement = self._config, self.execution.placement
        rules = AttentionRules(
            is_causal=config.is_causal,
            window=config.window,
            softcap=config.softcap,
            scale=self.model.multipliers.attention_scale,
            implementation=self.execution.kernels.attention,
            is_observed=self.execution.telemetry == "detailed",
        )
        if cache is None:
            k, v = (as_cached(part, self.execution.precision.cache) for part in (k, v))
            out, logits = attend(
                q,
                k,
                v,
                placement=placement,
                config=current_form(self.model, self.execution, q.shape[1]),
                # Within a segment positions rise with the row: a mask that is known at trace time
                # says the same, and lets the kernel skip what it hides.
                positions=positions if segment_ids is None else None,
                segment_ids=segment_ids,
                places=places,
                rules=rules,
            )
            return out, logits, None
        if positions is None or segment_ids is not None:
            raise ValueError("a cache needs positions, and cannot hold packed segments")
        if not config.is_causal:
            raise ValueError(
                "model.attention.is_causal=False: without causality a token's keys and values"
                " change with every later token, and a cache of them would be wrong"
            )
        slots = CacheSlots(cache.k, cache.v, cache.length)
        out, logits, slots = attend_cached(
            q, k, v, slots, placement=placement, positions=positions, rules=rules
        )
        return out, logits, KVCache(k=slots.k, v=slots.v, length=slots.length)

    def _declare(self, name, shape, axes, role: Role, matrix) -> Array | QuantizedArray:
        declaration = Declaration(shape=shape, axes=axes, role=role, matrix=matrix)
        return declare_matrix(self, name, declaration)

    def _projections(self, dtype: Any) -> dict[str, Product]:
        """Queries, keys, values and, if gated, the logits of the gate of each head, f32."""
        config, found = self._config, {}
        for name, number in (
            ("q", config.num_heads),
            ("k", config.num_kv_heads),
            ("v", config.num_kv_heads),
        ):
            axis, spread = (
                (ax.HEADS, ax.ACT_HEADS) if name == "q" else (ax.KV_HEADS, ax.ACT_KV_HEADS)
            )
            weight = self._declare(
                name,
                (self.model.embed_dim, number, config.head_dim),
                (ax.EMBED, axis, ax.HEAD_DIM),
                "attention_in",
                ((-3,), (-2, -1)),
            )
            found[name] = Product(
                "bsd,dnh->bsnh",
                as_factor(weight, dtype),
                (None, axis, None),
                (ax.ACT_BATCH, ax.ACT_SEQ_INNER, spread, None),
                activations=self.execution.precision.activations,
                halo=self.execution.halo,
            )
        if config.is_gated:
            weight = self._declare(
                "gate",
                (self.model.embed_dim, config.num_heads),
                (ax.EMBED, ax.HEADS),
                "attention_gate",
                ((-2,), (-1,)),
            )
            spread = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS)
            found["gate"] = Product(
                "bsd,dn->bsn", as_factor(weight, dtype), (None, ax.HEADS), spread, jnp.float32
            )
        return found

    def _norm(self, name: str, heads: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """QK-norm: over each head, over all heads of a token, or none."""
        kind, epsilon = self._config.qk_norm, self.model.norm_epsilon
        if kind == "none":
            return heads
        dim = heads.shape[-1] if kind == "head" else heads.shape[-2] * heads.shape[-1]
        gains = Declaration(shape=(dim,), axes=(ax.NORM,), role="norm", matrix=None, init="ones")
        gain = declare(self, name, gains)
        if kind == "head":
            return rms_norm(heads, gain, epsilon)
        # Heads may be spread over devices; the norm over all of them needs a token's heads whole.
        act_heads = ax.ACT_HEADS if name == "q_norm" else ax.ACT_KV_HEADS
        whole = self.execution.placement.place(heads, (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None, None))
        flat = whole.reshape(*heads.shape[:2], dim)  # B, S, N*H
        normed = rms_norm(flat, gain, epsilon).reshape(heads.shape)
        axes = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, act_heads, None)
        return self.execution.placement.place(normed, axes)
