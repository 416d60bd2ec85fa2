# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decides by which parameters the answers of each step are drawn.

    staleness 0    step t by the parameters before it
    staleness s    step t by those before step t - s, while steps t - s to t - 1 are trained;
                   the first s + 1 steps after a start or a checkpoint by those that they begin with

Nothing is drawn ahead across a multiple of `every`, so that a run that resumes there draws the same
answers as one that was never interrupted. Answers are never older than `staleness`.

Source of the overlap: AsyncFlow (arXiv 2507.01663).
"""

from __future__ import annotations


class AnswerQueue:
    """Steps whose answers are drawn already.

    Args:
        staleness: Steps that answers may lag behind.
        every: Steps between checkpoints, at which the queue is empty; 0 for none.
        last_step: Total number of steps.
    """

    def __init__(self, *, staleness: int, every: int, last_step: int):
        self._staleness = staleness
        self._every = every
        self._last_step = last_step
        self._drawn = -1

    def due(self, step: int) -> range:
        """Return the steps whose answers are to be drawn now, each once and in order.

        Args:
            step: Steps done before; asked for ascending.
        """
        end = step + self._staleness + 1
        if self._every:
            end = min(end, (step // self._every + 1) * self._every)
        steps = range(max(step, self._drawn + 1), max(min(end, self._last_step), step + 1))
        self._drawn = max(self._drawn, steps.stop - 1)
        return steps
