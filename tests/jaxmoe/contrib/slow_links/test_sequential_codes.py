# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of sequential gradient coding: loads, and jobs known in time for bursts of slowness."""

import numpy as np
import pytest

from jaxmoe.contrib.slow_links import Multiplexed, SelectiveReattempt

SIZES = [(4, 3, 1, 1), (4, 3, 2, 2), (6, 4, 3, 3), (6, 5, 2, 4), (8, 3, 2, 6)]
"""(workers, window, burst, slow)."""


def is_allowed(pattern, window, burst, slow):
    """Whether slow workers [rounds workers] fit the model in every window."""
    for start in range(max(1, len(pattern) - window + 1)):
        part = pattern[start : start + window]
        if part.any(axis=0).sum() > slow:
            return False
        for worker in part.T:
            rounds = np.flatnonzero(worker)
            if rounds.size and rounds[-1] - rounds[0] >= burst:
                return False
    return True


def drawn(workers, window, burst, slow, seed, rounds=14):
    """Slow workers of the model, to which none can be added."""
    rng = np.random.default_rng(seed)
    pattern = np.zeros((rounds, workers), bool)
    for place in rng.permutation(rounds * workers):
        pattern.flat[place] = True
        # Only the windows around the round that has changed can have become forbidden.
        first = max(0, place // workers - window + 1)
        if not is_allowed(pattern[first : first + 2 * window - 1], window, burst, slow):
            pattern.flat[place] = False
    return pattern


@pytest.mark.parametrize("kind", [SelectiveReattempt, Multiplexed])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_job_is_known_after_the_delay_for_all_bursts_of_the_model(kind, sizes):
    workers, window, burst, slow = sizes
    fields = {"workers": workers, "window": window, "burst": burst, "slow": slow}
    if kind is SelectiveReattempt and (window - 1) % burst:
        with pytest.raises(ValueError, match="must divide window - 1"):
            kind(**fields)
        return
    for seed in range(20):
        schedule = kind(**fields)
        pattern = drawn(workers, window, burst, slow, seed)
        assert is_allowed(pattern, window, burst, slow)
        assert pattern.any()
        for number, row in enumerate(pattern):
            tasks = schedule.tasks()
            assert all(len(given) <= window - 1 + burst for given in tasks.values())
            schedule.finish_round(tasks, np.flatnonzero(row).tolist())
            assert schedule.is_known(number - schedule.delay) or number < schedule.delay


def test_a_longer_burst_than_the_model_has_is_not_made_up_for():
    for kind in (SelectiveReattempt, Multiplexed):
        schedule = kind(workers=4, window=3, burst=1, slow=1)
        for _ in range(6):
            schedule.finish_round(schedule.tasks(), (0, 1))
        assert not schedule.is_known(0)


def test_loads_are_those_of_the_formulas():
    for workers, window, burst, slow in SIZES:
        multiplexed = Multiplexed(workers=workers, window=window, burst=burst, slow=slow)
        above = (slow + 1) * (window - 1 + burst)
        below = workers * (burst + (window - 1) * (slow + 1))
        assert multiplexed.load == pytest.approx(above / below)
        first, coded = multiplexed.task_sizes()
        assert workers * ((window - 1) * first + burst * coded) == pytest.approx(1.0)
    again = SelectiveReattempt(workers=6, window=5, burst=2, slow=4)
    assert (again.absent, again.delay, again.load) == (2, 2, 0.5)
    plain = Multiplexed(workers=6, window=5, burst=2, slow=4)
    assert plain.delay == 5
    assert plain.load < again.load < (4 + 1) / 6  # a code without rounds has (lambda + 1) / n
