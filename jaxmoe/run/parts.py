# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run: what a capability does in a run that most runs do without.

`jaxmoe.run.trainer.Trainer` calls the parts of a run where its own steps say so, and knows none by
name. They are made before anything else of the run: those that a field of its config, its
environment or its files ask for (`jaxmoe/catalog/run_parts.py`), and then those that the tuple
`parts` of the config names, in the order of the catalogue. A part is imported when a run asks for
it.

To add a part: a class derived from `RunPart`, a config derived from `RunPartConfig` that builds it,
a row under `run_part` in `jaxmoe/catalog/runs.py`, and the class in MEMBERS of
`tests/jaxmoe/run/test_part.py`. `TimeLimit` is short; `jaxmoe/run/README.md` says how to act.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax

from jaxmoe import catalog
from jaxmoe.catalog import choice
from jaxmoe.catalog.run_parts import FILES, HISTORY, PARTS, REQUESTS
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.assemble import Assembly, Setting
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.config import PretrainConfig, RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.lineage import shared_lineage
from jaxmoe.run.restore import PlacedSource, StartingPoint
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.state_tree import shapes_of
from jaxmoe.training.hooks import Hook
from jaxmoe.training.loop import Stop, StopReason
from jaxmoe.training.state import TrainState
from sharding.distributed import agree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """A run on its new mesh."""

    assembly: Assembly
    compiled: CompiledStep
    state: TrainState


class RunPart:
    """A capability of a run; each method does nothing by default.

    All processes call the methods alike but where it says so, in this order:

    fit             before the run is assembled: its config and devices
    prepare         once the run directory is held: plan, devices and data
    sources         before a state is restored: where one may be found
    restore         when a state was restored; again after a rollback
    record          after that, when the run has recorded its config; again after a rollback
    heading         for the header
    join            before the first step, with what compiles the step
    around, hooks   make the step and the hooks of each loop of steps
    begin           just before the first step of each loop
    event           after each step: a reason to end the loop
    end             after each loop
    move            before a loop on another mesh
    rows            for the summary
    close           at the end, also after an error
    """

    def fit(self, setting: Setting) -> Setting:
        """Return what the run is assembled from.

        Args:
            setting: Config and devices of this start.

        Raises:
            ValueError: The config does not fit the processes, or what this part does.
        """
        return setting

    def prepare(self, assembly: Assembly) -> Assembly:
        """Return plan, devices and data with which the run begins; the directory is held.

        Args:
            assembly: Those of the config.
        """
        return assembly

    def sources(self) -> Sequence[PlacedSource]:
        """Return sources of a state, with their places among those of `restore.SOURCES`."""
        return ()

    def record(self, start: StartingPoint) -> None:
        """Write what belongs to the state to the run directory; the first process writes."""

    def heading(self, assembly: Assembly) -> Sequence[str]:
        """Return lines for the header of the run.

        Args:
            assembly: Plan, devices and data with which the run begins.
        """
        del assembly
        return ()

    def restore(self, start: StartingPoint) -> None:
        """Note the state that the run begins with, or goes on with after a rollback."""

    def join(self, start: StartingPoint, compile_step: Callable[[], None]) -> StartingPoint:
        """Return the state to begin with, where the run takes its place among others.

        Args:
            start: State that was restored.
            compile_step: Compiles the training step, unless that was done.

        Raises:
            EndRunError: The run cannot begin.
        """
        del compile_step
        return start

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

    def end(self, step: int, status: str) -> None:
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

    def rows(self) -> Mapping[str, Any]:
        """Return facts for the summary, by name."""
        return {}

    def close(self) -> None:
        """Close what is open; further calls do nothing."""


class ConfiguredPart(RunPart):
    """A part that a field of the config, the environment or a file of a run asks for.

    Args:
        config: Configuration of this start.
        directory: Run directory, which is not held yet.
        supervision: Watchdog, signals and resources of this process.
    """

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        self.config = config
        self.directory = directory
        self.supervision = supervision


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

    def agree(self) -> StopReason | None:
        """Return the first reason to end the loop; every process must call it at the same step."""
        if reason := self._stop.agree():
            return reason
        for part in self._parts:
            if event := part.event():
                return event
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimitConfig(RunPartConfig):
    """Ends the run in order after a time, as SIGTERM does: the state is saved."""

    name: ClassVar[str] = "time_limit"

    minutes: float = 60.0
    """Minutes from the restored state to the last step; saving and the report come on top."""

    def __post_init__(self):
        if not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes} must be above 0")

    def build(self, directory: RunDirectory, supervision: Supervision) -> TimeLimit:
        """Return the part, whose time begins with the restored state."""
        del directory
        return TimeLimit(60.0 * self.minutes, supervision.stop)


class TimeLimit(RunPart):
    """Asks a run to stop once a time has passed.

    Args:
        seconds: Seconds from the restored state on.
        stop: Request of this process to stop, on which all processes agree.
    """

    def __init__(self, seconds: float, stop: StopRequest):
        self._seconds = seconds
        self._stop = stop
        self._end: float | None = None

    def restore(self, start: StartingPoint) -> None:
        """Begin the time, unless this was a rollback."""
        del start
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def event(self) -> Literal["resized"] | None:
        """Ask to stop when the time is over; the run ends after the next step."""
        if self._end is not None and time.monotonic() > self._end:
            self._stop.time_is_over()
        return None


_POLL_SECONDS = 0.5
"""Seconds between two looks for a request."""


def make_parts(
    config: PretrainConfig, directory: RunDirectory, supervision: Supervision
) -> list[RunPart]:
    """Return the parts of a run, in the order in which they act; every process must call this.

    Args:
        config: Configuration of this start.
        directory: Run directory, which is not held yet.
        supervision: Watchdog, signals and resources of this process.

    Raises:
        ValueError: The run cannot have a part, or its lineage.json is damaged.
    """
    names = {event.event for event in shared_lineage(directory)}
    past = {FILES[name][0] for name in FILES if agree((directory.path / name).exists())}
    addresses = [address for asks, address in PARTS if asks(config) or address in past]
    parts: list[RunPart] = [
        pkgutil.resolve_name(address)(config, directory, supervision) for address in addresses
    ]
    parts += [PartRequest(name, config, directory, supervision, parts) for name in REQUESTS]
    chosen = {member.name: member for member in config.parts}
    for event, name in HISTORY.items():
        if agree(event in names) and name not in chosen:
            chosen[name] = choice("run_part", name)()
    order = [*catalog.names("run_part")]
    for name in sorted(chosen, key=lambda name: order.index(name) if name in order else len(order)):
        parts.append(chosen[name].build(directory, supervision))
    return parts


class PartRequest(RunPart):
    """Adds a part to a run once a file in the run directory asks for it.

    Args:
        name: Name of the file.
        config: Configuration of the run.
        directory: Run directory.
        supervision: Watchdog, signals and resources of this process, which closes the part.
        parts: Parts of the run, to which the part is added.
    """

    def __init__(
        self,
        name: str,
        config: PretrainConfig,
        directory: RunDirectory,
        supervision: Supervision,
        parts: list[RunPart],
    ):
        self._file = directory.path / name
        self._address = REQUESTS[name]
        self._arguments = config, directory, supervision
        self._resources = supervision.resources
        self._parts = parts
        self._part: RunPart | None = None
        self._loop: tuple[Assembly, int, TrainState, Watches] | None = None
        self._looked = -_POLL_SECONDS

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Keep what a part is told of the loop, of its state the shapes."""
        self._loop = assembly, step, shapes_of(state), watches

    def event(self) -> StopReason | None:
        """Add the part when the first process sees the file; it is asked for events at once."""
        if self._part is not None:
            return None
        is_there = False
        now = time.monotonic()
        if jax.process_index() == 0 and now - self._looked >= _POLL_SECONDS:
            self._looked = now
            is_there = os.path.lexists(self._file)
        if agree(is_there):
            assert self._loop is not None  # the loop has begun
            part = self._part = self._make()
            self._resources.callback(part.close)
            part.begin(*self._loop)
            self._parts.append(part)
        return None

    def end(self, step: int, status: str) -> None:
        """Let a part answer a request that came too late for this loop."""
        if self._part is None and jax.process_index() == 0 and os.path.lexists(self._file):
            part = self._make()
            part.end(step, status)
            part.close()

    def _make(self) -> RunPart:
        return pkgutil.resolve_name(self._address)(*self._arguments)
