# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decides by which parameters the answers of each step are drawn, and keeps those drawn ahead.

    staleness 0    step t by the parameters before it
    staleness s    step t by those before step t - s, while steps t - s to t - 1 are trained;
                   the first s + 1 steps after a start or a checkpoint by those that they begin with

The queue is empty at every multiple of `every`, so that a run that resumes there draws the same
answers as one that was never interrupted. The store sees to it that no answer is older than
`staleness`.

Source of the overlap: AsyncFlow (arXiv 2507.01663).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxmoe.rl.stream import SampleStore

Draw = Callable[[int], Future[Any]]
"""Starts to draw the answers of a step."""
_STEP, _ANSWERS = "step", "answers"


class AnswerQueue:
    """Answers that are being drawn, a row of the store for each step.

    Args:
        staleness: Steps that answers may lag behind.
        every: Steps between checkpoints, at which the queue is empty; 0 for none.
        last_step: Total number of steps.
    """

    def __init__(self, *, staleness: int, every: int, last_step: int):
        self._staleness, self._every, self._last_step = staleness, every, last_step
        self._store = SampleStore((_STEP, _ANSWERS), staleness=staleness)
        self._drawn: int | None = None

    def take(self, step: int, draw: Draw) -> tuple[Any, int]:
        """Return the answers of a step, and the steps that they lag behind; draw those ahead.

        Args:
            step: Steps done before; each is asked for once, ascending.
            draw: Starts to draw the answers of a step by the parameters of now.
        """
        self._store.advance(step)
        end = step + self._staleness + 1
        if self._every:
            end = min(end, (step // self._every + 1) * self._every)
        end = max(min(end, self._last_step), step + 1)
        for ahead in range(step if self._drawn is None else self._drawn + 1, end):
            self._store.submit(step, **{_STEP: ahead})
            row = self._store.claim([_STEP], [_ANSWERS], 1)[0]
            draw(ahead).add_done_callback(lambda answers, row=row.id: self._fill(row, answers))
            self._drawn = ahead
        row = self._store.take([_STEP, _ANSWERS], 1)[0]
        return row.values[_ANSWERS], step - row.version

    def _fill(self, row: int, answers: Future[Any]) -> None:
        """Hand over the answers of a row; an error ends the training at its next step."""
        if answers.cancelled():
            self._store.close()
        elif (error := answers.exception()) is not None:
            self._store.close(error)
        else:
            self._store.fill(row, **{_ANSWERS: answers.result()})
