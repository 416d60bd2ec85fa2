# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Item caches beside Belady's bound, and the property of each policy."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES, Use, expert_uses, replay
from jaxmoe.routing.telemetry.trace import RoutingTrace
from tests.support.traces import planted

traces = st.lists(st.integers(0, 6), min_size=1, max_size=40)
quick = settings(max_examples=20, deadline=None)


def uses(items, **fields):
    return [Use(item=item, time=float(i), **fields) for i, item in enumerate(items)]


def random_uses(items):
    """Uses with scores and expectations that are partly wrong."""
    return [
        Use(
            item=item,
            category=str(item % 2),
            scores={i: ((i * 7 + place) % 5) / 5 for i in range(7)},
            expected=tuple((item + i) % 7 for i in (1, 2)),
            time=float(place),
        )
        for place, item in enumerate(items)
    ]


@settings(max_examples=200, deadline=None)
@given(items=traces, capacity=st.integers(1, 7))
def test_no_policy_loads_fewer_items_than_belady(items, capacity):
    trace = random_uses(items)
    bound = replay(trace, ITEM_CACHES["belady"](), capacity).loads
    for name, config in ITEM_CACHES.items():
        found = replay(trace, config(), capacity)
        assert found.loads >= bound, name
        assert len(found.hits) == len(items) and found.loads >= found.hits.count(False)


@quick
@given(items=traces)
def test_a_cache_of_everything_misses_each_item_at_most_once(items):
    trace = random_uses(items)
    for name, config in ITEM_CACHES.items():
        found = replay(trace, config(), 7)
        assert found.hits.count(False) <= len(set(items)), name
        assert found.bytes_loaded == found.loads <= 7


@quick
@given(items=traces, capacity=st.integers(1, 6))
def test_a_larger_lru_cache_holds_all_that_a_smaller_one_does(items, capacity):
    small, large = (
        replay(uses(items), ITEM_CACHES["lru"](), c).hits for c in (capacity, capacity + 1)
    )
    assert all(not hit or more for hit, more in zip(small, large, strict=True))


@quick
@given(items=st.lists(st.integers(0, 3), min_size=1, max_size=9), capacity=st.integers(1, 3))
def test_belady_is_the_best_of_all_choices(items, capacity):
    best = {frozenset(): 0}
    for item in items:
        following = {}
        for held, loads in best.items():
            if item in held:
                options = {held: loads}
            elif len(held) < capacity:
                options = {held | {item}: loads + 1}
            else:
                options = {held - {gone} | {item}: loads + 1 for gone in held}
                options[held] = loads + 1  # the item is not stored
            for state, count in options.items():
                following[state] = min(count, following.get(state, count))
        best = following
    assert replay(uses(items), ITEM_CACHES["belady"](), capacity).loads == min(best.values())


def hits(name, items, capacity, **fields):
    found = replay(uses(items), ITEM_CACHES[name](**fields), capacity).hits
    return "".join("h" if hit else "." for hit in found)


@pytest.mark.parametrize(
    ("name", "items", "pattern"),
    [
        ("lru", "abcab", "....."),
        ("lru", "abacb", "..h.."),
        ("lfu", "aabcbac", ".h...h."),
        ("belady", "abcab", "...hh"),
        ("window", "abcabc", ".hhhhh"),
    ],
)
def test_what_is_evicted(name, items, pattern):
    assert hits(name, items, 2, **({"ahead": 1} if name == "window" else {})) == pattern


def test_a_window_never_waits_after_the_first_item_and_loads_each_once_a_cycle():
    found = replay(uses("abcde" * 3), ITEM_CACHES["window"](ahead=2), 3)
    assert found.hits == (False, *(True,) * 14)
    assert found.loads == 15 + 2


def test_a_right_prediction_hides_every_load_but_the_first():
    items = "abcadbeca"
    trace = [
        Use(item=item, expected=tuple(items[place + 1 : place + 2]))
        for place, item in enumerate(items)
    ]
    assert replay(trace, ITEM_CACHES["predicted"](), 2).hits == (False, *(True,) * 8)
    assert sum(replay(trace, ITEM_CACHES["lru"](), 2).hits) == 0


def test_scores_keep_what_the_router_prefers_though_it_was_not_used_lately():
    scores = {"a": 0.9, "b": 0.05, "c": 0.05, "d": 0.0}
    trace = [Use(item=item, scores=scores) for item in "abcda"]
    assert replay(trace, ITEM_CACHES["scores"](ahead=0), 2).hits[-1]
    assert not replay(trace, ITEM_CACHES["lru"](), 2).hits[-1]


def test_scores_below_the_largest_of_a_layer_decay():
    scores = {"a": 0.6, "b": 0.4}
    trace = [Use(item="b", scores={"a": 0.1, "b": 0.9})]
    trace += [Use(item="a", scores=scores)] * 4 + [Use(item="c"), Use(item="b")]
    assert not replay(trace, ITEM_CACHES["scores"](kept=1, ahead=0), 2).hits[-1]


def test_scores_load_the_next_layers_best_ahead():
    first = Use(item=(0, 0), category="0", scores={(0, 0): 1.0})
    second = Use(item=(1, 1), category="1", scores={(1, 0): 0.1, (1, 1): 0.9})
    found = replay([first, second] * 3, ITEM_CACHES["scores"](ahead=1), 2)
    assert found.hits == (False, False, True, True, True, True)


def test_an_answer_is_not_used_after_its_lifetime():
    trace = [Use(item="q", time=t) for t in (0.0, 1.0, 2.5, 3.0)]
    assert replay(trace, ITEM_CACHES["category"](lifetime=2.0), 9).hits == (
        False,
        True,
        False,
        True,
    )


def test_a_category_fills_its_quota_at_most():
    trace = [Use(item=i, category="a") for i in (1, 2, 3, 2, 3, 1)]
    config = ITEM_CACHES["category"](quota=0.5)
    assert replay(trace, config, 4).hits == (*(False,) * 3, True, True, False)
    # Other categories keep the rest, and an item larger than the quota is not stored.
    other = [Use(item=9, category="b"), *trace, Use(item=9, category="b")]
    assert replay(other, config, 4).hits == (False, *replay(trace, config, 4).hits, True)
    large = [Use(item=9, category="b"), *[Use(item=8, size=3.0, category="a")] * 2]
    assert not any(replay(large, config, 4).hits)


def test_a_category_that_fills_the_cache_keeps_what_was_used_last():
    trace = [Use(item=i, category="a") for i in "abcccdccdcdcdd"]
    lru = replay(trace, ITEM_CACHES["lru"](), 2).hits
    assert sum(lru) == 10
    assert replay(trace, ITEM_CACHES["category"](), 2).hits == lru
    assert replay(trace, ITEM_CACHES["category"](quota=0.5), 4).hits == lru


def test_categories_have_terms_of_their_own():
    config = ITEM_CACHES["category"](
        quota=0.5, terms=("news:lifetime=2", "a:b:quota=0.25,search_cost=1,saved=2,trial=1")
    )
    news, other = (
        [Use(item=kind, category=kind, time=t) for t in (0.0, 1.0, 2.5, 3.0)]
        for kind in ("news", "chat")
    )
    assert replay(news, config, 4).hits == (False, True, False, True)
    assert replay(other, config, 4).hits == (False, True, True, True)
    own = config.by_category()["a:b"]
    assert (own.quota, own.search_cost, own.saved, own.trial) == (0.25, 1.0, 2.0, 1)
    assert not any(replay([Use(item=i, category="a:b") for i in (1, 2, 2, 2)], config, 4).hits)
    for text, words in {
        "quota=0.5": "must be CATEGORY:FIELD=VALUE",
        "a:size=1": "'size' must be one of lifetime, quota",
        "a:trial=x": "'x' is no number",
        "a:quota=2": r"quota=2.0 lie in \(0, 1\]",
    }.items():
        with pytest.raises(ValueError, match=words):
            ITEM_CACHES["category"](terms=(text,))


def test_a_category_that_is_not_worth_its_search_is_not_stored():
    config = ITEM_CACHES["category"](search_cost=1.0, saved=4.0, trial=4)
    unlike = [Use(item=i, category="chat") for i in range(4)]
    again = [Use(item=9, category="chat")] * 3
    assert not any(replay(unlike + again, config, 99).hits)
    same = [Use(item=0, category="faq")] * 4
    assert replay(same + [Use(item=9, category="faq")] * 2, config, 99).hits[-1]


def test_items_larger_than_the_cache_are_used_and_not_stored():
    trace = [Use(item="big", size=5.0), Use(item="small"), Use(item="big", size=5.0)]
    found = replay(trace, ITEM_CACHES["lru"](), 3.0)
    assert found.hits == (False,) * 3 and found.bytes_missed == 11.0
    assert found.seconds(2.0, 0.1) == pytest.approx(5.5 + 0.3)


def test_experts_of_a_trace_are_used_once_a_step_and_layer():
    ids = np.array([[[0, 1], [1, 4]], [[2, 3], [2, 3]]])  # L T K, 4 marks an empty slot
    trace = RoutingTrace(token_ids=np.arange(2), expert_ids=ids, num_experts=4)
    found = expert_uses(trace, tokens=2, size=3.0)
    assert [use.item for use in found] == [(0, 1), (0, 0), (1, 2), (1, 3)]
    assert found[0].scores[0, 1] == pytest.approx(2 / 3) and found[1].scores == {}
    alone = expert_uses(trace, tokens=1)
    assert [use.item for use in alone] == [(0, 0), (0, 1), (1, 2), (1, 3), (0, 1), (1, 2), (1, 3)]
    assert alone[4].expected == ((1, 2), (1, 3))


def test_experts_are_expected_by_the_tokens_of_the_step():
    """Tokens 5 and 6 choose experts of their own; the step before has other tokens."""
    chosen = {5: [0, 1], 6: [2, 3]}
    tokens = np.array([5, 6, 5, 6])
    ids = np.array([[chosen[token] for token in tokens.tolist()]] * 2)
    found = expert_uses(RoutingTrace(token_ids=tokens, expert_ids=ids, num_experts=4), tokens=1)
    expected = [use.expected for use in found if use.category == "0" and use.scores]
    assert expected == [(), ((1, 0), (1, 1)), ((1, 0), (1, 1)), ((1, 2), (1, 3))]


def test_tables_of_tokens_hide_more_loads_than_the_step_before():
    trace = planted(0, num_layers=3, num_tokens=512, faithful=1.0)
    found = expert_uses(trace, tokens=1)
    stale, before = list(found), dict.fromkeys("012", found[0].expected)
    for place, use in enumerate(found):
        if use.scores:
            following = before[str((int(use.category) + 1) % 3)]
            stale[place] = dataclasses.replace(use, expected=following)
            before[use.category] = tuple(one.item for one in found[place : place + 2])
    hits = [sum(replay(one, ITEM_CACHES["predicted"](), 12).hits) for one in (found, stale)]
    assert hits[0] > 1.3 * hits[1]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("scores", {"weight": 0.0}),
        ("predicted", {"ahead": -1}),
        ("window", {"ahead": -1}),
        ("category", {"quota": 0.0}),
    ],
)
def test_values_that_mean_nothing_are_refused(name, fields):
    (field,) = fields
    with pytest.raises(ValueError, match=f"{field}={fields[field]}"):
        ITEM_CACHES[name](**fields)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity=-1"):
        replay(uses("a"), ITEM_CACHES["lru"](), -1)


def test_whether_items_fit_does_not_depend_on_the_order_of_their_sizes():
    for order in itertools.permutations((0.1, 0.2, 0.3)):  # floats whose sum depends on it
        trace = [Use(item=size, size=size) for size in (*order, *order)]
        found = replay(trace, ITEM_CACHES["lru"](), 0.6)
        assert found.hits == (False,) * 3 + (True,) * 3, order
