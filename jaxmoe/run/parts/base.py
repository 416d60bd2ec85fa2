# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`RunPart`: what a capability does in a run that most runs do without.

`jaxmoe.run.trainer.Trainer` calls the parts of a run where its own steps say so, and knows none by
name. They are made before anything else of the run, see `jaxmoe/run/parts/members.py`.

To add a part: a class derived from `RunPart`, a config derived from `RunPartConfig` that builds it,
and a row in `jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxmoe.run.assemble import Assembly, Setting
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.restore import Begun, PlacedSource
from jaxmoe.run.supervision import Watches
from jaxmoe.training.hooks import Hook
from jaxmoe.training.loop import Stop, StopReason
from jaxmoe.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """A run on its new mesh."""

    assembly: Assembly
    compiled: CompiledStep
    state: TrainState


class RunPart:
    """A capability of a run; each method does nothing by default.

    All processes call the methods alike, in this order:

    fit             before the run is assembled: its config and devices
    prepared        once the run directory is held: plan, devices and data
    sources         before a state is restored: where one may be found
    restored        when a state was restored; again after a rollback
    record          after that, when the run has recorded its config; again after a rollback
    heading         for the header
    join            before the first step, with what compiles the step
    around, hooks   make the step and the hooks of each loop of steps
    begin           just before the first step of each loop
    event           after each step: a reason to end the loop
    ended           after each loop
    move, go_back   before the loop that follows: on another mesh, or from an earlier step
    rows            for the summary
    close           at the end, also after an error
    """

    goes_back: ClassVar[bool] = True
    """Whether the run may go on from an earlier step after refused steps."""

    def fit(self, setting: Setting) -> Setting:
        """Return what the run is assembled from.

        Args:
            setting: Config and devices of this start.

        Raises:
            ValueError: The config does not fit the processes, or what this part does.
        """
        return setting

    def prepared(self, assembly: Assembly) -> Assembly:
        """Return plan, devices and data with which the run begins; the directory is held.

        Args:
            assembly: Those of the config.
        """
        return assembly

    def sources(self) -> Sequence[PlacedSource]:
        """Return sources of a state, with their places among those of `restore.SOURCES`."""
        return ()

    def record(self, begun: Begun) -> None:
        """Write what belongs to the state to the run directory; the first process writes."""

    def heading(self, assembly: Assembly) -> Sequence[str]:
        """Return lines for the header of the run.

        Args:
            assembly: Plan, devices and data with which the run begins.
        """
        del assembly
        return ()

    def restored(self, begun: Begun) -> None:
        """Note the state that the run begins with, or goes on with after a rollback."""

    def join(self, begun: Begun, compile_step: Callable[[], None]) -> Begun:
        """Return the state to begin with, where the run takes its place among others.

        Args:
            begun: State that was restored.
            compile_step: Compiles the training step, unless that was done.

        Raises:
            EndRunError: The run cannot begin.
        """
        del compile_step
        return begun

    def around(self, step_function: CompiledStep, assembly: Assembly, step: int) -> CompiledStep:
        """Return the training step of a loop with what this part does before and after it.

        Args:
            step_function: Compiled step, which donates its state.
            assembly: Plan, devices and data of the loop.
            step: Number of steps already done.
        """
        del assembly, step
        return step_function

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return hooks of a loop, which run after those that save; the same on every process.

        Args:
            assembly: Plan, devices and data of the loop.
            watches: Receiver of numbers and warnings, and the clock of the run.
        """
        del assembly, watches
        return ()

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Note the loop that begins.

        Args:
            assembly: Plan, devices and data of the loop.
            step: Number of steps already done.
            state: State of the loop, which donates it: only shapes may be kept.
            watches: Receiver of numbers and warnings.
        """

    def event(self) -> StopReason | None:
        """Return a reason to end the loop, the same on all processes; each asks at one step."""
        return None

    def ended(self, step: int, status: str) -> None:
        """Finish what belongs to the loop; its state is still there.

        Args:
            step: Number of steps done.
            status: How the loop ended.
        """

    def move(self, leaves: list[Any], step: int) -> Moved | None:
        """Return the run on another mesh, after `event` has said "resized"; None if it has not.

        Args:
            leaves: Arrays of the state, which are moved one by one and dropped from the list.
            step: Number of steps done.
        """
        del leaves, step
        return None

    def go_back(self) -> None:
        """Forget what belongs to steps that the run is about to leave."""

    def rows(self) -> Mapping[str, Any]:
        """Return facts for the summary, by name."""
        return {}

    def close(self) -> None:
        """Close what is open; further calls do nothing."""


class StopOrEvent:
    """Signals, which come first, and events of the parts of a run.

    Args:
        stop: Signals.
        parts: Parts of the run.
    """

    def __init__(self, stop: Stop, parts: Sequence[RunPart]):
        self._stop = stop
        self._parts = parts

    def steps_begin(self) -> None:
        """From now on a signal takes effect after a step."""
        self._stop.steps_begin()

    def agreed(self) -> StopReason | None:
        """Return the first reason to end the loop; every process must call it at the same step."""
        if reason := self._stop.agreed():
            return reason
        for part in self._parts:
            if event := part.event():
                return event
        return None
