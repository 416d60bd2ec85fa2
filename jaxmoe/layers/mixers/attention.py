# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention with rotary positions, QK-norm and an optional gate per head.

    q, k, v = x Wq, x Wk, x Wv;  q, k normed, then turned by RoPE
    o_n     = softmax(scale * q_n k_m^T + mask) v_m          m = n // (N / M)
    o_n    *= sigmoid(x Wg)_n                                  if is_gated
    y       = concat_n(o_n) Wo

`sharding.sequence_parallel` decides on which devices the softmax runs. `attention_parts.py` has
what some models add: biases, gates of features, sinks.
Sources: GQA arXiv 2305.13245, QK-norm arXiv 2302.05442, head gate arXiv 2505.06708.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, Role, as_factor, declare, declare_matrix
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import (
    AttentionMixer,
    LayerContext,
    MixerActivations,
    require_positive,
)
from jaxmoe.layers.mixers.attention_parts import (
    NO_OPTIONS,
    AttentionOptions,
    ChunksConfig,
    QueryTemperatureConfig,
    add_biases,
    add_output_bias,
    gate_heads,
    weigh_against_sinks,
)
from jaxmoe.layers.norms import unit_norm
from jaxmoe.layers.observer import observer_of
from jaxmoe.layers.records import HeadArrays, LayerCache, LayerInputs, MixerOutputs, TokenInputs
from jaxmoe.layers.rotary import rotary_angles, rotate_in_place
from jaxmoe.layers.sequences import current_form, positions_of
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax
from sharding.products.quantized import Weight
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream
from sharding.sequence_parallel import (
    CACHE_AXES,
    AttentionRules,
    KVCache,
    NewTokens,
    PagedCache,
    PageTables,
    as_cached,
    attend,
    bytes_per_token,
    empty_pages,
    empty_slots,
)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(AttentionMixer):
    """Grouped-query attention with rotary positions."""

    name: ClassVar[str] = "grouped_query"
    layer_fields: ClassVar[tuple[str, ...]] = (
        "qk_norm",
        "window",
        "chunks",
        "positions",
        "query_temperature",
        "num_kv_heads",
        "rope_theta",
        "options",
    )
    has_pages: ClassVar[bool] = True
    can_select_pages: ClassVar[bool] = True

    num_heads: int = 4
    """Query heads (N)."""
    num_kv_heads: int = 4
    """Key and value heads (M); divides num_heads."""
    head_dim: int = 32
    """Width of one head (H)."""
    qk_norm: Literal["none", "head", "full", "unit"] = "head"
    """RMSNorm of queries and keys: none, per head (unit: without gains), or over all heads."""
    is_gated: bool = False
    """Multiply each head's output by a sigmoid of the layer's input."""
    positions: Literal["rotary", "none"] = "rotary"
    """How queries and keys know where they stand: turned by RoPE, or only by the mask."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    window: int | None = None
    """Positions that a query sees, itself included, and as many ahead where attention is not
    causal; all when None."""
    softcap: float | None = None
    """Bound of the logits, softcap * tanh(logits / softcap); off when None."""
    is_causal: bool = True
    """Whether a token sees no later one; masked diffusion needs False."""
    query_temperature: QueryTemperatureConfig | None = None
    """Growth of the queries with their positions, after RoPE and norms; none when None."""
    chunks: ChunksConfig | None = None
    """Chunks of documents, to whose own positions a query attends (Llama 4); none when None."""
    options: AttentionOptions | None = None
    """What some published models add; nothing when None."""

    def __post_init__(self):
        require_positive("attention", self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_heads={self.num_heads} must be a multiple of"
                f" attention.num_kv_heads={self.num_kv_heads}"
            )
        if self.positions == "rotary":
            self.extras.check_rotary(self.head_dim)
        if self.extras.gate_form != "head" and not self.is_gated:
            raise ValueError(
                f"attention.options.gate_form={self.extras.gate_form!r} without attention.is_gated"
                " computes no gates: set is_gated, or gate_form to 'head'"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1, or None for all")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"attention.softcap={self.softcap} must be above 0, or None for off")

    @property
    def chunk(self) -> int | None:
        """Positions of a chunk; None without chunks."""
        return None if self.chunks is None else self.chunks.size

    @property
    def extras(self) -> AttentionOptions:
        """The options, neutral ones where there are none."""
        return self.options or NO_OPTIONS

    def activations(self, shards: Callable[[str], int], *, itemsize: int) -> MixerActivations:
        """Return the arrays of one layer; gates of features are f32, those of heads left out."""
        arrays = self.heads.activations(shards, itemsize=itemsize)
        if self.extras.gate_form == "head":
            return arrays
        gates = 4 * self.num_heads * self.value_dim / shards(ax.ACT_HEADS)
        return dataclasses.replace(
            arrays, projected=arrays.projected + gates, kept=arrays.kept + gates
        )

    def cache_bytes_per_token(self, precision: PrecisionPolicy, *, layers: int) -> int:
        """Return the bytes that a cache holds of one token of one sequence."""
        return bytes_per_token(
            num_layers=layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            form=precision.cache,
            dtype=precision.compute_dtype,
        )

    def initial_cache(
        self, execution: ExecutionConfig, *, layers: int, batch: int, slots: int
    ) -> Any:
        """Return an empty cache, cut as the mesh is."""
        shape = (layers, batch, slots, self.num_kv_heads, self.head_dim)
        precision = execution.precision
        placement = execution.placement

        def empty() -> Any:  # a buffer of its own for each, which a step may take over
            slots = empty_slots(shape, precision.cache, precision.compute_dtype)
            return jax.tree.map(lambda part: placement.place(part, CACHE_AXES), slots)

        return execution.cache_reading.initial(KVCache(k=empty(), v=empty()), placement)

    def initial_pages(
        self, execution: ExecutionConfig, *, layers: int, pages: int, size: int
    ) -> Any:
        """Return an empty pool [L P G M 2 H] of pages, cut as the mesh is.

        Args:
            execution: Precision and placement of the pool.
            layers: Layers that it is stacked over.
            pages: Number of pages.
            size: Positions of a page.
        """
        if self.extras.rope_scaling is not None:
            self.extras.rope_scaling.check_pages()
        shape = (layers, pages, size, self.num_kv_heads, 2, self.head_dim)
        precision = execution.precision
        return empty_pages(shape, precision.cache, precision.compute_dtype, execution.placement)

    def paged_cache(self, pool: Any, tables: PageTables) -> PagedCache:
        """Return the cache of a step of serving."""
        return PagedCache(pool, tables)


class Attended(NamedTuple):
    """Results of the softmax and what follows from it."""

    out: Float[Array, "B S N H"]
    """Output of each head."""
    logits: dict[str, Array]
    """What is observed of the logits; with `keeps_lse` their logarithmic sums too."""
    cache: Any
    """Cache with the new entries; None without one."""
    carry: dict[str, Array] = {}
    """`MixerOutputs.carry`."""


class Attention(nn.Module):
    """One layer of attention."""

    config: AttentionConfig
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
        """Attend.

        Args:
            x: Normed input.
            tokens: Positions, segments and padding.
            cache: Cache of this layer; the new keys and values are written at their positions.
            layer: Number and key of the layer, and the arrays that reach it; see `Carry`.

        Returns:
            The output [B S D] in the compute dtype, and the new cache and observations.
        """
        config = self.config
        placement = self.execution.placement
        dtype = self.execution.precision.compute_dtype
        form = self.execution.tensor_products
        projections = self._projections(dtype, tokens.mix)
        heads = out_of_stream(x.astype(dtype), projections, placement, form=form)
        if config.extras.has_bias:
            heads = add_biases(self, heads, placement)
        placed = self._place(heads, tokens)
        placed = placed._replace(v=placed.v.astype(dtype))
        out, logits, entries, carry = self.attend(
            placed, tokens, cache, layer, keeps_lse=config.extras.has_sinks
        )
        if config.extras.has_sinks:
            out = weigh_against_sinks(self, out, logits["lse"], placement)
            logits = logits if "top" in logits else {}
        if config.is_gated:
            out = gate_heads(out, heads["gate"], config.extras.gate_form)
        weight = self._declare(
            "o",
            (config.num_heads, config.value_dim, self.context.embed_dim),
            (ax.HEADS, ax.HEAD_DIM, ax.EMBED),
            "attention_out",
            ((-3, -2), (-1,)),
        )
        spread = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
        product = Product(
            "bsnh,nhd->bsd",
            as_factor(weight, dtype, tokens.mix),
            (ax.HEADS, None, None),
            spread,
            activations=self.execution.precision.activations,
            encoded=self.execution.encoded_product,
        )
        y = into_stream(out, product, placement, form=form)
        if config.extras.has_output_bias:
            y = add_output_bias(self, y)
        observations = observer_of(self.execution).attention(logits, tokens.token_mask)
        return y, MixerOutputs(cache=entries, observations=observations, carry=carry)

    def _place(self, heads: dict[str, Array], tokens: TokenInputs) -> HeadArrays:
        """Return queries, keys and values, normed, clipped and turned by their positions."""
        config = self.config
        options = config.extras
        q, k, v = (heads[name] for name in "qkv")
        if options.qk_norm_place == "before":
            q = self._norm("q_norm", q)
            k = self._norm("k_norm", k)
        if options.qkv_clip is not None:
            q, k, v = (jnp.clip(part, -options.qkv_clip, options.qkv_clip) for part in (q, k, v))
        if config.positions == "rotary":
            where = positions_of(tokens, self.context, self.execution, q.shape[1])
            width = options.rope_dim(config.head_dim)
            angles = rotary_angles(where, width, config.rope_theta, options.rope_scaling)
            q = rotate_in_place(q, angles, options.rope_layout)
            k = rotate_in_place(k, angles, options.rope_layout)
        if options.qk_norm_place == "after":
            q = self._norm("q_norm", q)
            k = self._norm("k_norm", k)
        if config.query_temperature is not None:
            factor = config.query_temperature.factor(
                positions_of(tokens, self.context, self.execution, q.shape[1])
            )
            q = (q * factor).astype(q.dtype)
        return HeadArrays(q, k, v)

    def attend(
        self,
        heads: HeadArrays,
        tokens: TokenInputs,
        cache: LayerCache | None,
        layer: LayerInputs | None,
        *,
        keeps_lse: bool = False,
    ) -> Attended:
        """Compute the softmax, over the tokens themselves or over a cache.

        Attention that changes the heads, or carries something, overrides it and calls this one.

        Args:
            heads: Queries, keys and values after norms and positions.
            tokens: What the layer knows of its tokens.
            cache: Entries of earlier tokens; None where all tokens are given.
            layer: What earlier layers carry here, which this class does not read.
            keeps_lse: Whether the log-sum-exp of the scores is wanted.
        """
        del layer
        q, k, v = heads
        config = self.config
        placement = self.execution.placement
        positions = tokens.positions
        segment_ids = tokens.segment_ids
        rules = AttentionRules(
            is_causal=config.is_causal,
            window=config.window,
            chunk=config.chunk,
            softcap=config.softcap,
            scale=self.context.multipliers.attention_scale,
            implementation=self.execution.implementations.attention,
            is_observed=observer_of(self.execution).reads_attention,
            keeps_lse=keeps_lse,
        )
        if cache is None:
            if config.chunks is not None:
                if segment_ids is not None:  # placed as the positions are
                    segment_ids = placement.place(segment_ids, (ax.ACT_BATCH, ax.ACT_SEQ_INNER))
                where = positions_of(tokens, self.context, self.execution, q.shape[1])
                segment_ids = config.chunks.segments(where, segment_ids, q.shape[:2])
            k, v = (as_cached(part, self.execution.precision.cache) for part in (k, v))
            out, logits = attend(
                q,
                k,
                v,
                placement=placement,
                config=current_form(self.context, self.execution, q.shape[1]),
                # Within a segment positions rise with the row: a mask known at trace time is equal,
                # and lets the kernel skip hidden blocks.
                positions=positions if tokens.segment_ids is None else None,
                segment_ids=segment_ids,
                order=tokens.order,
                rules=rules,
            )
            return Attended(out, logits, None)
        if positions is None or segment_ids is not None:
            raise ValueError("a cache needs positions, and cannot hold packed segments")
        if not config.is_causal:
            raise ValueError(
                "model.attention.is_causal=False: without causality a token's keys and values"
                " change with every later token, and a cache of them would be wrong"
            )
        new = NewTokens(q, k, v, cache.layer, positions, tokens.token_mask)
        reading = self.execution.cache_reading
        return Attended(*reading.attend(new, cache.entries, placement=placement, rules=rules))

    def _declare(self, name, shape, axes, role: Role, matrix) -> Weight:
        declaration = Declaration(shape=shape, axes=axes, role=role, matrix=matrix)
        return declare_matrix(self, name, declaration)

    def _projections(self, dtype: Any, mix: Any = None) -> dict[str, Product]:
        """Return the products for queries, keys, values and, if gated, each head's gate logits."""
        config = self.config
        projections = {}
        for name, number, width in (
            ("q", config.num_heads, config.head_dim),
            ("k", config.num_kv_heads, config.head_dim),
            ("v", config.num_kv_heads, config.value_dim),
        ):
            axis, spread = (
                (ax.HEADS, ax.ACT_HEADS) if name == "q" else (ax.KV_HEADS, ax.ACT_KV_HEADS)
            )
            weight = self._declare(
                name,
                (self.context.embed_dim, number, width),
                (ax.EMBED, axis, ax.HEAD_DIM),
                "attention_in",
                ((-3,), (-2, -1)),
            )
            projections[name] = Product(
                "bsd,dnh->bsnh",
                as_factor(weight, dtype, mix),
                (None, axis, None),
                (ax.ACT_BATCH, ax.ACT_SEQ_INNER, spread, None),
                activations=self.execution.precision.activations,
                encoded=self.execution.encoded_product,
            )
        if config.is_gated:
            projections["gate"] = self._gate(dtype, mix)
        return projections

    def _gate(self, dtype: Any, mix: Any) -> Product:
        """Return the product for the logits of the gates, f32."""
        config = self.config
        spread = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS)
        if config.extras.gate_form == "head":
            shape = (self.context.embed_dim, config.num_heads)
            axes = (ax.EMBED, ax.HEADS)
            weight = self._declare("gate", shape, axes, "attention_gate", ((-2,), (-1,)))
            gate = as_factor(weight, dtype, mix)
            return Product("bsd,dn->bsn", gate, (None, ax.HEADS), spread, jnp.float32)
        shape = (self.context.embed_dim, config.num_heads, config.value_dim)
        axes = (ax.EMBED, ax.HEADS, ax.HEAD_DIM)
        weight = self._declare("gate", shape, axes, "attention_gate", ((-3,), (-2, -1)))
        return Product(
            "bsd,dnh->bsnh",
            as_factor(weight, dtype, mix),
            (None, ax.HEADS, None),
            (*spread, None),
            jnp.float32,
            activations=self.execution.precision.activations,
            encoded=self.execution.encoded_product,
        )

    def _norm(self, name: str, heads: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """Apply the model's norm over each head, over all heads of a token, or not at all."""
        kind = self.config.qk_norm
        epsilon = self.context.norm_epsilon
        if kind == "none":
            return heads
        if kind == "unit":
            return unit_norm(heads, epsilon)
        norm = self.context.norm
        dim = heads.shape[-1] if kind == "head" else heads.shape[-2] * heads.shape[-1]
        weights = {
            part: declare(self, name if part == "gain" else f"{name}_{part}", row)
            for part, row in norm.declarations(dim).items()
        }
        if kind == "head":
            return norm.apply(heads, weights, epsilon)
        # Heads may be spread over devices; the norm over all of them needs them gathered.
        rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
        place = self.execution.placement.place
        flat = place(heads, (*rows, None, None)).reshape(*heads.shape[:2], dim)  # B, S, N*H
        normed = norm.apply(flat, weights, epsilon).reshape(heads.shape)
        return place(normed, (*rows, ax.ACT_HEADS if name == "q_norm" else ax.ACT_KV_HEADS, None))


AttentionConfig.module = Attention
