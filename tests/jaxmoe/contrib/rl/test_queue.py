# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers drawn ahead: each step once, never too old, and none across a checkpoint."""

import pytest

from jaxmoe.contrib.rl.queue import AnswerQueue


def drawn_by(queue, first, last):
    """The parameters by which the answers of each step are drawn."""
    found = {}
    for now in range(first, last):
        for step in queue.due(now):
            assert step not in found, "each step is drawn once"
            found[step] = now
        assert now in found
    assert list(found) == list(range(first, last)), "in order"
    return found


@pytest.mark.rows(1)
@pytest.mark.parametrize("staleness", [0, 1, 3, 20])
def test_answers_are_never_too_old_and_none_cross_a_checkpoint(staleness):
    given = {"staleness": staleness, "every": 5, "last_step": 13}
    whole = drawn_by(AnswerQueue(**given), 0, 13)
    assert all(step - version <= staleness for step, version in whole.items())
    assert all(step // 5 == version // 5 for step, version in whole.items())
    assert not staleness or any(whole[step] < step for step in whole)
    for first in (5, 10):
        resumed = drawn_by(AnswerQueue(**given), first, 13)
        assert resumed == {step: whole[step] for step in range(first, 13)}


def test_without_checkpoints_answers_lag_by_the_staleness():
    found = drawn_by(AnswerQueue(staleness=2, every=0, last_step=8), 0, 8)
    assert found == {step: max(step - 2, 0) for step in range(8)}
