# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Partial pipelines: paths of micro-batches, their timetables and slots, time saved."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.depth.paths import choose_paths
from sharding.pipeline import GPipeConfig, InterleavedConfig
from sharding.pipeline.first_come import first_come_schedule
from sharding.pipeline.schedule import Kind
from sharding.pipeline.times import from_times
from tests.sharding.pipeline.test_slots import assert_slots_execute


@st.composite
def paths_of(draw, groups=None, micro_batches=None):
    """Groups, micro-batches, share that is left out, and groups that are never left out."""
    number = groups or draw(st.integers(2, 16))
    never = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=number // 4))))
    most = (number - len(never)) // 2
    ratio = draw(st.integers(0, most)) / number
    return number, micro_batches or draw(st.integers(2, 64)), ratio, never


@given(paths_of())
def test_loads_are_equal_and_no_two_neighbours_are_left_out(step):
    groups, micro_batches, ratio, never = step
    paths = choose_paths(*step)
    assert len(paths) == micro_batches
    assert {len(path) for path in paths} == {groups - round(ratio * groups)}
    for path in paths:
        assert set(never) <= set(path)
        assert list(path) == sorted(path)
        assert all(group in path or group + 1 in path for group in range(groups - 1))
    loads = [sum(group in path for path in paths) for group in range(groups) if group not in never]
    assert max(loads) - min(loads) <= 1
    assert min(loads) >= 1
    assert paths == choose_paths(*step)


def test_each_micro_batch_leaves_out_the_groups_after_those_of_the_one_before():
    rows = [
        "".join("x" if group in path else "." for group in range(8))
        for path in choose_paths(8, 6, 0.25)
    ]
    assert rows == [".xxx.xxx", "x.xxx.xx", "xx.xxx.x", "xxx.xxx.", ".xxx.xxx", "x.xxx.xx"]


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(2, 24), st.data())
def test_partial_tables_read_the_right_slots_and_the_fewest(stages, chunks, micro_batches, data):
    groups = max(stages * chunks, 2)
    stages, chunks = (stages, chunks) if stages * chunks > 1 else (2, 1)
    step = data.draw(paths_of(groups, micro_batches))
    schedule = first_come_schedule("skip", stages, chunks, choose_paths(*step))
    slots = assert_slots_execute(schedule)
    left_out = round(step[2] * groups)
    assert schedule.num_hops <= 1 + (left_out > 0)
    assert len(slots.enters) == schedule.num_hops
    assert len(slots.arrives) == len(schedule.hops) <= 1 + (left_out > 0)
    assert len(schedule.when) == 2 * micro_batches * (groups - left_out)
    assert_keeps_order(schedule, slots)


def test_half_of_the_micro_batches_pass_through_the_ends_in_the_other_order():
    assert choose_paths(6, 3, 0.0, order="swapped_ends") == (
        (0, 1, 2, 3, 4, 5),
        (0, 1, 2, 3, 4, 5),
        (1, 0, 2, 3, 5, 4),
    )
    assert choose_paths(4, 2, 0.25, order="swapped_ends") == ((1, 2, 3), (0, 3, 2))


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(2, 24), st.data())
def test_tables_with_swapped_ends_read_the_right_slots(stages, chunks, micro_batches, data):
    groups = max(stages * chunks, 4)
    stages, chunks = (stages, chunks) if stages * chunks > 3 else (4, 1)
    step = data.draw(paths_of(groups, micro_batches))
    paths = choose_paths(*step, order="swapped_ends")
    schedule = first_come_schedule("swap", stages, chunks, paths)
    slots = assert_slots_execute(schedule)
    assert stages - 1 in schedule.hops or round(step[2] * groups)
    assert len(slots.arrives) == len(schedule.hops)
    assert len(slots.enters) == schedule.num_hops
    assert_keeps_order(schedule, slots)


def assert_keeps_order(schedule, slots):
    """Sums over micro-batches are in their order: in B of each group, at the head, at the end."""
    for group in range(schedule.num_groups):
        ticks = [
            schedule.when["B", group, micro]
            for micro in range(schedule.micro_batches)
            if schedule.passes(group, micro)
        ]
        assert ticks == sorted(set(ticks))
    for by_hop in (slots.leaves, slots.returns):
        micros = [int(hop[tick]) for tick in range(len(schedule.ticks)) for hop in by_hop]
        assert [micro for micro in micros if micro >= 0] == list(range(schedule.micro_batches))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "ratio", "never", "saved"),
    [
        (4, 16, 0.25, (), 0.22),
        (8, 32, 0.125, (), 0.10),
        (8, 32, 0.25, (), 0.15),
        (8, 64, 0.25, (), 0.20),
        (16, 64, 0.25, (), 0.15),
        (8, 64, 0.5, (), 0.49),
        (8, 64, 0.25, (0,), 0.0),
    ],
)
def test_partial_tables_take_less_time(stages, micro_batches, ratio, never, saved):
    """Unless a stage is never left out, which then works on every micro-batch."""
    pipeline = InterleavedConfig()
    whole = pipeline.schedule(stages, micro_batches)
    partial = pipeline.schedule(
        stages, micro_batches, choose_paths(stages, micro_batches, ratio, never)
    )
    found = 1 - partial.seconds() / whole.seconds()
    assert saved <= found < saved + 0.02
    assert max(partial.kept()) <= max(whole.kept()) + 1
    assert [run.kinds for run in partial.runs()] == ["F", "FB", "B"]
    works = micro_batches * (stages - round(ratio * stages)) / stages
    assert partial.bubble() == pytest.approx(partial.seconds() / (4 * works) - 1)


def test_chunks_save_time_although_the_first_group_is_never_left_out():
    pipeline, paths = InterleavedConfig(chunks=2), choose_paths(8, 64, 0.25, (0,))
    partial, whole = pipeline.schedule(4, 64, paths), pipeline.schedule(4, 64)
    assert 1 - partial.seconds() / whole.seconds() > 0.1


def test_sixteen_stages_are_planned_in_a_second():
    started = time.perf_counter()
    first_come_schedule("skip", 16, 1, choose_paths(16, 64, 0.25))
    assert time.perf_counter() - started < 5.0  # 0.1 on an idle machine


def test_paths_through_all_groups_give_the_ordinary_table():
    ordinary = InterleavedConfig().schedule(4, 6)
    found = first_come_schedule("interleaved", 4, 1, choose_paths(4, 6, 0.0))
    assert dataclasses.replace(found, paths=None) == ordinary


@pytest.mark.parametrize(("stages", "more"), [(4, 1.053), (8, 1.026)])
def test_swapped_ends_take_little_more_time(stages, more):
    """Every stage does the same work, and waits where the order changes."""
    pipeline, micro_batches = InterleavedConfig(), 4 * stages
    paths = choose_paths(stages, micro_batches, 0.0, order="swapped_ends")
    swapped, whole = (pipeline.schedule(stages, micro_batches, some) for some in (paths, None))
    assert swapped.num_hops == 2
    assert swapped.hops == ((1, 3) if stages == 4 else (1, 2, stages - 1))
    assert swapped.seconds() / whole.seconds() == pytest.approx(more, abs=1e-3)
    assert max(swapped.kept()) <= max(whole.kept()) + 1


def test_timetable_of_four_stages():
    schedule = InterleavedConfig().schedule(4, 6, choose_paths(4, 6, 0.25))
    assert schedule.text().splitlines() == [
        "stage 0  F1 F2 F3    F5    .     B1    B2    B3 B5",
        "stage 1  F0 F4 F2    F3    B0    B2    B3    B4 .",
        "stage 2  .  F0 F1    F4+B0 F3+B1 F5+B3 B4    B5 .",
        "stage 3  .  .  F0+B0 F1+B1 F2+B2 F4+B4 F5+B5 .  .",
    ]


GROUPS = (
    "training.skipping.ratio={0} leaves out {1} of training.skipping.groups=3, and at most {2} that"
    " are not in training.skipping.never={3} may be left out, no two neighbours at once: choose a"
    " smaller ratio, or fewer groups in never"
)
WRONG = {
    "unknown group": (
        (4, 2, 0.25, (4,)),
        "training.skipping.never=(4,) has the group 4, and numbers of training.skipping.groups=4"
        " must be at least 0 and at most 3",
    ),
    "neighbours": (
        (3, 4, 0.7, ()),
        GROUPS.format(0.7, 2, "1 of the 3", ()),
    ),
    "always left out": (
        (3, 4, 0.3, (0, 2)),
        GROUPS.format(0.3, 1, "0 of the 1", (0, 2)),
    ),
    "too few to swap": (
        (3, 4, 0.0, (), "swapped_ends"),
        "training.skipping.groups=3 must be at least 4 with training.skipping.order=swapped_ends,"
        " which exchanges the first two groups and the last two",
    ),
}


@pytest.mark.parametrize(("step", "message"), WRONG.values(), ids=WRONG)
def test_steps_without_paths_are_refused(step, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_paths(*step)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            GPipeConfig(),
            "gpipe has no timetable for micro-batches that leave out groups: take interleaved",
        ),
        (
            InterleavedConfig(weight_gradients="deferred"),
            "weight_gradients=deferred is not available where micro-batches leave out groups,"
            " whose timetable has idle ticks elsewhere: set it to at_once",
        ),
    ],
    ids=["gpipe", "deferred"],
)
def test_schedules_without_partial_tables_refuse_paths(pipeline, message):
    for refused in (pipeline.check_paths, lambda: pipeline.schedule(2, 4, choose_paths(2, 4, 0.5))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            refused()


def test_tables_beside_their_paths_are_refused():
    times: dict[tuple[Kind, int, int, int], int] = {("F", 0, 0, 0): 0, ("B", 0, 0, 0): 0}
    build = from_times("t", 2, 1, 1, times, ((0,),))
    assert (build.before(0, 0), build.after(0, 0), build.num_hops) == (-1, 2, 2)
    for paths, message in [
        (((0, 1),), "t: F of group 1, micro-batch 0 is missing"),
        (((1,),), "t: F of group 0, micro-batch 0 is not on its path"),
        (((),), "t: the path of micro-batch 0 has no group"),
        (((0,), (0,)), "t: there are paths of 2 micro-batches, and 1 micro-batches"),
        *(
            (
                (path,),
                f"t: the path of micro-batch 0, {path}, must have each of the groups 0 to 1 at"
                " most once",
            )
            for path in ((0, 2), (1, 1))
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            from_times("t", 2, 1, 1, times, paths)
