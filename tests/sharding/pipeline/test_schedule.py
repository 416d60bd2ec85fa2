# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Schedule tables: order of work, idle time, kept inputs, text, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import catalog
from sharding.pipeline import (
    GPipeConfig,
    InterleavedConfig,
    PassRun,
    Schedule,
    StageWork,
    forward_schedule,
)
from sharding.pipeline.schedule import Kind, most_at_once
from sharding.pipeline.times import from_times

CONFIGS = {
    "interleaved": [
        InterleavedConfig(chunks=chunks, weight_gradients=when)
        for chunks in (1, 2, 3, 4)
        for when in ("at_once", "deferred")
    ],
    "gpipe": [GPipeConfig()],
}


@st.composite
def steps(draw):
    """A config, stages and micro-batches that it accepts."""
    config = draw(st.sampled_from([config for row in CONFIGS.values() for config in row]))
    stages = draw(st.integers(1, 8))
    if config.chunks > 1:
        return config, stages, stages * draw(st.integers(1, 64 // stages))
    return config, stages, draw(st.integers(1, 64))


def assert_is_a_pipeline(schedule, *, kinds):
    """Follow the arrays of every micro-batch from tick to tick."""
    last = schedule.stages * schedule.chunks - 1
    micro_batches = range(schedule.micro_batches)
    reached = {micro: -1 for micro in micro_batches}  # last group whose F is done
    returned = {micro: last + 1 for micro in micro_batches}  # lowest whose B is done
    deferred = set()  # whose W is done
    for row in schedule.ticks:
        assert len(row) == schedule.stages
        forward, backward, weights = [], [], []
        for stage, works in enumerate(row):
            assert [work.kind for work in works] in [
                list(some) for n in range(4) for some in itertools.combinations(kinds, n)
            ]
            for work in works:
                done = {"F": forward, "B": backward, "W": weights}[work.kind]
                done.append((work.micro, work.chunk * schedule.stages + stage))
        for done, step, state in ((forward, 1, reached), (backward, -1, returned)):
            assert len({micro for micro, _ in done}) == len(done), "two groups in one tick"
            for micro, group in done:
                assert group == state[micro] + step
                state[micro] = group
        assert all(reached[micro] == last for micro, _ in backward)
        assert all(returned[micro] <= group for micro, group in weights)
        assert deferred.isdisjoint(weights)
        deferred.update(weights)
        if weights:
            assert len(weights) == schedule.stages, "a stage idles in a tick with W"
    assert set(reached.values()) == {last}
    assert set(returned.values()) == {0 if "B" in kinds else last + 1}
    assert len(deferred) == ("W" in kinds) * (last + 1) * schedule.micro_batches


def test_every_schedule_is_tested():
    assert set(CONFIGS) == set(catalog.names("pipeline"))


@settings(max_examples=60)
@given(steps(), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1))
def test_every_table_is_a_pipeline_with_the_idle_time_of_the_formula(
    step, forward, backward, share
):
    config, stages, micro_batches = step
    schedule = config.schedule(stages, micro_batches)
    assert_is_a_pipeline(schedule, kinds="FBW" if schedule.has_deferred else "FB")
    assert schedule.has_backward
    given = forward, backward, share * backward
    wanted = (stages - 1) / (config.chunks * micro_batches)
    if schedule.has_deferred:
        wanted *= (forward + backward - given[2]) / (forward + backward)
    assert schedule.bubble(*given) == pytest.approx(wanted, abs=1e-12)
    useful = micro_batches * (forward + backward)
    assert schedule.seconds(*given) == pytest.approx(useful * (1 + wanted))
    runs = schedule.runs()
    assert [run.first for run in runs] == [
        sum(run.length for run in runs[:i]) for i in range(len(runs))
    ]
    assert sum(run.length for run in runs) == len(schedule.ticks)


@settings(max_examples=40)
@given(steps())
def test_kept_inputs_are_those_of_the_formula(step):
    config, stages, micro_batches = step
    passes = micro_batches * config.chunks
    steady = {
        "interleaved": [
            2 * (stages - 1 - stage) + (config.chunks - 1) * stages + 1 for stage in range(stages)
        ],
        "gpipe": [micro_batches] * stages,
    }[config.name]
    # A stage cannot keep more inputs than a step has.
    wanted = tuple(min(passes, kept) for kept in steady)
    assert config.schedule(stages, micro_batches).kept() == wanted


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 64))
def test_forward_tables_take_any_number_of_micro_batches(stages, chunks, micro_batches):
    schedule = forward_schedule(stages, chunks, micro_batches)
    assert_is_a_pipeline(schedule, kinds="F")
    assert not schedule.has_backward
    assert schedule.kept() == (1,) * stages
    if chunks == 1 or micro_batches % stages == 0:
        wanted = (stages - 1) / (chunks * micro_batches)
        assert schedule.bubble() == pytest.approx(wanted, abs=1e-12)
    else:
        assert schedule.bubble() > (stages - 1) / (chunks * micro_batches)


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_deferred_gradients_wait_for_the_first_stage(stages, chunks, turns):
    config = InterleavedConfig(chunks=chunks, weight_gradients="deferred")
    schedule = config.schedule(stages, turns * stages)
    waiting = [most_at_once(schedule.deferred_stays(stage)) for stage in range(stages)]
    assert waiting == list(range(1, stages + 1))


def test_deferred_gradients_idle_as_zero_bubble_schedules():
    """ZB-H1's (p - 1) / (3 m) with two chunks, half of it with four, where F, B and W are equal."""
    found = [
        InterleavedConfig(chunks=chunks, weight_gradients="deferred").schedule(8, 32).bubble(1, 2)
        for chunks in (1, 2, 4)
    ]
    assert found == pytest.approx([7 / 48, 7 / 96, 7 / 192])


def test_groups_go_round_the_stages():
    schedule = InterleavedConfig(chunks=2).schedule(3, 3)
    assert schedule.num_groups == 6
    assert [schedule.place(group) for group in range(6)] == [
        *((stage, 0) for stage in range(3)),
        *((stage, 1) for stage in range(3)),
    ]
    assert all(schedule.group(*schedule.place(group)) == group for group in range(6))
    assert schedule.when["F", 5, 2] == schedule.when["B", 5, 2] == 7


def test_runs_of_ticks():
    assert InterleavedConfig().schedule(4, 6).runs() == (
        PassRun("F", 0, 3),
        PassRun("FB", 3, 6),
        PassRun("B", 9, 3),
    )
    assert InterleavedConfig(weight_gradients="deferred").schedule(4, 6).runs() == (
        PassRun("F", 0, 3),
        PassRun("FB", 3, 3),
        PassRun("FBW", 6, 3),
        PassRun("BW", 9, 3),
    )
    assert GPipeConfig().schedule(4, 6).runs() == (PassRun("F", 0, 9), PassRun("B", 9, 9))


GOLDEN = {
    (InterleavedConfig(), 4): [
        "stage 0  F0 F1 F2 F3    .     .     B0    B1 B2 B3",
        "stage 1  .  F0 F1 F2    F3    B0    B1    B2 B3 .",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 B2    B3 .  .",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3 .  .  .",
    ],
    (InterleavedConfig(), 5): [
        "stage 0  F0 F1 F2 F3    F4    .     B0    B1    B2 B3 B4",
        "stage 1  .  F0 F1 F2    F3    F4+B0 B1    B2    B3 B4 .",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 F4+B2 B3    B4 .  .",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3 F4+B4 .  .  .",
    ],
    (InterleavedConfig(), 6): [
        "stage 0  F0 F1 F2 F3    F4    F5    B0    B1    B2    B3 B4 B5",
        "stage 1  .  F0 F1 F2    F3    F4+B0 F5+B1 B2    B3    B4 B5 .",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 F4+B2 F5+B3 B4    B5 .  .",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3 F4+B4 F5+B5 .  .  .",
    ],
    (InterleavedConfig(), 7): [
        "stage 0  F0 F1 F2 F3    F4    F5    F6+B0 B1    B2    B3    B4 B5 B6",
        "stage 1  .  F0 F1 F2    F3    F4+B0 F5+B1 F6+B2 B3    B4    B5 B6 .",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 F4+B2 F5+B3 F6+B4 B5    B6 .  .",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3 F4+B4 F5+B5 F6+B6 .  .  .",
    ],
    (InterleavedConfig(), 8): [
        "stage 0  F0 F1 F2 F3    F4    F5    F6+B0 F7+B1 B2    B3    B4    B5 B6 B7",
        "stage 1  .  F0 F1 F2    F3    F4+B0 F5+B1 F6+B2 F7+B3 B4    B5    B6 B7 .",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 F4+B2 F5+B3 F6+B4 F7+B5 B6    B7 .  .",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3 F4+B4 F5+B5 F6+B6 F7+B7 .  .  .",
    ],
    (InterleavedConfig(weight_gradients="deferred"), 4): [
        "stage 0  F0 F1 F2 F3    .     .     B0+W0    B1+W1 B2+W2 B3+W3",
        "stage 1  .  F0 F1 F2    F3    B0    B1+W0    B2+W1 B3+W2 W3",
        "stage 2  .  .  F0 F1    F2+B0 F3+B1 B2+W0    B3+W1 W2    W3",
        "stage 3  .  .  .  F0+B0 F1+B1 F2+B2 F3+B3+W0 W1    W2    W3",
    ],
    (GPipeConfig(), 4): [
        "stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3",
        "stage 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .",
        "stage 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .",
        "stage 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .",
    ],
    (GPipeConfig(), 8): [
        "stage 0  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  B0 B1 B2 B3 B4 B5 B6 B7",
        "stage 1  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  B0 B1 B2 B3 B4 B5 B6 B7 .",
        "stage 2  .  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  B0 B1 B2 B3 B4 B5 B6 B7 .  .",
        "stage 3  .  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7 .  .  .",
    ],
    (InterleavedConfig(chunks=2), 4): [
        "stage 0  F0a F1a F2a F3a F0b F1b F2b F3b     .       .       B0b     B1b B2b "
        "B3b B0a B1a B2a B3a",
        "stage 1  .   F0a F1a F2a F3a F0b F1b F2b     F3b     B0b     B1b     B2b B3b "
        "B0a B1a B2a B3a .",
        "stage 2  .   .   F0a F1a F2a F3a F0b F1b     F2b+B0b F3b+B1b B2b     B3b B0a "
        "B1a B2a B3a .   .",
        "stage 3  .   .   .   F0a F1a F2a F3a F0b+B0b F1b+B1b F2b+B2b F3b+B3b B0a B1a "
        "B2a B3a .   .   .",
    ],
    (InterleavedConfig(chunks=2), 8): [
        "stage 0  F0a F1a F2a F3a F0b F1b F2b F3b     F4a     F5a     F6a+B0b F7a+B1b "
        "F4b+B2b F5b+B3b F6b+B0a F7b+B1a B2a     B3a     B4b     B5b B6b B7b B4a B5a B6a "
        "B7a",
        "stage 1  .   F0a F1a F2a F3a F0b F1b F2b     F3b     F4a+B0b F5a+B1b F6a+B2b "
        "F7a+B3b F4b+B0a F5b+B1a F6b+B2a F7b+B3a B4b     B5b     B6b B7b B4a B5a B6a B7a "
        ".",
        "stage 2  .   .   F0a F1a F2a F3a F0b F1b     F2b+B0b F3b+B1b F4a+B2b F5a+B3b "
        "F6a+B0a F7a+B1a F4b+B2a F5b+B3a F6b+B4b F7b+B5b B6b     B7b B4a B5a B6a B7a .   "
        ".",
        "stage 3  .   .   .   F0a F1a F2a F3a F0b+B0b F1b+B1b F2b+B2b F3b+B3b F4a+B0a "
        "F5a+B1a F6a+B2a F7a+B3a F4b+B4b F5b+B5b F6b+B6b F7b+B7b B4a B5a B6a B7a .   .   "
        ".",
    ],
}


@pytest.mark.parametrize(("config", "micro_batches"), GOLDEN)
def test_timetables_of_four_stages(config, micro_batches):
    text = config.schedule(4, micro_batches).text()
    assert text.splitlines() == GOLDEN[config, micro_batches]


def test_timetable_of_forward_passes():
    assert forward_schedule(2, 2, 3).text().splitlines() == [
        "stage 0  F0a F1a F0b F1b F2a .   F2b .",
        "stage 1  .   F0a F1a F0b F1b F2a .   F2b",
    ]


TIMES: dict[tuple[Kind, int, int, int], int] = {
    ("F", 0, 0, 0): 0,
    ("F", 1, 0, 0): 1,
    ("B", 1, 0, 0): 1,
    ("B", 0, 0, 0): 2,
}
WRONG: dict[str, tuple[dict[tuple[Kind, int, int, int], int | None], str]] = {
    "missing B": (
        {("B", 0, 0, 0): None},
        "t: B of group 0, micro-batch 0 is missing",
    ),
    "missing F": (
        {("F", 0, 0, 0): None},
        "t: F of group 0, micro-batch 0 is missing",
    ),
    "F too early": (
        {("F", 1, 0, 0): 0},
        "t: F of group 1, micro-batch 0 is in tick 0, and needs F of group 0, which is in tick 0",
    ),
    "B too early": (
        {("B", 0, 0, 0): 1},
        "t: B of group 0, micro-batch 0 is in tick 1, and needs B of group 1, which is in tick 1",
    ),
    "W too early": (
        {("W", 1, 0, 0): 1, ("W", 0, 0, 0): 1},
        "t: W of group 0, micro-batch 0 is in tick 1, and needs B of group 0, which is in tick 2",
    ),
    "missing W": (
        {("W", 1, 0, 0): 1},
        "t: W of group 0, micro-batch 0 is missing",
    ),
    "B before the head": (
        {("B", 1, 0, 0): 0},
        "t: B of group 1, micro-batch 0 is in tick 0, and needs F of group 1, which is in tick 1",
    ),
    "unknown micro-batch": (
        {("F", 0, 0, 1): 1},
        "t: tick 1, stage 0 has chunk 0 of micro-batch 1, of 1 chunks and 1 micro-batches",
    ),
    "two F": (
        {("F", 0, 0, 1): 0},
        "t: tick 0, stage 0 has ['F', 'F']: at most one F, then at most one B, then at most one W",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_are_refused(name):
    changes, message = WRONG[name]
    times = {key: tick for key, tick in (TIMES | changes).items() if tick is not None}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_times("t", 2, 1, 1, times)


def test_repeated_work_is_refused():
    right = from_times("t", 2, 1, 1, TIMES)
    again = dataclasses.replace(right, ticks=(*right.ticks, ((StageWork("F", 0, 0),), ())))
    with pytest.raises(ValueError, match=r"^t: F of group 0, micro-batch 0 is in ticks 0 and 3$"):
        again.check()
    short = dataclasses.replace(right, ticks=(*right.ticks, ((),)))
    with pytest.raises(ValueError, match=r"^t: tick 3 has 1 stages instead of 2$"):
        short.check()


def test_empty_tables_are_refused():
    message = "^t: stages=2, chunks=1 and micro_batches=0 must be at least 1$"
    with pytest.raises(ValueError, match=message):
        Schedule("t", 2, 1, 0, ()).check()


def test_no_chunks_are_refused():
    message = r"^execution\.pipeline\.chunks=0 must be at least 1$"
    with pytest.raises(ValueError, match=message):
        InterleavedConfig(chunks=0)


@pytest.mark.parametrize(("micro_batches", "way"), [(6, "4 or 8"), (3, "4")])
def test_micro_batches_that_do_not_fill_a_turn_are_refused(micro_batches, way):
    message = (
        f"training.accumulation={micro_batches} must be a multiple of execution.mesh.stage=4 with"
        f" execution.pipeline.chunks=2: set training.accumulation to {way}, or"
        " execution.pipeline.chunks to 1"
    )
    for refused in (InterleavedConfig(chunks=2).check, InterleavedConfig(chunks=2).schedule):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            refused(4, micro_batches)
    InterleavedConfig().check(4, micro_batches)
    GPipeConfig().check(4, micro_batches)
