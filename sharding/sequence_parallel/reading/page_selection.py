# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the pages of a cache that a generated token attends to.

    page        one of the runs of `size` neighbouring slots
    bounds      max over query heads of sum_h max(q_h low_h, q_h high_h)      low, high: smallest
                and largest of each feature of the page's keys
    mean        max over query heads of q . (mean of the page's keys)
    read        the first pages, the latest ones, and the `kept` others with the largest scores

`bounds` is at least the logit of every key of the page. Each key and value head has pages of its
own; several layers in a row may share the choice of the first of them. A prompt is read whole.
After it, the pages that received the least attention from its last tokens may be evicted: they are
never read again, and their slots stay allocated.

The choice is made over the pages of all devices, each of which reads those that it holds: tokens
are equal on every mesh. It changes the loss; with pages enough for the whole cache, and none
evicted, the cache is read as a whole, bit by bit as without a selection.

Sources: Quest (arXiv 2406.10774) for `bounds`; MPCache (arXiv 2501.06807) for eviction once after
the prompt and for sharing between layers; Kinetics (arXiv 2506.05333) for blocks by their mean key.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cache_formats import (
    into_cache,
    out_of_cache,
)
from sharding.sequence_parallel.cached import (
    CACHE_AXES,
    KVCache,
    NewTokens,
    attend_and_merge,
    attend_in_region,
    held_positions,
    layer_of,
    write_tokens,
)
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    LocalAttention,
    Seen,
)
from sharding.sequence_parallel.reading.page_scores import (
    NUM_SUMMARIES,
    PageScore,
    attention_received,
    empty_summaries,
    page_scores,
    with_new_keys,
)
from sharding.sequence_parallel.reading.readings import CacheReading
from sharding.sequence_parallel.reading.summarized_cache import (
    SummarizedCache,
    all_pages,
    own_pages,
    pages_of,
)

_NEVER: Final = 2**30
"""Position that no query reaches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageSelectionConfig(CacheReading):
    """Attention of generated tokens to some pages of the cache; it changes what is generated."""

    name: ClassVar[str] = "pages"
    selects: ClassVar[bool] = True

    kept: int = 16
    """Pages with the largest scores that a token reads, beside the first and the latest ones."""
    size: int = 16
    """Tokens of a page."""
    first: int = 1
    """Pages at the beginning that are always read."""
    latest: int = 2
    """Pages at the end that are always read, the incomplete one included."""
    score: PageScore = "bounds"
    """How pages are scored: by an upper bound of their logits (Quest), or by their mean key."""
    evicted_share: float = 0.0
    """Share of the prompt's pages, without the first and the latest ones, that are dropped after it
    because they received the least attention."""
    layers_per_choice: int = 2
    """Neighbouring layers that read the pages which the first of them chose."""

    def __post_init__(self):
        for field, least in (
            ("kept", 0),
            ("size", 1),
            ("first", 0),
            ("latest", 1),
            ("layers_per_choice", 1),
        ):
            if getattr(self, field) < least:
                raise ValueError(
                    f"reading.{field}={getattr(self, field)} must be at least {least}"
                    + (": a token reads itself" if field == "latest" else "")
                )
        if not 0.0 <= self.evicted_share < 1.0:
            raise ValueError(
                f"reading.evicted_share={self.evicted_share} must be at least 0 (none) and below 1"
            )

    @property
    def num_read(self) -> int:
        """Pages that a token reads."""
        return self.kept + self.first + self.latest

    def num_slots(self, length: int, shards: int) -> int:
        """Return the positions in whole pages, as many on every device."""
        part = shards * self.size
        return -(-length // part) * part

    def check(self, name: str, *, can_select: bool) -> None:
        """Refuse a mixer whose cache has no pages."""
        if not can_select:
            raise ValueError(
                f"reading:{self.name} (--cache_pages) selects pages of keys and values, and the"
                f" cache of {name!r} layers is read as a whole: leave it out, or use a model with"
                " 'grouped_query' attention"
            )

    def describe(self, slots: int) -> str:
        """Return the pages that a token reads as text."""
        pages = slots // self.size
        evicted = f" evicted_share={self.evicted_share}" if self.evicted_share else ""
        read = min(self.num_read, pages)
        return f"{self.name} pages={read} of {pages} page_size={self.size}{evicted}"

    def reads_all(self, slots: int) -> bool:
        """Return whether a token reads every page of a cache.

        Args:
            slots: Slots of the cache, on all devices.
        """
        return self.num_read * self.size >= slots and not self.evicted_share

    def bytes_read(
        self, slots: int, *, bytes_per_token: int, num_layers: int, key_features: int
    ) -> int:
        """Return the bytes of the pages of a token, and of what they were chosen by.

        read pages * size * bytes of a token            keys and values of all layers
        choosing layers * P * features * 4 * n          n: 2 for bounds, 1 for mean
        """
        if self.reads_all(slots):
            return slots * bytes_per_token
        pages = slots // self.size
        choosing = -(-num_layers // self.layers_per_choice)
        summaries = 4 * key_features * NUM_SUMMARIES[self.score]
        read = min(self.num_read, pages) * self.size * bytes_per_token
        return read + choosing * pages * summaries

    def initial(self, entries: KVCache, placement: Placement) -> SummarizedCache:
        """Return an empty cache with its pages."""
        layers, batch, slots, heads, width = entries.k.shape
        pages = (batch, slots // self.size, heads)
        choosing = -(-layers // self.layers_per_choice)
        empty = SummarizedCache(
            *entries,
            summaries=empty_summaries(self.score, (layers, *pages, width)),
            is_kept=jnp.ones((layers, *pages), bool),
            is_chosen=jnp.zeros((choosing, *pages), bool),
        )
        return jax.tree.map(lambda x: placement.place(x, CACHE_AXES[: x.ndim]), empty)

    def attend(
        self,
        new: NewTokens,
        cache: SummarizedCache,
        *,
        placement: Placement,
        rules: AttentionRules,
    ) -> tuple[Float[Array, "B S N H"], Seen, SummarizedCache]:
        """Write new keys and values and attend: a prompt to all, a single token to some pages."""
        axes = placement.mesh_axes(ax.ACT_CACHE)
        slots: Any = jax.tree.map(lambda x: CACHE_AXES[: x.ndim], cache)
        reads_all = self.reads_all(cache.k.shape[2])

        def run(new, cache, *, batch_axes):
            del batch_axes
            q, positions, token_mask = new.q, new.positions, new.token_mask
            key_positions = held_positions(cache.k.shape[2], axes)
            slots = positions - key_positions[0]
            entries = write_tokens(KVCache(cache.k, cache.v), new.k, new.v, new.layer, slots)
            cache = cache._replace(k=entries.k, v=entries.v)
            if not reads_all:
                rounded = out_of_cache(into_cache(new.k, entries.k), q.dtype)
                operands = rounded, new.layer, slots // jnp.int32(self.size), token_mask
                cache = cache._replace(summaries=with_new_keys(cache.summaries, *operands))
                if q.shape[1] == 1:
                    return self._attend_to_pages(new, cache, key_positions, rules, axes)
            keys, values = (out_of_cache(layer_of(part, new.layer), q.dtype) for part in entries)
            rows = q.shape[0]
            token_pair = (
                HeldTokens.at(positions, rows, rules),
                HeldTokens.at(key_positions, rows, rules),
            )
            out, seen = attend_and_merge(LocalAttention(q, keys, values, *token_pair, rules), axes)
            if self.evicted_share and q.shape[1] > 1:
                operands = q, keys, key_positions, positions, token_mask, rules, axes
                pages_kept = self._kept(
                    attention_received(*operands, self.size), token_mask, key_positions, axes
                )
                cache = cache._replace(is_kept=cache.is_kept.at[new.layer].set(pages_kept))
            return out, seen, cache

        return attend_in_region(run, new, cache, slots, placement=placement, rules=rules)

    def _attend_to_pages(
        self,
        new: NewTokens,
        cache: SummarizedCache,
        key_positions: Array,
        rules: AttentionRules,
        axes: tuple[str, ...],
    ) -> tuple[Array, Seen, SummarizedCache]:
        """Return the attention of one token a row to the pages that are chosen for it."""
        every = self.layers_per_choice
        q, layer = new.q, new.layer
        choice = layer // jnp.int32(self.layers_per_choice)

        def choose() -> Array:
            return self._chosen(new, cache, key_positions, rules, axes)

        if every == 1:
            chosen = choose()
        else:
            chosen = jax.lax.cond(
                layer == choice * jnp.int32(every), choose, lambda: cache.is_chosen[choice]
            )
        cache = cache._replace(is_chosen=cache.is_chosen.at[choice].set(chosen))
        batch, _, num_heads, width = q.shape
        number = min(self.num_read, chosen.shape[1])
        is_read, pages = jax.lax.top_k(chosen.swapaxes(1, 2).astype(jnp.int32), number)
        pages = pages.astype(jnp.int32)
        keys, values = (
            out_of_cache(pages_of(part, layer, pages, self.size), q.dtype)
            for part in (cache.k, cache.v)
        )
        rows = keys.shape[0]
        heads = chosen.shape[2]
        slots = key_positions.reshape(-1, self.size)[pages]  # B, M, number, size
        slots = jnp.where(is_read[..., None] > 0, slots, jnp.int32(_NEVER)).reshape(rows, -1)
        single_queries = q.reshape(rows, 1, num_heads // heads, width)
        queries = HeldTokens.at(jnp.repeat(new.positions, heads, axis=0), rows, rules)
        attention = LocalAttention(
            single_queries, keys, values, queries, HeldTokens.at(slots, rows, rules), rules
        )
        out, seen = attend_and_merge(attention, axes)
        by_head = {name: part.reshape(batch, num_heads, 1) for name, part in seen.items()}
        return out.reshape(batch, 1, num_heads, -1), by_head, cache

    def _chosen(
        self,
        new: NewTokens,
        cache: SummarizedCache,
        key_positions: Array,
        rules: AttentionRules,
        axes: tuple[str, ...],
    ) -> Bool[Array, "B p M"]:
        """Return which pages of this device are among those that a token reads."""
        q, layer, positions = new.q, new.layer, new.positions
        size = jnp.int32(self.size)
        heads = cache.k.shape[3]
        starts = key_positions[:: self.size][None, :]  # positions of the first slots
        number = jnp.clip(positions + 1 - starts, 0, size)  # B, p: keys that the token may see
        by_head = q.reshape(q.shape[0], heads, -1, q.shape[3])
        scores = page_scores(by_head, layer_of(cache.summaries, layer), number)
        pages = starts // size
        current = positions // size
        is_fixed = (pages < self.first) | (pages > current - self.latest)
        is_seen = number > 0
        if rules.window is not None:
            is_seen &= starts + size > positions + 1 - rules.window
        if rules.chunk is not None:
            is_seen &= starts + size > positions - positions % jnp.int32(rules.chunk)
        scores = jnp.where(is_fixed[..., None], jnp.inf, scores)
        may_read = is_seen[..., None] & (is_fixed[..., None] | layer_of(cache.is_kept, layer))
        scores = jnp.where(may_read, scores, -jnp.inf)
        everywhere = all_pages(scores, axes)
        _, best = jax.lax.top_k(everywhere, min(self.num_read, everywhere.shape[2]))
        is_best = jnp.put_along_axis(
            jnp.zeros_like(everywhere, bool), best, jnp.array(True), axis=2, inplace=False
        )
        return own_pages(is_best, pages, axes) & may_read

    def _kept(
        self, received: Array, token_mask: Array, key_positions: Array, axes: tuple[str, ...]
    ) -> Bool[Array, "B p M"]:
        """Return which pages of this device are left after the prompt."""
        pages = key_positions[:: self.size][None, :] // jnp.int32(self.size)
        length = jnp.sum(token_mask, axis=1, dtype=jnp.int32)[:, None]
        end = (length - 1) // jnp.int32(self.size) - jnp.int32(self.latest - 1)
        may_go = (pages >= self.first) & (pages < end)
        number = jnp.maximum(end - self.first, 0).astype(jnp.float32)
        number = jnp.floor(jnp.float32(self.evicted_share) * number)
        received = jnp.where(may_go[..., None], received, jnp.inf)
        order = jnp.argsort(all_pages(received, axes), axis=2)
        rank = jnp.argsort(order, axis=2)
        is_left = rank >= number[..., None].astype(rank.dtype)
        return own_pages(is_left, pages, axes)
