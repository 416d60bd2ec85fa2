# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Goodput: every second is in one row, lost steps are found, files of killed starts are readable.

That they agree with a clock beside a real run is in tests/faults/test_watches.py.
"""

import json
import types

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmoe.resilience import goodput
from jaxmoe.resilience.goodput import (
    ROWS,
    Ledger,
    StartRecord,
    account,
    format_goodput,
    read_ledger,
)
from jaxmoe.tracking.report import TIME_ROWS
from jaxmoe.training import stopwatch
from jaxmoe.training.stopwatch import Stopwatch, process_age

KINDS = [value for name, value in vars(stopwatch).items() if name.isupper()]


class Clock:
    """The wall clock and the other one, which pass together."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(goodput, "time", types.SimpleNamespace(time=lambda: self.now))

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


programs = st.recursive(
    st.floats(0.0, 100.0),
    lambda parts: st.tuples(st.sampled_from(KINDS), st.lists(parts, max_size=4)),
)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(programs, max_size=5))
def test_every_second_has_one_kind(parts):
    now = [5.0]
    spent = Stopwatch("start", clock=lambda: now[0], already=2.0)

    def run(part):
        if isinstance(part, float):
            now[0] += part
            return
        kind, inner = part
        with spent.on(kind):
            for one in inner:
                run(one)

    for part in parts:
        run(part)
    assert spent.total == pytest.approx(2.0 + now[0] - 5.0)
    assert all(value >= 0.0 for value in spent.seconds.values())


def test_the_innermost_kind_counts_even_after_an_error():
    now = [0.0]
    spent = Stopwatch("loop", clock=lambda: now[0])
    with pytest.raises(KeyError), spent.on("hooks"):
        now[0] += 1.0
        with spent.on("checkpoint"):
            now[0] += 10.0
            raise KeyError
    now[0] += 100.0
    assert spent.seconds == {"loop": 100.0, "hooks": 1.0, "checkpoint": 10.0}


def test_every_kind_has_a_row():
    assert set(KINDS) == set(ROWS)
    assert 0.0 < process_age() < 7 * 86400.0


def _start(clock, path, first_step, reports, *, status=None, every=1):
    """A start of 5 s, then steps of 1 s and 0.5 s of waiting for data; saves at the end of each
    `every` reports."""
    spent = Stopwatch("start", clock=clock)
    clock.now += 5.0
    ledger = Ledger(path, spent, first_step=first_step)
    step = first_step
    for number, steps in enumerate(reports, 1):
        for _ in range(steps):
            with spent.on("data"):
                clock.now += 0.5
            with spent.on("dispatch"):
                clock.now += 1.0
            step += 1
        ledger.record(step)
        if number % every == 0:
            with spent.on("checkpoint"):
                clock.now += 0.25
            ledger.record(step, is_kept=True)
    if status:
        ledger.record(step, status=status)


def test_a_killed_start_costs_the_steps_after_its_checkpoint(clock, tmp_path):
    path, began = tmp_path / "goodput.jsonl", clock.now
    _start(clock, path, 0, [10, 10, 5], every=2)  # saves 20, reaches 25, is killed
    clock.now += 30.0
    _start(clock, path, 20, [10, 10], status="preempted")
    clock.now += 7.0
    _start(clock, path, 40, [10], status="done")
    clock.now += 1000.0
    _start(clock, path, 50, [10], status="done")
    books = account(read_ledger(path))
    assert books.lost_steps == 5 and books.starts == 4
    assert books.wall_seconds == pytest.approx(clock.now - began)
    assert dict(books.seconds) == pytest.approx(
        {
            "ended": 1000.0,
            "train": 60.0,
            "data": 30.0,
            "down": 30.0,
            "start": 20.0,
            "lost": 7.5,
            "preempted": 7.0,
            "checkpoint": 1.25,
        }
    )
    assert books.share == pytest.approx(60.0 / (clock.now - began - 1000.0))
    words = format_goodput(json.loads(json.dumps(books.to_json())))
    assert words.startswith(
        "goodput 38.5% (training steps that count) of 1155.8 s in 4 starts, 5 steps lost: ended 87%"
    )


def test_steps_of_two_starts_can_be_lost_at_once(clock, tmp_path):
    """The newest checkpoint was damaged: the third start goes on from one of the first."""
    path = tmp_path / "goodput.jsonl"
    _start(clock, path, 0, [10, 10])
    _start(clock, path, 20, [10])
    _start(clock, path, 10, [30], status="done")
    books = account(read_ledger(path))
    assert books.lost_steps == 20 and books.seconds["train"] == pytest.approx(40.0)


def test_a_rollback_within_a_start_costs_its_steps(clock, tmp_path):
    path, spent = tmp_path / "goodput.jsonl", Stopwatch("dispatch", clock=clock)
    ledger = Ledger(path, spent, first_step=0)
    for step in (10, 20, 12, 30):
        clock.now += 10.0
        ledger.record(step)
    books = account(read_ledger(path))
    # 8 of the 10 s up to step 20, and those that ended at step 12 again.
    assert books.lost_steps == 8 and dict(books.seconds) == pytest.approx(
        {"train": 22.0, "lost": 18.0}
    )


starts = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.lists(st.tuples(st.integers(0, 60), st.floats(0.0, 50.0)), max_size=5),
        st.sampled_from(["running", "done", "preempted"]),
        st.floats(0.0, 100.0),
    ),
    min_size=1,
    max_size=5,
)


@hypothesis.settings(max_examples=40)
@hypothesis.given(starts)
def test_the_rows_are_the_wall_time_whatever_happened(given):
    records, now = [], 0.0
    for number, (first_step, reports, status, pause) in enumerate(given, 1):
        began, step, train = now, first_step, 0.0
        for steps, seconds in [(0, 0.0), *reports]:
            step, train = step + steps, train + seconds
            record = StartRecord(
                start=number,
                began=began,
                first_step=first_step,
                step=step,
                status=status,
                seconds={"start": 1.0, "train": train, "data": train / 3},
            )
            records.append(record)
        end = began + sum(records[-1].seconds.values())
        now = end + pause
    books = account(records)
    assert books.wall_seconds == pytest.approx(end, abs=1e-6)
    assert all(value >= 0.0 for value in books.seconds.values()) and 0.0 <= books.share <= 1.0


def test_a_line_is_written_over_until_it_is_a_minute_old(clock, tmp_path):
    path, spent = tmp_path / "goodput.jsonl", Stopwatch("dispatch", clock=clock)
    ledger = Ledger(path, spent, first_step=0)
    for step in range(1, 601):
        clock.now += 1.0
        ledger.record(step)
        assert read_ledger(path)[-1].step == step
    assert len(path.read_text().splitlines()) == 11


def test_what_a_killed_start_has_cut_is_passed_over(clock, tmp_path):
    path = tmp_path / "goodput.jsonl"
    _start(clock, path, 0, [10])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"start": 1, "began": 10')
    _start(clock, path, 10, [10], status="done")
    assert {record.start for record in read_ledger(path)} == {1, 2}
    assert account(read_ledger(path)).lost_steps == 0


def test_no_ledger_is_an_empty_one(tmp_path):
    assert account(read_ledger(tmp_path / "goodput.jsonl")).to_json() == {
        "share": 0.0,
        "wall_seconds": 0,
        "starts": 0,
        "lost_steps": 0,
        "seconds": {},
    }


def test_the_report_explains_every_row():
    rows = {*ROWS.values(), *goodput._BETWEEN.values(), "down", "lost"}
    assert rows == TIME_ROWS.keys()
