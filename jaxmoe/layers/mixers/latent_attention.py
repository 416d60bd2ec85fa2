# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

    c_q         = norm(x Wqa)                    latent of queries; x itself where there is none
    q_n         = [c_q Wqb_n]                    [without position, turned by RoPE]
    c, r        = split(x Wkva)                  latent of width R, key of RoPE's width
    c           = norm(c)
    k_n, v_n    = split(c Wkvb_n)
    o_n         = softmax(scale * q_n [k_n, RoPE(r)]^T + mask) v_n
    y           = concat_n(o_n) Wo

Both latents are computed where the residual stream is, and only they are moved to the heads. A
cache holds [c, RoPE(r)] of a token and nothing per head. Decoding never expands it to keys or
values, because Wkvb can move to the other side:

    q_n k_n^T   = (q_n Wk_n^T) c^T               o_n = (softmax(...) c) Wv_n

which is attention with one key head of width R + RoPE's, whose values are its first R features.
Where sequences are cut, values (or keys) are padded with zeros to the wider of the two: the forms
of sequence parallelism take one width.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1), DeepSeek-V3 (arXiv 2412.19437, section 2.1.1).
Windows are not implemented; gates of heads are in a vertical (`contrib/linear_attention`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, Role, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import AttentionMixer, LayerContext, MixerActivations, require_positive
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.observer import observer_of
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from jaxmoe.layers.rotary import RopeLayout, YarnConfig, in_halves, rotary_angles, rotate
from jaxmoe.layers.sequences import current_form, positions_of
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream, into_stream, out_of_stream
from sharding.sequence_parallel import (
    LATENT_CACHE_AXES,
    AttentionRules,
    NewTokens,
    PagedLatents,
    PageTables,
    attend,
    attend_latent,
    empty_pages,
    sequence_ranks,
)

_HEADS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)


class LatentCacheMixer(AttentionMixer):
    """Base class of the configs of mixers whose cache has one entry for all heads of a token."""

    __slots__ = ()

    can_quantize: ClassVar[bool] = False
    has_pages: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None

    @property
    @abc.abstractmethod
    def cache_dim(self) -> int:
        """Values that a cache holds of one token."""

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer."""
        return self.heads.activations(shards, itemsize=itemsize)

    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return the bytes that a cache holds of one token of one sequence."""
        return layers * self.cache_dim * jnp.dtype(precision.compute_dtype).itemsize

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> Float[Array, "L B U 1 H"]:
        """Return an empty cache, cut as the mesh is, with one entry of every token."""
        shape = (layers, batch, slots, 1, self.cache_dim)
        entries = jnp.zeros(shape, execution.precision.compute_dtype)
        return execution.placement.place(entries, LATENT_CACHE_AXES)

    def initial_pages(
        self, execution: ExecutionConfig, *, layers: int, pages: int, size: int
    ) -> Float[Array, "L P G 1 H"]:
        """Return an empty pool of pages of such entries.

        Args:
            execution: Precision and placement of the pool.
            layers: Layers that it is stacked over.
            pages: Number of pages.
            size: Positions of a page.
        """
        shape = (layers, pages, size, 1, self.cache_dim)
        precision = execution.precision
        return empty_pages(shape, "compute", precision.compute_dtype, execution.placement)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionConfig(LatentCacheMixer):
    """Multi-head latent attention: keys and values are made from one short vector per token."""

    name: ClassVar[str] = "latent"
    width_fields: ClassVar[tuple[str, ...]] = ("num_heads",)

    num_heads: int = 4
    """Heads (N); each has keys and values of its own."""
    latent_dim: int = 64
    """Width of the vector from which keys and values are made."""
    query_latent_dim: int | None = None
    """Width of the vector from which queries are made; None makes them from the input itself."""
    nope_dim: int = 32
    """Width of the part of a query or key without position."""
    rope_dim: int = 16
    """Width of the part that RoPE turns; its key is shared by all heads."""
    value_dim: int = 32
    """Width of one head's values."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    rope_layout: RopeLayout = "interleaved"
    """Features that RoPE turns together: 2h and 2h + 1 (DeepSeek's weights), or h and
    h + rope_dim / 2."""
    positions: Literal["rotary", "none"] = "rotary"
    """How queries and keys know where they stand: turned by RoPE, or only by the mask (Kimi
    Linear), where the part that RoPE would turn is shared by all heads alike."""
    yarn: YarnConfig | None = None
    """Stretching of the wavelengths for rows longer than those of pretraining; None for none."""
    norm_epsilon: float = 1e-6
    """Term added to the mean square in the norms of the latents."""
    is_causal: bool = True
    """Whether a token sees no later one; masked diffusion needs False."""

    def __post_init__(self):
        fields = ("num_heads", "latent_dim", "nope_dim", "rope_dim", "value_dim", "rope_theta")
        require_positive("attention", self, *fields, "norm_epsilon")
        if self.query_latent_dim is not None and self.query_latent_dim < 1:
            raise ValueError(
                f"attention.query_latent_dim={self.query_latent_dim} must be above 0, or None for"
                " queries from the input itself"
            )
        if self.positions == "rotary" and self.rope_dim % 2:
            raise ValueError(f"attention.rope_dim={self.rope_dim} must be even: RoPE turns pairs")

    @property
    def num_kv_heads(self) -> int:
        """M, equal to N."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """H, width of one query or key."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Values that a cache holds of one token: [latent, key turned by RoPE]."""
        return self.latent_dim + self.rope_dim

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections of one layer."""
        heads = self.num_heads
        latent = self.query_latent_dim
        source = embed_dim
        queries = 0
        if latent is not None:
            queries = embed_dim * latent
            source = latent
        queries += source * heads * self.head_dim
        keys = embed_dim * self.cache_dim
        keys += self.latent_dim * heads * (self.nope_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * embed_dim

    def check_precision(self, precision: PrecisionPolicy) -> None:
        """Refuse products and caches in few bits, which this layer does not implement.

        Raises:
            ValueError: Quantised weights, a quantised cache, or products in 8 bits.
        """
        settings = {
            "weights": (precision.weights, "floating"),
            "cache": (precision.cache, "compute"),
            "matmul": (precision.matmul.name, "full"),
        }
        for field, (value, only) in settings.items():
            if value != only:
                raise ValueError(
                    f"execution.precision.{field}={value} is not for latent attention, whose"
                    f" products and cache are in the compute dtype: set it to {only}"
                )

    def paged_cache(self, pool: Float[Array, "L P G 1 H"], tables: PageTables) -> PagedLatents:
        """Return the cache of a step of serving."""
        return PagedLatents(pool, tables)


class LatentAttention(nn.Module):
    """One layer of latent attention."""

    config: LatentAttentionConfig
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
        """Attend; see `jaxmoe.layers.mixers.attention.Attention`."""
        del layer
        out, outputs = self._of_heads(x, tokens, cache)
        return self._leave(out), outputs

    def _of_heads(
        self, x: Float[Array, "B S D"], tokens: TokenInputs, cache: LayerCache | None
    ) -> tuple[Float[Array, "B S N Hv"], MixerOutputs]:
        """Return the output of each head, and the new cache and observations."""
        self.config.check_precision(self.execution.precision)
        positions = tokens.positions
        dtype = self.execution.precision.compute_dtype
        q, _, latent, rope_key = self._into_latents(x.astype(dtype))
        q_nope, q_rope, rope_key = self._place(q, rope_key, tokens)
        kv_b = self._declare_kv_b(dtype)
        rules = self._rules()
        entries = None
        if cache is None:
            k, v = self._expand(latent, rope_key, kv_b)
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            out, logits = self._attend(q, k, v, tokens, rules)
        else:
            if positions is None or tokens.segment_ids is not None:
                raise ValueError("a cache needs positions, and cannot hold packed segments")
            out, logits, entries = self._attend_cached(
                (q_nope, q_rope), (latent, rope_key[:, :, 0]), kv_b, cache, positions, rules
            )
        observations = observer_of(self.execution).attention(logits, tokens.token_mask)
        return out, MixerOutputs(cache=entries, observations=observations)

    def _place(self, q: Array, rope_key: Array, tokens: TokenInputs) -> tuple[Array, Array, Array]:
        """Return both parts of queries, and RoPE's key [B S 1 H], turned by their positions."""
        config = self.config
        axes = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None)
        rope_key = self.execution.placement.place(rope_key, axes)[:, :, None]
        q_rope = q[..., config.nope_dim :]
        if config.positions == "rotary":
            q_rope, rope_key = self._turn(q_rope, rope_key, tokens)
        return q[..., : config.nope_dim], q_rope, rope_key

    def _declare_kv_b(self, dtype: Any) -> Float[Array, "R N H"]:
        """Return the matrix from latents to keys without positions and values of all heads."""
        config = self.config
        shape = (config.latent_dim, config.num_heads, config.nope_dim + config.value_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        return self._declare("kv_b", shape, axes, ((-3,), (-2, -1))).astype(dtype)

    def _scale(self) -> float:
        """Return the factor of the logits."""
        yarn = self.config.yarn
        scale = self.context.multipliers.attention_scale or self.config.head_dim**-0.5
        return scale if yarn is None else scale * yarn.logit_factor()

    def _rules(self) -> AttentionRules:
        return AttentionRules(
            is_causal=self.config.is_causal,
            scale=self._scale(),
            implementation=self.execution.implementations.attention,
            is_observed=observer_of(self.execution).reads_attention,
        )

    def _expand(self, latent: Array, rope_key: Array, kv_b: Array) -> tuple[Array, Array]:
        """Return keys and values of each head."""
        config = self.config
        placement = self.execution.placement
        product = Product("bsr,rnh->bsnh", kv_b, (None, ax.HEADS, None), _HEADS)
        form = self.execution.tensor_products
        kv = out_of_stream(latent, {"kv": product}, placement, form=form)["kv"]
        k_nope = kv[..., : config.nope_dim]
        shared = jnp.broadcast_to(rope_key, (*k_nope.shape[:3], config.rope_dim))
        shared = placement.place(shared, _HEADS)
        return jnp.concatenate([k_nope, shared], axis=-1), kv[..., config.nope_dim :]

    def _leave(self, out: Float[Array, "B S N Hv"]) -> Float[Array, "B S D"]:
        """Return the output of all heads in the stream."""
        config = self.config
        shape = (config.num_heads, config.value_dim, self.context.embed_dim)
        axes = (ax.HEADS, ax.HEAD_DIM, ax.EMBED)
        weight = self._declare("o", shape, axes, ((-3, -2), (-1,)), role="attention_out")
        product = Product("bsnh,nhd->bsd", weight.astype(out.dtype), (ax.HEADS, None, None), _HEADS)
        form = self.execution.tensor_products
        return into_stream(out, product, self.execution.placement, form=form)

    def _turn(self, q: Array, key: Array, tokens: TokenInputs) -> tuple[Array, Array]:
        """Return the parts of queries and keys that RoPE turns by their positions."""
        angles = self._angles(tokens, q.shape[1])
        layout = self.config.rope_layout
        return rotate(in_halves(q, layout), angles), rotate(in_halves(key, layout), angles)

    def _angles(self, tokens: TokenInputs, length: int) -> Any:
        """Return the angles by which RoPE turns the tokens."""
        config = self.config
        where = positions_of(tokens, self.context, self.execution, length)
        return rotary_angles(where, config.rope_dim, config.rope_theta, config.yarn)

    def _into_latents(self, x: Float[Array, "B S D"]) -> tuple[Array, Array, Array, Array]:
        """Return queries [B S N H] and what they are made from; latent [B S R] and RoPE's key.

        All but the queries are cut as the stream.
        """
        config = self.config
        placement = self.execution.placement
        width = self.context.embed_dim
        into = ((-2,), (-1,))
        whole = (ax.EMBED, ax.HEAD_DIM)
        down = {"kv_a": self._declare("kv_a", (width, config.cache_dim), whole, into)}
        source = config.query_latent_dim
        if source is not None:
            down["q_a"] = self._declare("q_a", (width, source), whole, into)
        stream = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
        latents = along_stream(
            x,
            {
                name: Product("bsd,dr->bsr", weight.astype(x.dtype), (None, None), stream)
                for name, weight in down.items()
            },
            placement,
        )
        latent, rope_key = jnp.split(latents["kv_a"], [config.latent_dim], axis=-1)
        latent = self._norm("kv_norm", latent)
        q_source = x if source is None else self._norm("q_norm", latents["q_a"])
        shape = (width if source is None else source, config.num_heads, config.head_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        weight = self._declare("q" if source is None else "q_b", shape, axes, ((-3,), (-2, -1)))
        product = Product("bsd,dnh->bsnh", weight.astype(x.dtype), (None, ax.HEADS, None), _HEADS)
        form = self.execution.tensor_products
        q = out_of_stream(q_source, {"q": product}, placement, form=form)["q"]
        return q, q_source, latent, rope_key

    def _attend(
        self, q: Array, k: Array, v: Array, tokens: TokenInputs, rules: AttentionRules
    ) -> tuple[Array, dict[str, Array]]:
        """Compute the softmax over the tokens themselves."""
        value_dim = v.shape[-1]
        if sequence_ranks(self.execution.placement) > 1:
            widest = max(q.shape[-1], value_dim)
            q, k, v = (_pad(x, widest) for x in (q, k, v))
        out, logits = attend(
            q,
            k,
            v,
            placement=self.execution.placement,
            config=current_form(self.context, self.execution, q.shape[1]),
            # As in `Attention`: a mask known at trace time is equal.
            positions=tokens.positions if tokens.segment_ids is None else None,
            segment_ids=tokens.segment_ids,
            order=tokens.order,
            rules=rules,
        )
        return out[..., :value_dim], logits

    def _attend_cached(
        self,
        q: tuple[Array, Array],
        entry: tuple[Array, Array],
        kv_b: Array,
        cache: LayerCache,
        positions: Array,
        rules: AttentionRules,
    ) -> tuple[Array, dict[str, Array], Array | PagedLatents]:
        """Compute the softmax over a cache; Wkvb multiplies queries and results, not latents."""
        config = self.config
        placement = self.execution.placement
        if not config.is_causal:
            raise ValueError(
                "model.attention.is_causal=False: without causality a token's latent changes with"
                " every later token, and a cache of them would be wrong"
            )
        q_nope = self._per_head("bsnh,rnh->bsnr", q[0], kv_b[..., : config.nope_dim])
        latent = placement.place(entry[0], (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None))
        out, logits, entries = attend_latent(
            NewTokens(
                q=jnp.concatenate([q_nope, q[1]], axis=-1),
                k=jnp.concatenate([latent, entry[1]], axis=-1)[:, :, None],
                v=None,
                layer=cache.layer,
                positions=positions,
            ),
            cache.entries,
            latent_dim=config.latent_dim,
            placement=placement,
            rules=rules,
        )
        out = self._per_head("bsnr,rnh->bsnh", out, kv_b[..., config.nope_dim :])
        return out, logits, entries

    def _per_head(self, subscripts: str, x: Array, weight: Array) -> Array:
        """Multiply each head's activations by its own part of Wkvb."""
        placement = self.execution.placement
        axes = (ax.ACT_BATCH, None, ax.ACT_HEADS, None)

        def run(x: Array, weight: Array, *, batch_axes: tuple[str, ...]) -> Array:
            del batch_axes
            return placement.einsum(subscripts, x, weight, axes=())

        region = placement.region(run, in_axes=(axes, (None, ax.HEADS, None)), out_axes=axes)
        return region(x, weight)

    def _declare(self, name, shape, axes, matrix, role: Role = "attention_in") -> Array:
        return declare(self, name, Declaration(shape=shape, axes=axes, role=role, matrix=matrix))

    def _norm(self, name: str, latent: Float[Array, "B S R"]) -> Float[Array, "B S R"]:
        axes = (ax.NORM,)
        gains = Declaration(
            shape=latent.shape[-1:], axes=axes, role="norm", matrix=None, init="ones"
        )
        return rms_norm(latent, declare(self, name, gains), self.config.norm_epsilon)


LatentAttentionConfig.module = LatentAttention


def _pad(x: Float[Array, "B S N H"], width: int) -> Float[Array, "B S N W"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
