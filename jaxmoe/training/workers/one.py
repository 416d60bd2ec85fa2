# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`OneWorker`: who trains a run that has no workers, the neutral member of `of_run.py`."""

from __future__ import annotations

from typing import Any

from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import CheckedStep, Step


class OneWorker:
    """One worker, whose state all devices share.

    Args:
        number: Parts of a batch whose losses are compared, those of groups of devices.
    """

    training: Any = None
    """How workers exchange something; None where nothing is exchanged."""

    def __init__(self, number: int):
        self.number = number

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """Parts of a step that report what is compared."""
        return () if self.number == 1 else (WorkerLosses(workers=self.number),)

    def check(self) -> None:
        """Refuse what cannot be trained so, before anything is compiled."""

    def jitted(self, step: Step) -> CheckedStep:
        """Return the jitted step of the run; it donates its state.

        Args:
            step: Step of the whole batch, or of one worker.
        """
        return step.jitted()

    def begin(self, state: TrainState) -> TrainState:
        """Return a state without workers as that of equal workers, if there are any.

        Args:
            state: State before the first step.
        """
        return state

    def publish(self, state: TrainState) -> TrainState:
        """Bring the parameters up to date that the world sees.

        Args:
            state: State between two steps; donated.
        """
        return state
