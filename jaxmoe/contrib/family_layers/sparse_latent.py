# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention to the keys that a lightning indexer chooses (DeepSeek sparse attention).

    q_j   = RoPE(c_q Wq)_j         index queries of n heads, from the latent of queries
    k     = RoPE(norm(x Wk))       one index key of I features per token; norm: LayerNorm
    w     = x Ww                   weights of the heads

`lightning_indexer.py` has the choice. A cache holds [c, RoPE(r), k] of a token. Rows of at most
`index_top_k` tokens are latent attention as it is. The choice has no gradient: parameters of the
indexer get none from the loss of tokens, and stay as they were read or drawn.

FLOPs are counted as if every query saw all keys. Rows that are cut over `seq` are refused by a row
of `combinations.py`.
Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.contrib.family_layers.lightning_indexer import IndexedKeys, IndexQueries, attend_chosen
from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext, require_positive
from jaxmoe.layers.mixers.latent_attention import (
    LatentAttention,
    LatentAttentionConfig,
    LatentCacheMixer,
)
from jaxmoe.layers.norms import layer_norm
from jaxmoe.layers.observer import observer_of
from jaxmoe.layers.records import LayerCache, LayerInputs, MixerOutputs, TokenInputs
from jaxmoe.layers.rotary import rotate
from jaxmoe.precision import PrecisionPolicy
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, along_stream
from sharding.sequence_parallel import LATENT_CACHE_AXES, PageTables
from sharding.sequence_parallel.cached import layer_of, write_slots
from sharding.sequence_parallel.paged import TABLE_AXES, page_axes, write_pages

_HEADS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
_ROWS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
_INDEX: Any = IndexQueries._make(((*_ROWS, None, None), (*_ROWS, None)))
_EPSILON = 1e-6
"""Term added to the variance in the norm of index keys."""


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SparseLatentConfig(LatentCacheMixer):
    """Latent attention to the keys that a lightning indexer chooses."""

    name: ClassVar[str] = "sparse_latent"
    width_fields: ClassVar[tuple[str, ...]] = ("latent",)

    latent: LatentAttentionConfig = LatentAttentionConfig(query_latent_dim=48)
    """Attention to the chosen keys."""
    index_heads: int = 4
    """Heads of the indexer (n)."""
    index_dim: int = 32
    """Width of an index query or key (I); RoPE turns its first latent.rope_dim features."""
    index_top_k: int = 64
    """Keys that a query attends to (K)."""

    def __post_init__(self):
        require_positive("attention", self, "index_heads", "index_dim", "index_top_k")
        if self.latent.query_latent_dim is None:
            raise ValueError(
                "attention.latent.query_latent_dim=None: the indexer makes its queries from that"
                " latent: set it to a width"
            )
        if not self.latent.is_causal:
            raise ValueError(
                "attention.latent.is_causal=False: the indexer chooses among earlier keys: set it"
                " to True"
            )
        if self.index_dim < self.latent.rope_dim:
            raise ValueError(
                f"attention.index_dim={self.index_dim} must be at least"
                f" attention.latent.rope_dim={self.latent.rope_dim}, which RoPE turns of it"
            )

    @property
    def num_heads(self) -> int:
        """N, query heads."""
        return self.latent.num_heads

    @property
    def num_kv_heads(self) -> int:
        """M, equal to N."""
        return self.latent.num_kv_heads

    @property
    def head_dim(self) -> int:
        """H, width of one query or key."""
        return self.latent.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one head's values."""
        return self.latent.value_dim

    @property
    def is_causal(self) -> bool:
        """True: a token sees no later one."""
        return self.latent.is_causal

    @property
    def cache_dim(self) -> int:
        """Values that a cache holds of one token: [latent, key turned by RoPE, index key]."""
        return self.latent.cache_dim + self.index_dim

    def projection_parameters(self, embed_dim: int) -> int:
        """Return the number of parameters in the projections, the indexer's included."""
        source = self.latent.query_latent_dim or 0
        index = source * self.index_heads * self.index_dim
        index += embed_dim * (self.index_dim + self.index_heads)
        return self.latent.projection_parameters(embed_dim) + index

    def check_precision(self, precision: PrecisionPolicy) -> None:
        """Refuse products and caches in few bits.

        Raises:
            ValueError: As for latent attention.
        """
        self.latent.check_precision(precision)

    def paged_cache(self, pool: Float[Array, "L P G 1 H"], tables: PageTables) -> IndexedPages:
        """Return the cache of a step of serving."""
        return IndexedPages(pool, tables)

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool = False,
        name: str | None = None,
    ) -> SparseLatentAttention:
        """Return the module of one layer, which computes the same in training."""
        del train
        return SparseLatentAttention(self.latent, context, execution, self, name=name)


class IndexedPages(NamedTuple):
    """Pages of a stack of layers, and the places of the tokens of a step."""

    pool: Float[Array, "L P G 1 H"]
    tables: PageTables


class _IndexedTokens(NamedTuple):
    """Tokens that a layer takes into its cache and attends with."""

    q: Any
    queries: Any
    entries: Any
    positions: Any
    layer: Any


_NEW = _IndexedTokens(_HEADS, _INDEX, (*_ROWS, None, None), _ROWS, ())
"""Logical axes of new tokens."""


class SparseLatentAttention(LatentAttention):
    """One layer of latent attention to chosen keys."""

    index: SparseLatentConfig = SparseLatentConfig()

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
        config = self.config
        config.check_precision(self.execution.precision)
        dtype = self.execution.precision.compute_dtype
        x = x.astype(dtype)
        q, source, latent, rope_key = self._into_latents(x)
        q_nope, q_rope, rope_key = self._place(q, rope_key, tokens)
        queries, index_key = self._index(x, source, tokens)
        kv_b = self._declare_kv_b(dtype)
        entries = None
        if cache is None:
            k, v = self._expand(latent, rope_key, kv_b)
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            out = self._attend_row(q, queries, IndexedKeys(index_key, k, v), tokens)
        else:
            if tokens.positions is None or tokens.segment_ids is not None:
                raise ValueError("a cache needs positions, and cannot hold packed segments")
            q_nope = self._per_head("bsnh,rnh->bsnr", q_nope, kv_b[..., : config.nope_dim])
            entry = jnp.concatenate([latent, rope_key[:, :, 0], index_key], axis=-1)[:, :, None]
            new = _IndexedTokens(
                jnp.concatenate([q_nope, q_rope], axis=-1),
                queries,
                entry,
                tokens.positions,
                cache.layer,
            )
            out, entries = self._attend_cache(new, cache.entries)
            out = self._per_head("bsnr,rnh->bsnh", out, kv_b[..., config.nope_dim :])
        observations = observer_of(self.execution).attention({}, tokens.token_mask)
        return self._leave(out), MixerOutputs(cache=entries, observations=observations)

    def _index(
        self, x: Array, source: Array, tokens: TokenInputs
    ) -> tuple[IndexQueries, Float[Array, "B S I"]]:
        """Return index queries and keys, turned by their positions."""
        index = self.index
        into = ((-2,), (-1,))
        axes = (ax.EMBED, ax.HEAD_DIM)
        stream = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
        placement = self.execution.placement

        def product(name: str, inputs: int, outputs: int, dtype: Any = None) -> Product:
            weight = self._declare(name, (inputs, outputs), axes, into).astype(x.dtype)
            return Product("bsd,dr->bsr", weight, (None, None), stream, dtype)

        heads, width = index.index_heads, index.index_dim
        of_latent = {"q": product("index_q", source.shape[-1], heads * width)}
        of_input = {
            "k": product("index_k", x.shape[-1], width),
            "weights": product("index_weights", x.shape[-1], heads, jnp.float32),
        }
        q = along_stream(source, of_latent, placement)["q"]
        inputs = along_stream(x, of_input, placement)
        gain = Declaration(shape=(width,), axes=(ax.NORM,), role="norm", matrix=None, init="ones")
        bias = dataclasses.replace(gain, role="state", init="zeros")
        k = layer_norm(
            inputs["k"],
            declare(self, "index_k_norm", gain),
            declare(self, "index_k_bias", bias),
            _EPSILON,
        )
        q = placement.place(q.reshape(*q.shape[:2], heads, width), _INDEX.q)
        k = placement.place(k[:, :, None], (*_ROWS, None, None))
        if self.config.positions == "rotary":
            angles = self._angles(tokens, q.shape[1])
            q, k = rotate(q, angles), rotate(k, angles)
        weights = placement.place(inputs["weights"], _INDEX.weights)
        return jax.lax.stop_gradient((IndexQueries(q, weights), k[:, :, 0]))

    def _attend_row(
        self, q: Array, queries: IndexQueries, keys: IndexedKeys, tokens: TokenInputs
    ) -> Float[Array, "B S N Hv"]:
        """Compute the softmax over the chosen tokens of the row."""
        length = q.shape[1]
        rules = self._rules()
        if length <= self.index.index_top_k:
            return self._attend(q, keys.k, keys.v, tokens, rules)[0]
        documents = tokens.segment_ids
        if documents is None:
            documents = jnp.ones((q.shape[0], length), jnp.int32)
        documents = self.execution.placement.place(documents, _ROWS)

        def run(q, queries, keys, documents, *, batch_axes):
            del batch_axes
            places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), documents.shape)

            def see(rows: tuple[Array, Array]) -> Array:
                is_same = rows[0][:, :, None] == documents[:, None]
                return is_same & (rows[1][:, :, None] >= places[:, None])

            return attend_chosen(
                q,
                queries,
                keys,
                see,
                (documents, places),
                top_k=self.index.index_top_k,
                scale=self._scale(),
            )

        of_keys = IndexedKeys._make(((*_ROWS, None), _HEADS, _HEADS))
        region = self.execution.placement.region(
            run, in_axes=(_HEADS, _INDEX, of_keys, _ROWS), out_axes=_HEADS
        )
        return region(q, queries, keys, documents)

    def _attend_cache(self, new: _IndexedTokens, entries: Any) -> tuple[Array, Any]:
        """Compute the softmax over the chosen tokens of a cache, with the new ones in it."""
        placement = self.execution.placement
        if isinstance(entries, IndexedPages):
            pages = page_axes(entries.pool)
            region = placement.region(
                self._over_pages, in_axes=(_NEW, pages, TABLE_AXES), out_axes=(_HEADS, pages)
            )
            out, pool = region(new, *entries)
            return out, IndexedPages(pool, entries.tables)

        def run(new, entries, *, batch_axes):
            del batch_axes
            entry = new.entries.astype(entries.dtype)
            entries = write_slots(entries, entry, new.layer, new.positions)
            of_layer = layer_of(entries, new.layer)
            return self._over_entries(new.q, new.queries, of_layer, new.positions), entries

        region = placement.region(
            run, in_axes=(_NEW, LATENT_CACHE_AXES), out_axes=(_HEADS, LATENT_CACHE_AXES)
        )
        return region(new, entries)

    def _over_pages(self, new: _IndexedTokens, pool: Array, tables: PageTables, *, batch_axes: Any):
        """Attend to the pages of each sequence: those with one new token, then those with more."""
        del batch_axes
        pool = write_pages(pool, new.entries[0], new.layer, tables.slots)
        pages, size = pool.shape[1:3]
        flat = pool.reshape(-1, *pool.shape[2:])  # of all layers: taking one would copy its pages
        single = tables.singles.shape[0]
        outputs = []
        for table, part in (
            (tables.singles, slice(None, single)),
            (tables.pieces, slice(single, None)),
        ):
            rows, width = table.shape
            if not rows:
                continue
            entries = flat.at[new.layer * jnp.int32(pages) + table].get(mode="clip")
            entries = entries.reshape(rows, width * size, *pool.shape[3:])
            arrays = (new.q, new.queries, new.positions)
            q, queries, positions = jax.tree.map(
                lambda x, rows=rows, part=part: x[0, part].reshape(rows, -1, *x.shape[2:]), arrays
            )
            out = self._over_entries(q, queries, entries, positions)
            outputs.append(out.reshape(-1, *out.shape[2:]))
        return jnp.concatenate(outputs)[None], pool

    def _over_entries(
        self, q: Array, queries: IndexQueries, entries: Array, positions: Array
    ) -> Float[Array, "B S N R"]:
        """Attend to entries [B U 1 H] by position; the value of one is its latent."""
        config = self.config
        entries = entries.astype(q.dtype)
        keys = IndexedKeys(
            entries[:, :, 0, config.cache_dim :],
            entries[..., : config.cache_dim],
            entries[..., : config.latent_dim],
        )
        slots = jnp.arange(entries.shape[1], dtype=jnp.int32)
        return attend_chosen(
            q,
            queries,
            keys,
            lambda positions: positions[:, :, None] >= slots[None, None],
            positions,
            top_k=self.index.index_top_k,
            scale=self._scale(),
        )
