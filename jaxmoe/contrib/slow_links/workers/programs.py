# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training step with a program for each turn of a schedule, chosen by the number of the step.

A turn is what a step does beside training, such as the fragments that it sends. It is known on the
host, so that no program has a conditional around a collective: compilers run a collective beside
products only where nothing asks first whether it runs at all.

All programs are compiled before the first step. One compilation of a step with a conditional
becomes as many as there are turns; the persistent cache holds each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxmoe.data.batch import Batch
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics

Program = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class WorkerSchedule:
    """Turns of the steps of a run, by the numbers of their states.

    The number of a state that the last step returned is counted on the host, so that the host does
    not wait for that step; the number of another state is read from it.

    Args:
        turn: Number of steps before a step -> its turn.
        turns: All turns of the run.
    """

    def __init__(self, turn: Callable[[int], Hashable], turns: Sequence[Hashable]):
        self._turn, self.turns = turn, tuple(turns)
        self._latest: tuple[Any, int] = (None, 0)

    def run(self, program: Callable[[Hashable], Program], state: TrainState, batch: Batch) -> Any:
        """Return what the program of the step's turn returns.

        Args:
            program: Turn -> program.
            state: State before the step.
            batch: Rows.
        """
        latest, number = self._latest
        if state.step is not latest:
            number = int(state.step)
        after, metrics = program(self._turn(number))(state, batch)
        self._latest = (after.step, number + 1)
        return after, metrics


class ScheduledStep:
    """Jitted step that is compiled for each turn, with the interface of `jax.jit`.

    Args:
        jitted: Jitted function of state, batch and, as a static argument, the turn.
        turn: See `WorkerSchedule`.
        turns: See `WorkerSchedule`.
    """

    def __init__(self, jitted: Any, turn: Callable[[int], Hashable], turns: Sequence[Hashable]):
        self._jitted = jitted
        self._turn = turn
        self._turns = turns
        self._schedule = WorkerSchedule(turn, turns)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Return the next state and metrics; a program is compiled when its turn first comes."""
        return self._schedule.run(
            lambda turn: lambda *arguments: self._jitted(*arguments, turn), state, batch
        )

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Return the traced program of the last turn, which exchanges something if any does."""
        return self._jitted.trace(state, batch, self._turns[-1])

    def lower(self, state: TrainState, batch: Batch) -> LoweredPrograms:
        """Return the lowered programs of all turns, for arrays or their shapes."""
        return LoweredPrograms(
            schedule=WorkerSchedule(self._turn, self._turns),
            lowered={turn: self._jitted.lower(state, batch, turn) for turn in self._turns},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredPrograms:
    """Lowered programs of all turns."""

    schedule: WorkerSchedule
    lowered: Mapping[Hashable, Any]
    """Turn -> `jax.stages.Lowered`."""

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> ScheduledPrograms:
        """Return the compiled programs.

        Args:
            compiler_options: Options of XLA.
        """
        compiled = {
            turn: program.compile(compiler_options) for turn, program in self.lowered.items()
        }
        return ScheduledPrograms(schedule=self.schedule, compiled=compiled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledPrograms:
    """Compiled programs of all turns, called like one."""

    schedule: WorkerSchedule
    compiled: Mapping[Hashable, Any]
    """Turn -> `jax.stages.Compiled`."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Return the next state and metrics."""
        return self.schedule.run(self.compiled.__getitem__, state, batch)

    def memory_analysis(self) -> Any:
        """Return what XLA says of the program with most temporaries; None where it says nothing."""
        analyses = [program.memory_analysis() for program in self.compiled.values()]
        if None in analyses:
            return None
        return max(analyses, key=lambda analysis: analysis.temp_size_in_bytes)
