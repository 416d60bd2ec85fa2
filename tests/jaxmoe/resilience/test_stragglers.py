# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Who is late: planted ones are named for 2 to 1000 processes, and noise is not.

That a real run of two processes names one that sleeps is in tests/faults/test_watches.py.
"""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxmoe.resilience import stragglers
from jaxmoe.resilience.stragglers import BEFORE, StragglerHook, StragglerRule, StragglerWatch
from jaxmoe.training.stopwatch import DATA, DISPATCH, WAIT, Stopwatch

DATA_COLUMN = BEFORE.index(DATA)
STEP = 0.1
"""Seconds of a step of the devices."""


def times(rng, processes, late=None, by=0.0):
    """One window: 2 ms of each process before the collective, unevenly, and hiccups; it waits for
    the rest of the step. Each of `late` spends `by` more on its data."""
    before = np.zeros((processes, len(BEFORE)))
    before[:, :] = 0.002 / len(BEFORE) * rng.lognormal(0.0, 0.5, before.shape)
    # Once in fifty windows a process is held up for 100 ms or so, over 20 steps.
    before[:, -1] += rng.exponential(0.1 / 20, processes) * (rng.random(processes) < 0.02)
    if late is not None:
        before[late, DATA_COLUMN] += by
    own = before.sum(axis=1)
    return before, max(STEP, own.max()) - own


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    processes=st.integers(2, 1000), seed=st.integers(0, 2**31), share=st.floats(0.0, 0.3)
)
def test_late_processes_are_named_whoever_and_however_many(processes, seed, share):
    """Fewer than half of them, all at once, in three windows, with what their time goes to."""
    rng = np.random.default_rng(seed)
    number = min(max(1, int(share * processes)), (processes - 1) // 2 or 1)
    late = np.sort(rng.choice(processes, number, replace=False))
    watch = StragglerWatch()
    named = [watch.window(*times(rng, processes, late, 0.3)) for _ in range(4)]
    found = {straggler.process: straggler for window in named for straggler in window}
    assert set(late) == set(found) and len(found) == sum(map(len, named)), "each once"
    for process in late:
        assert found[process].kind == DATA and found[process].excess > 0.29
    assert not named[0]


@pytest.mark.parametrize("processes", [2, 3, 100])
def test_who_waits_longer_than_it_is_late_is_not_late(processes):
    """40 ms late while the devices work for 100: no process waits for it; 80 ms: it is nearly as
    slow as they are."""
    rng = np.random.default_rng(processes)
    for by, wanted in ((0.04, 0), (0.08, 1)):
        watch = StragglerWatch()
        windows = [watch.window(*times(rng, processes, 0, by)) for _ in range(3)]
        assert sum(map(len, windows)) == wanted


def test_of_two_the_slower_one_is_late():
    watch, rng = StragglerWatch(), np.random.default_rng(0)
    windows = [watch.window(*times(rng, 2, 1, 0.2)) for _ in range(5)]
    assert [len(window) for window in windows] == [0, 1, 0, 0, 0], "half a step: in two windows"
    (straggler,) = windows[1]
    assert str(straggler).startswith("process 1 is late: 199.5 ms before each") and str(
        straggler
    ).endswith("of the step); most of it in waiting for data")
    for _ in range(2):  # recovered, and late again
        assert not watch.window(*times(rng, 2))
        assert sum(len(watch.window(*times(rng, 2, 1, 0.2))) for _ in range(3)) == 1


def test_the_time_of_a_step_names_nobody():
    """The rule on steps alone, which all processes end together: a planted mistake."""
    before, waited = times(np.random.default_rng(0), 4, 2, 0.3)
    step = before.sum(axis=1) + waited
    assert np.ptp(step) < 1e-9
    excess, _ = stragglers.outliers(before, waited, StragglerRule())
    assert np.flatnonzero(excess).tolist() == [2]


@pytest.mark.parametrize("processes", [2, 3, 8, 64, 512])
def test_noise_is_not_late(processes):
    """No process in 1000 windows (20,000 steps) with uneven work and hiccups."""
    watch, rng = StragglerWatch(), np.random.default_rng(processes)
    assert not any(watch.window(*times(rng, processes)) for _ in range(1000))


def test_the_hook_measures_its_window_and_not_its_own_gathering(monkeypatch):
    clock = [0.0]
    spent = Stopwatch(clock=lambda: clock[0])
    sent, said = [], []

    def gather(values):
        clock[0] += 7.0  # others come late
        sent.append(values)
        other = np.zeros_like(values)
        other[len(BEFORE)] = values.sum()
        return np.stack([other, values])

    monkeypatch.setattr(stragglers, "gather", gather)
    hook = StragglerHook(spent, every=10, report=lambda *found: said.append(found))
    for step in range(1, 41):
        for kind, seconds in ((DATA, 0.03), (DISPATCH, 0.001), (WAIT, 0.002)):
            with spent.on(kind):
                clock[0] += seconds
        if hook.is_due(step):
            hook.run(step, None)
    wanted = np.zeros(len(BEFORE) + 2)
    wanted[DATA_COLUMN], wanted[-2:] = 0.03, (0.001, 0.002)
    for values in sent:
        np.testing.assert_allclose(values, wanted, atol=1e-6)
    assert [(step, straggler.process) for step, straggler in said] == [(20, 1)]
