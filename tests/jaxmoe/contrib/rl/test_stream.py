# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The store of samples: nothing is lost or taken twice, and nothing is older than allowed."""

import concurrent.futures
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.rl.stream import SampleStore, StoreClosedError, StreamCounts

COLUMNS = ("question", "answers", "rewards")
STEPS = st.sampled_from(["submit", "draw", "score", "fill", "take", "advance"])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(STEPS, st.integers(0, 3), st.integers(1, 3)), max_size=60),
    staleness=st.integers(0, 2),
)
def test_rows_are_conserved_in_any_interleaving_and_never_too_old(steps, staleness):
    """Workers of all tasks interleave: each step is what one of them does while it has the lock."""
    store = SampleStore(COLUMNS, staleness=staleness)
    versions, taken, held = {}, [], []
    for step, choice, number in steps:
        if step == "submit":
            version = max(store.version - choice, 0)
            versions[store.submit(version, question=len(versions))] = version
        elif step in ("draw", "score"):
            reads, writes = ("question", "answers") if step == "draw" else ("answers", "rewards")
            rows = _now(store.claim, [reads], [writes], number)
            assert all(row.values.keys() == {reads} for row in rows)
            held += [(row, writes) for row in rows]
            # No two workers fill one column of a row.
            assert len({(row.id, column) for row, column in held}) == len(held)
        elif step == "fill" and held:
            row, column = held.pop(choice % len(held))
            is_there = store.fill(row.id, **{column: row.id})
            assert is_there == (store.version - row.version <= staleness)
        elif step == "take":
            rows = _now(store.take, ["question", "answers", "rewards"], number)
            assert all(row.values == dict.fromkeys(COLUMNS, row.id) for row in rows)
            assert all(store.version - row.version <= staleness for row in rows)
            taken += [row.id for row in rows]
        else:
            store.advance(store.version + number - 1)
        counts = store.counts()
        assert counts.submitted == len(versions) and counts.taken == len(taken)
        assert counts.submitted == counts.taken + counts.dropped + counts.waiting
    assert sorted(set(taken)) == taken  # once each, and the oldest first


def _now(call, *arguments):
    try:
        return call(*arguments, timeout=0)
    except TimeoutError:
        return []


def test_nothing_is_lost_or_taken_twice_by_four_threads():
    store, total = SampleStore(COLUMNS, staleness=10**6), 60
    taken, versions = [], []

    def submits():
        for number in range(total):
            store.submit(store.version, question=number)

    def works(reads, writes):
        while True:
            for row in store.claim([reads], [writes], 1):
                store.fill(row.id, **{writes: row.values[reads]})

    def trains():
        while len(taken) < total:
            rows = store.take(COLUMNS, 4)
            taken.extend(row.values["rewards"] for row in rows)
            versions.extend(row.version for row in rows)
            store.advance(store.version + 1)
        store.close()

    with concurrent.futures.ThreadPoolExecutor(6, thread_name_prefix="store") as pool:
        ends = [pool.submit(submits), pool.submit(trains)]
        ends += [pool.submit(works, *pair) for pair in 2 * [("question", "answers")]]
        ends += [pool.submit(works, *pair) for pair in 2 * [("answers", "rewards")]]
        for end in ends[:2]:
            end.result(timeout=60)
        for end in ends[2:]:
            with pytest.raises(StoreClosedError):
                end.result(timeout=60)
    assert taken == list(range(total))
    assert versions == sorted(versions)
    assert store.counts() == StreamCounts(submitted=total, taken=total)


def test_rows_older_than_the_staleness_are_dropped_and_counted():
    store = SampleStore(["answers"], staleness=1, version=3)
    store.submit(3, answers="a")
    store.advance(4)
    store.submit(3, answers="b")
    store.submit(4, answers="c")
    store.advance(5)
    assert store.counts() == StreamCounts(submitted=3, dropped=2, waiting=1)
    [row] = store.take(["answers"], 1)
    assert (row.id, row.version, row.values) == (2, 4, {"answers": "c"})
    store.submit(3, answers="d")
    assert store.counts() == StreamCounts(submitted=4, taken=1, dropped=3)


def test_without_staleness_only_rows_of_the_current_version_are_taken():
    store = SampleStore(["answers"])
    for version in range(3):
        store.advance(version)
        store.submit(version, answers=version)
        assert [row.values for row in store.take(["answers"], 1)] == [{"answers": version}]
    store.submit(2, answers="late")
    store.advance(3)
    assert store.counts() == StreamCounts(submitted=4, taken=3, dropped=1)


def test_rows_are_taken_in_the_order_of_submission():
    """A row that is complete early does not overtake: batches do not depend on time."""
    store = SampleStore(COLUMNS, staleness=1)
    for number in range(2):
        store.submit(0, question=number)
    first, second = store.claim(["question"], ["answers"], 2)
    store.fill(second.id, answers="b")
    assert not _now(store.take, ["answers"], 1)
    store.fill(first.id, answers="a")
    assert [row.values["answers"] for row in store.take(["answers"], 2)] == ["a", "b"]


@pytest.mark.parametrize("error", [None, OSError("no disk")])
def test_closing_wakes_all_that_wait(error):
    store = SampleStore(COLUMNS)
    waits = (
        lambda: store.claim(["question"], ["answers"], 1),
        lambda: store.take(["rewards"], 1),
    )
    with concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="store") as pool:
        ends = [pool.submit(wait) for wait in waits]
        time.sleep(0.02)
        assert not any(end.done() for end in ends)
        threading.Timer(0.0, store.close, [error]).start()
        for end in ends:
            with pytest.raises(StoreClosedError if error is None else OSError):
                end.result(timeout=10)
    with pytest.raises(StoreClosedError if error is None else OSError):
        store.submit(0)


def test_misuse_is_refused_in_words():
    store = SampleStore(COLUMNS)
    number = store.submit(0, question="1+1=")
    for call, message in (
        (lambda: store.submit(1), "a row of version 1 was submitted to a store at version 0"),
        (lambda: store.submit(0, prompt=""), "no column prompt: there are answers, question"),
        (lambda: store.claim(["prompt"], [], 1), "no column prompt"),
        (lambda: store.fill(number, answers=""), f"row {number}: claim answers first"),
        (lambda: store.advance(-1), "version -1 is before the current 0"),
        (lambda: SampleStore(COLUMNS, staleness=-1), "staleness=-1"),
        (lambda: SampleStore(()), "0 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TimeoutError, match="too few rows"):
        store.take(["answers"], 1, timeout=0.01)
