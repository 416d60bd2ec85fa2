# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selection of pages against loops in numpy: bounds, needles, eviction, meshes, and bytes read."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import MeshConfig, make_mesh
from sharding.constrain import Placement
from sharding.rules import DATA_PARALLEL
from sharding.sequence_parallel import (
    AttentionRules,
    CacheFormat,
    KVCache,
    NewTokens,
    PageSelectionConfig,
    WholeCacheConfig,
    as_cached,
    empty_slots,
)
from sharding.sequence_parallel.reading.page_scores import (
    empty_summaries,
    page_scores,
    with_new_keys,
)
from sharding.sequence_parallel.reading.summarized_cache import pages_of
from tests.support.tolerances import assert_close

LAYERS, BATCH, PROMPT, NEW, HEADS, GROUP, WIDTH = 3, 2, 20, 5, 2, 2, 4
LENGTHS = np.array((20, 13))
SLOTS = 32
SELECTIONS = {
    "bounds": PageSelectionConfig(kept=2, size=4, latest=1),
    "mean_alone": PageSelectionConfig(kept=1, size=4, score="mean", layers_per_choice=1),
    "evicting": PageSelectionConfig(kept=1, size=2, evicted_share=0.5, first=2),
}
PLAIN = AttentionRules()


def drawn_tokens(seed=0):
    """Queries, keys and values [layer, row, position, head, width]; keys of unequal size."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, BATCH, PROMPT + NEW)
    q = 2.0 * rng.standard_normal((*shape, HEADS * GROUP, WIDTH))
    k = rng.standard_normal((*shape, HEADS, WIDTH)) * rng.uniform(0.2, 3.0, (*shape, 1, 1))
    v = rng.standard_normal((*shape, HEADS, WIDTH))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def empty_cache(reading, form: CacheFormat = "compute"):
    """Cache of a reading without tokens, on the current mesh."""

    def start():
        k, v = (empty_slots((LAYERS, BATCH, SLOTS, HEADS, WIDTH), form, jnp.float32) for _ in "kv")
        return reading.initial(KVCache(k, v), Placement(DATA_PARALLEL))

    return jax.jit(start)()


def through_cache(
    reading, tokens, *, form: CacheFormat = "compute", rules=PLAIN, mesh=None, new=NEW
):
    """Outputs of each step [new, layer, row, N, H], and the last cache."""
    place = Placement(DATA_PARALLEL)

    def attend(parts, cache, layer, positions, token_mask):
        tokens = NewTokens(*parts, layer, positions, token_mask)
        out, _, cache = reading.attend(tokens, cache, placement=place, rules=rules)
        return place.place(out[:, -1], (None,) * 3), cache

    rows, found = np.arange(BATCH), []
    whole = np.broadcast_to(np.arange(PROMPT, dtype=np.int32), (BATCH, PROMPT))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        attend, cache = jax.jit(attend), empty_cache(reading, form)
        for step in range(-1, new):
            outs = []
            for layer in range(LAYERS):
                if step < 0:
                    positions, mask = whole, whole < LENGTHS[:, None]
                    parts = [x[layer][:, :PROMPT] for x in tokens]
                else:
                    positions = (LENGTHS + step).astype(np.int32)[:, None]
                    mask = np.ones((BATCH, 1), bool)
                    parts = [x[layer][rows, LENGTHS + step][:, None] for x in tokens]
                out, cache = attend(parts, cache, np.int32(layer), positions, mask)
                outs.append(np.asarray(out))
            found.append(np.stack(outs))
    return np.stack(found[1:]), cache


def evicted_by_hand(reading, q, k, length):
    """Pages dropped after the prompt, from one layer, row and group: q [U G H], k [U H]."""
    received = np.zeros(SLOTS // reading.size)
    for place in range(length):
        share = np.exp(q[place] @ k[: place + 1].T / np.sqrt(WIDTH))
        share = (share / share.sum(-1, keepdims=True)).sum(0)
        np.add.at(received, np.arange(place + 1) // reading.size, share)
    may_go = np.arange(reading.first, (length - 1) // reading.size - reading.latest + 1)
    number = int(reading.evicted_share * len(may_go))
    return set(may_go[np.argsort(received[may_go])][:number])


def chosen_by_hand(reading, asked, keys, evicted):
    """Pages that a token reads: asked [G H], the keys that it may see [U H]."""
    size, count = reading.size, -(-len(keys) // reading.size)
    pages = range(count)
    fixed = {p for p in pages if p < reading.first or p >= count - reading.latest}
    scores = {}
    for page in set(pages) - fixed - evicted:
        part = keys[page * size : (page + 1) * size]
        scores[page] = (asked @ part.mean(0)).max()
        if reading.score == "bounds":
            products = np.maximum(asked * part.min(0), asked * part.max(0))
            scores[page] = products.sum(-1).max()
    best = sorted(scores, key=lambda page: -scores[page])
    return fixed | set(best[: reading.num_read - len(fixed)])


def by_hand(reading, tokens, window=None, chunk=None):
    """The outputs of `through_cache` by loops over rows, heads, steps and layers."""
    q, k, v = (np.asarray(x, np.float64) for x in tokens)
    outs = np.zeros((NEW, LAYERS, BATCH, HEADS * GROUP, WIDTH))
    for row, head, step in np.ndindex(BATCH, HEADS, NEW):
        length = int(LENGTHS[row])
        now, group, pages = length + step, slice(head * GROUP, (head + 1) * GROUP), set()
        for layer in range(LAYERS):
            asked, keys = q[layer, row, now, group], k[layer, row, : now + 1, head]
            if layer % reading.layers_per_choice == 0:
                before = q[layer, row, :length, group], keys
                pages = chosen_by_hand(
                    reading, asked, keys, evicted_by_hand(reading, *before, length)
                )
            seen = [u for u in range(now + 1) if u // reading.size in pages]
            if window is not None:
                seen = [u for u in seen if u > now - window]
            if chunk is not None:
                seen = [u for u in seen if u // chunk == now // chunk]
            weights = np.exp(asked @ keys[seen].T / np.sqrt(WIDTH))
            weights /= weights.sum(-1, keepdims=True)
            outs[step, layer, row, group] = weights @ v[layer, row, seen, head]
    return outs


@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_attention_equals_loops_over_pages(name):
    tokens = drawn_tokens()
    found, _ = through_cache(SELECTIONS[name], tokens)
    assert_close(found, by_hand(SELECTIONS[name], tokens), kind="end_to_end")


def test_fewer_pages_change_the_output_and_enough_pages_are_bitwise_the_whole_cache():
    tokens = drawn_tokens()
    whole, _ = through_cache(WholeCacheConfig(), tokens, new=2)
    few, _ = through_cache(SELECTIONS["bounds"], tokens, new=2)
    every = dataclasses.replace(SELECTIONS["bounds"], kept=6)
    assert every.num_read * every.size == SLOTS and every.reads_all(SLOTS)
    found, _ = through_cache(every, tokens, new=2)
    np.testing.assert_array_equal(found, whole)
    assert np.abs(few - whole).max() > 1e-3
    # One page less than all goes through the selection, and here leaves out empty pages only.
    gathered, _ = through_cache(dataclasses.replace(every, kept=5), tokens, new=2)
    assert_close(gathered, whole, kind="end_to_end")


def test_a_chunk_is_all_that_is_seen_and_all_that_is_chosen():
    tokens, rules = drawn_tokens(), AttentionRules(chunk=6)
    every = PageSelectionConfig(kept=6, size=4)
    found, _ = through_cache(every, tokens, rules=rules)
    assert_close(found, by_hand(every, tokens, chunk=6), kind="end_to_end")
    # A chunk lies in at most two pages: a third has nothing to give.
    few = PageSelectionConfig(kept=1, size=4, first=0, latest=1, layers_per_choice=1)
    chosen, _ = through_cache(few, tokens, rules=rules)
    assert_close(chosen, found, kind="end_to_end")


def test_eviction_counts_what_the_last_tokens_of_a_prompt_see_of_their_chunk():
    tokens, rules = drawn_tokens(), AttentionRules(chunk=6)
    evicting = dataclasses.replace(SELECTIONS["evicting"], kept=4)
    _, cache = through_cache(evicting, tokens, rules=rules, new=1)
    _, plain = through_cache(evicting, tokens, new=1)
    assert (np.asarray(cache.is_kept) != np.asarray(plain.is_kept)).any()


def test_pages_outside_of_the_window_are_not_chosen():
    tokens, reading = drawn_tokens(), PageSelectionConfig(kept=0, size=4, first=0, latest=1)
    one_more = dataclasses.replace(reading, kept=1, layers_per_choice=1)
    # 5 positions reach at most one page beyond the latest: a second one has nothing to give.
    found, _ = through_cache(one_more, tokens, rules=AttentionRules(window=5))
    whole, _ = through_cache(WholeCacheConfig(), tokens, rules=AttentionRules(window=5))
    assert_close(found, whole, kind="end_to_end")


@pytest.mark.slow
def test_rounded_keys_have_bounds_of_the_rounded_keys():
    q, k, v = drawn_tokens()
    rounded = [np.stack([as_cached(jnp.asarray(x), "int4") for x in part]) for part in (k, v)]
    reading = SELECTIONS["bounds"]
    found, _ = through_cache(reading, (q, k, v), form="int4")
    assert_close(found, by_hand(reading, (q, *rounded)), kind="end_to_end")


@given(st.integers(0, 2**16), st.sampled_from((1, 3, 8)), st.sampled_from((0.01, 1.0, 100.0)))
def test_no_key_of_a_page_exceeds_its_bound(seed, size, spread):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, 2, 2, 4)).astype(np.float32)
    keys = (spread * rng.standard_normal((2, 12, 2, 4))).astype(np.float32)
    pages = np.broadcast_to(np.arange(12, dtype=np.int32) // size, (2, 12))
    mask = np.broadcast_to(np.arange(12) < 10, (2, 12))
    empty = empty_summaries("bounds", (1, 2, 12, 2, 4))
    summaries = with_new_keys(
        empty, jnp.asarray(keys), jnp.int32(0), jnp.asarray(pages), jnp.asarray(mask)
    )
    one = {name: part[0] for name, part in summaries.items()}
    scores = page_scores(jnp.asarray(q), one, jnp.full((2, 12), size, jnp.int32))
    logits = np.einsum("bmgh,bumh->bumg", q, keys).max(-1)
    held = np.take_along_axis(np.asarray(scores), pages[..., None], axis=1)
    slack = 1e-5 * spread * np.abs(q).sum()
    assert (logits[:, :10] <= held[:, :10] + slack).all()
    assert (np.asarray(scores)[:, -(-10 // size) :] < -1e20).all(), "pages without keys"


def test_a_planted_needle_is_always_chosen():
    """One key in the middle has by far the largest logit; its page is chosen at every step."""
    reading = PageSelectionConfig(kept=1, size=4, latest=1, layers_per_choice=1)
    q, k, v = drawn_tokens()
    rng, place = np.random.default_rng(3), 6
    k[:, :, place] = 0.0
    asked = np.abs(rng.standard_normal(WIDTH)).astype(np.float32) + 1.0
    q[...], k[:, :, place] = asked, 20.0 * asked
    v[:, :, place] = 7.0
    found, cache = through_cache(reading, (q, k, v))
    assert np.asarray(cache.is_chosen)[:, :, place // reading.size].all()
    assert_close(found, np.full_like(found, 7.0), kind="end_to_end")


def test_bytes_read_are_those_of_the_pages_and_their_summaries():
    forms: dict[CacheFormat, int] = {
        "compute": 4 * WIDTH,
        "int8": WIDTH + 4,
        "int4": WIDTH // 2 + 4,
    }
    for form, of_key in forms.items():
        token = LAYERS * HEADS * 2 * of_key
        sizes = {"bytes_per_token": token, "num_layers": LAYERS, "key_features": HEADS * WIDTH}
        slots = empty_slots((LAYERS, BATCH, SLOTS, HEADS, WIDTH), form, jnp.float32)
        for reading in SELECTIONS.values():
            pages = jnp.zeros((BATCH, HEADS, reading.num_read), jnp.int32)

            def read(held, pages=pages, size=reading.size):
                return pages_of(held, jnp.int32(0), pages, size)

            bits = sum(
                math.prod(part.shape) * jax.dtypes.itemsize_bits(part.dtype)
                for part in jax.tree.leaves(jax.eval_shape(read, slots))
            )
            cache = empty_cache(reading, form)
            choosing = cache.is_chosen.shape[0]
            one_layer = sum(part[0, 0].nbytes for part in cache.summaries.values())
            wanted = LAYERS * 2 * bits // 8 // BATCH + choosing * one_layer
            assert reading.bytes_read(SLOTS, **sizes) == wanted
            assert wanted == reading.num_read * reading.size * token + choosing * one_layer
        every = PageSelectionConfig(kept=SLOTS, size=1)
        for reading in (every, WholeCacheConfig()):
            assert reading.bytes_read(SLOTS, **sizes) == SLOTS * token


MESHES = {"seq2_tensor2": MeshConfig(seq=2, tensor=2), "seq4": MeshConfig(seq=4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_spread_cache_selects_the_same_pages(name):
    tokens, reading = drawn_tokens(), SELECTIONS[name]
    wanted, cache = through_cache(reading, tokens)
    for config in MESHES.values():
        mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
        found, spread = through_cache(reading, tokens, mesh=mesh)
        assert spread.k.sharding.spec[2] == "seq"
        for part in ("is_kept", "is_chosen"):
            np.testing.assert_array_equal(getattr(spread, part), getattr(cache, part))
        assert_close(found, wanted, kind="end_to_end")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kept": -1}, "reading.kept=-1 must be at least 0"),
        ({"size": 0}, "reading.size=0 must be at least 1"),
        ({"latest": 0}, "reading.latest=0 must be at least 1: a token reads itself"),
        (
            {"evicted_share": 1.0},
            r"reading.evicted_share=1.0 must be at least 0 \(none\) and below",
        ),
    ],
)
def test_selections_that_cannot_be_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        PageSelectionConfig(**fields)
