# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

    c_q         = norm(x Wqa)                    queries' latent; x itself where there is none
    q_n         = [c_q Wqb_n]                    [without position, turned by RoPE]
    c, r        = split(x Wkva)                  latent of width R, key of RoPE's width
    c           = norm(c)
    k_n, v_n    = split(c Wkvb_n)
    o_n         = softmax(scale * q_n [k_n, RoPE(r)]^T + mask) v_n
    y           = concat_n(o_n) Wo

Both latents are made where the residual stream lies, and they are what travels into the layer, not
the stream. A cache keeps [c, RoPE(r)] of a token and nothing per head; decoding never makes keys or
values of it, for Wkvb can be taken to the other side:

    q_n k_n^T   = (q_n Wk_n^T) c^T               o_n = (softmax(...) c) Wv_n

so that it is attention with one key head of width R + RoPE's, whose values are its first R
features. Where sequences are cut, values (or keys) are padded with zeros to the wider of the two:
the forms of sequence parallelism know one width.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1), DeepSeek-V3 (arXiv 2412.19437, section 2.1.1).
Not here: windows, gates.
"""

from __future__ import annotations

import typing

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.attention import AttentionOutputs
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.rotary import rotary_angles, rotate, yarn_size
from jaxmoe.layers.sequences import current_form, current_order, places_of
from jaxmoe.models.config import LatentAttentionConfig, ModelConfig
from jaxmoe.parameters import Declaration, Role, declare
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream, into_stream, out_of_stream
from sharding.sequence_parallel import (
    AttentionRules,
    LatentSlots,
    attend,
    attend_latent,
    sequence_ranks,
)

_HEADS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class LatentCache:
    """Latents and turned keys of the tokens seen so far; stacked over layers it has a leading L."""

    entries: Float[Array, "*L B U 1 H"]
    """[latent, key that RoPE has turned]."""
    length: Int[Array, "*L"]
    """Positions filled."""


def check_precision(precision: PrecisionPolicy) -> None:
    """Refuses products and caches in few bits, which stop at this layer so far.

    Args:
        precision: of the execution.
    """
    found = {
        "weights": (precision.weights, "floating"),
        "cache": (precision.cache, "compute"),
        "matmul": (precision.matmul.name, "full"),
    }
    for field, (value, only) in found.items():
        if value != only:
            raise ValueError(
                f"execution.precision.{field}={value} is not for latent attention, whose"
                f" products and cache are in the compute dtype: set it to {only}"
            )


class LatentAttention(nn.Module):
    """One layer of latent attention."""

    model: ModelConfig
    execution: ExecutionConfig

    @property
    def _config(self) -> LatentAttentionConfig:
        assert isinstance(self.model.attention, LatentAttentionConfig)  # `Block` has chosen by it
        return self.model.attention

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "B S"] | None,
        segment_ids: Int[Array, "B S"] | None,
        cache: LatentCache | None,
        places: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], AttentionOutputs]:
        """Attends; see `jaxmoe.layers.attention.Attention`."""
        check_precision(self.execution.precision)
        config, placement = self._config, self.execution.placement
        dtype = self.execution.precision.compute_dtype
        q, latent, rope_key = self._into_latents(x.astype(dtype))

        where = places if positions is None else positions
        if where is not None:
            where = placement.place(where, (ax.ACT_BATCH, ax.ACT_SEQ_INNER))
        else:
            where = places_of(current_order(self.model, self.execution, x.shape[1]), x.shape[1])
        angles = rotary_angles(where, config.rope_dim, config.rope_theta, config.yarn)
        q_rope = rotate(self._in_halves(q[..., config.nope_dim :]), angles)
        q_nope = q[..., : config.nope_dim]
        rope_key = placement.place(rope_key, (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None))[:, :, None]
        rope_key = rotate(self._in_halves(rope_key), angles)

        shape = (config.latent_dim, config.num_heads, config.nope_dim + config.value_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        kv_b = self._declare("kv_b", shape, axes, ((-3,), (-2, -1))).astype(dtype)
        yarn = config.yarn
        stretch = 1.0 if yarn is None else yarn_size(yarn, yarn.mscale_all_dim) ** 2
        rules = AttentionRules(
            is_causal=config.is_causal,
            scale=(self.model.multipliers.attention_scale or config.head_dim**-0.5) * stretch,
            implementation=self.execution.kernels.attention,
            is_observed=self.execution.telemetry == "detailed",
        )
        if cache is None:
            product = Product("bsr,rnh->bsnh", kv_b, (None, ax.HEADS, None), _HEADS)
            kv = out_of_stream(latent, {"kv": product}, placement)["kv"]
            k_nope, v = kv[..., : config.nope_dim], kv[..., config.nope_dim :]
            shared = jnp.broadcast_to(rope_key, (*k_nope.shape[:3], config.rope_dim))
            shared = placement.place(shared, _HEADS)
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            k = jnp.concatenate([k_nope, shared], axis=-1)
            out, logits = self._attend(q, k, v, positions, segment_ids, places, rules)
        else:
            if positions is None or segment_ids is not None:
                raise ValueError("a cache needs positions, and cannot hold packed segments")
            out, logits, cache = self._attend_cached(
                (q_nope, q_rope), (latent, rope_key[:, :, 0]), kv_b, cache, positions, rules
            )
        shape = (config.num_heads, config.value_dim, self.model.embed_dim)
        axes = (ax.HEADS, ax.HEAD_DIM, ax.EMBED)
        weight = self._declare("o", shape, axes, ((-3, -2), (-1,)), role="attention_out")
        product = Product("bsnh,nhd->bsd", weight.astype(dtype), (ax.HEADS, None, None), _HEADS)
        y = into_stream(out, product, placement)
        return y, AttentionOutputs(cache=cache, logits=logits)

    def _into_latents(self, x: Float[Array, "B S D"]) -> tuple[Array, Array, Array]:
        """Queries [B S N H]; the latent [B S R] and the key for RoPE, which lie as the stream."""
        config, placement, width = self._config, self.execution.placement, self.model.embed_dim
        into, whole = ((-2,), (-1,)), (ax.EMBED, ax.HEAD_DIM)
        down = {"kv_a": self._declare("kv_a", (width, config.cache_dim), whole, into)}
        source = config.query_latent_dim
        if source is not None:
            down["q_a"] = self._declare("q_a", (width, source), whole, into)
        stream = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
        found = along_stream(
            x,
            {
                name: Product("bsd,dr->bsr", weight.astype(x.dtype), (None, None), stream)
                for name, weight in down.items()
            },
            placement,
        )
        latent, rope_key = jnp.split(found["kv_a"], [config.latent_dim], axis=-1)
        latent = self._norm("kv_norm", latent)
        q_source = x if source is None else self._norm("q_norm", found["q_a"])
        shape = (width if source is None else source, config.num_heads, config.head_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        weight = self._declare("q" if source is None else "q_b", shape, axes, ((-3,), (-2, -1)))
        product = Product("bsd,dnh->bsnh", weight.astype(x.dtype), (None, ax.HEADS, None), _HEADS)
        q = out_of_stream(q_source, {"q": product}, placement)["q"]
        return q, latent, rope_key

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Array | None,
        segment_ids: Array | None,
        places: Array | None,
        rules: AttentionRules,
    ) -> tuple[Array, dict[str, Array]]:
        """The softmax over the tokens themselves."""
        value_dim = v.shape[-1]
        if sequence_ranks(self.execution.placement) > 1:
            widest = max(q.shape[-1], value_dim)
            q, k, v = (_padded(x, widest) for x in (q, k, v))
        out, logits = attend(
            q,
            k,
            v,
            placement=self.execution.placement,
            config=current_form(self.model, self.execution, q.shape[1]),
            # As in `Attention`: a mask known at trace time says the same.
            positions=positions if segment_ids is None else None,
            segment_ids=segment_ids,
            places=places,
            rules=rules,
        )
        return out[..., :value_dim], logits

    def _attend_cached(
        self,
        q: tuple[Array, Array],
        entry: tuple[Array, Array],
        kv_b: Array,
        cache: LatentCache,
        positions: Array,
        rules: AttentionRules,
    ) -> tuple[Array, dict[str, Array], LatentCache]:
        """The softmax over a cache, in which queries and results meet Wkvb instead of latents."""
        config, placement = self._config, self.execution.placement
        if not config.is_causal:
            raise ValueError(
                "model.attention.is_causal=False: without causality a token's latent changes with"
                " every later token, and a cache of them would be wrong"
            )
        q_nope = self._per_head("bsnh,rnh->bsnr", q[0], kv_b[..., : config.nope_dim])
        latent = placement.place(entry[0], (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None))
        out, logits, slots = attend_latent(
            jnp.concatenate([q_nope, q[1]], axis=-1),
            jnp.concatenate([latent, entry[1]], axis=-1),
            LatentSlots(cache.entries, cache.length),
            latent_dim=config.latent_dim,
            placement=placement,
            positions=positions,
            rules=rules,
        )
        out = self._per_head("bsnr,rnh->bsnh", out, kv_b[..., config.nope_dim :])
        return out, logits, LatentCache(entries=slots.entries, length=slots.length)

    def _per_head(self, subscripts: str, x: Array, weight: Array) -> Array:
        """Activations of each head times its own part of Wkvb."""
        placement, axes = self.execution.placement, (ax.ACT_BATCH, None, ax.ACT_HEADS, None)

        def run(x: Array, weight: Array, *, batch_axes: tuple[str, ...]) -> Array:
            del batch_axes
            return placement.einsum(subscripts, x, weight, axes=())

        island = placement.island(run, in_axes=(axes, (None, ax.HEADS, None)), out_axes=axes)
        return island(x, weight)

    def _in_halves(self, x: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """Features in the layout of `rotate`: the order of a product's terms does not matter."""
        if self._config.rope_layout == "halves":
            return x
        return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)

    def _declare(self, name, shape, axes, matrix, role: Role = "attention_in") -> Array:
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role, matrix=matrix))

    def _norm(self, name: str, latent: Float[Array, "B S R"]) -> Float[Array, "B S R"]:
        axes = (ax.NORM,)
        gains = Declaration(
            shape=latent.shape[-1:], axes=axes, role="norm", matrix=None, init="ones"
        )
        return rms_norm(latent, declare(self, name, gains), self._config.norm_epsilon)


def _padded(x: Float[Array, "B S N H"], width: int) -> Float[Array, "B S N W"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
