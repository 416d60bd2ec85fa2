# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: trains a run from its newest state to its last files.

restore    compare processes, assemble, lease the directory, read the newest state
compile    the train step, for each batch size that is still to come; a part joins other runs
steps      batch, step, metrics, hooks (`jaxmoe.training.loop.Loop`), and a yield to the caller
end        of a loop: go on with another mesh (`resized`) or from an earlier step (`refused`)
finish     last checkpoint, samples, pictures, report, summary
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Generator
from typing import Any, cast

import jax

from jaxmoe.checkpoint import LeaseLostError
from jaxmoe.data import Source
from jaxmoe.errors import EndRunError, configuration_errors
from jaxmoe.fingerprints import ReplicasDifferError
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep, compile_steps
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.hooks import has_arrays, make_hooks, make_saving, make_trace, save_last
from jaxmoe.run.parts import StopOrEvent
from jaxmoe.run.prepare import prepare
from jaxmoe.run.reporter import Reporter, TrainedStep, TrainResult
from jaxmoe.run.reporting.advice import end_of_run, nothing_to_do
from jaxmoe.run.reporting.finish import finish_run
from jaxmoe.run.reporting.header import print_header
from jaxmoe.run.restore import first_state
from jaxmoe.run.rollback import rollback_message, without_refused
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.state_tree import shapes_of
from jaxmoe.training.hooks import Trace
from jaxmoe.training.loop import Loop, Status
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from jaxmoe.training.stopwatch import CHECKPOINT, COMPILE, HOOKS, LOOP, RESIZE, RESTORE
from sharding.coordination import barrier

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a run, new or interrupted, to its last step.

    Args:
        name: Name of the run, for messages and trackers.
        config: Configuration of this start.
        directory: Run directory; leased until `supervision.resources` closes.
        supervision: Watchdog, signals and resources of this process.
        extends: Whether a run in the directory may go on with changed `EXTENSION_FIELDS`; or the
            fields that the command line names, which may differ from those of the checkpoint too.
        source: Data that were read already; None reads them.
    """

    def __init__(
        self,
        name: str,
        config: PretrainConfig,
        directory: RunDirectory,
        supervision: Supervision,
        *,
        extends: bool | frozenset[str] = False,
        source: Source | None = None,
    ):
        self._name = name
        self._config = config
        self._directory = directory
        self._supervision = supervision
        self._watchdog = supervision.watchdog
        self._stopwatch = supervision.stopwatch
        self._extends = extends
        self._source = source
        self._compiled: CompiledStep | None = None
        self._compile_seconds = 0.0
        self._reporter: Reporter | None = None
        self._trace: Trace | None = None
        self._step = 0
        self._status: Status = "done"
        self.result: TrainResult | None = None
        """How the run ended; None before."""

    def steps(self) -> Generator[TrainedStep, None, None]:
        """Train to the last step, and yield each step once it is dispatched and its hooks have run.

        Closing the generator ends the run after the step just yielded: the state is saved, and the
        run can be resumed. `result` says how the run ended.

        Raises:
            ConfigurationError: The configuration, the directory or the data cannot be used.
        """
        with contextlib.ExitStack() as resources:
            try:
                if not (self._restore() and self._join()):
                    return
                self._open(resources)
                self._begin_loop(self._start.assembly, self._start.step, self._start.state)
                while True:
                    metrics = self._advance()
                    if metrics is not None:
                        try:
                            with self._stopwatch.on(HOOKS):
                                yield TrainedStep(step=self._loop.step, metrics=metrics)
                        except GeneratorExit:
                            self._leave()
                    if self._loop.status is None:
                        continue
                    self._end_loop()
                    if self._loop.status == "resized":
                        self._move()
                        continue
                    if self._loop.status == "diverged" and self._go_back():
                        continue
                    break
                self._step, self._status = self._loop.step, cast(Status, self._loop.status)
                self._watchdog.beat("the last save", self._step)
                if self._status == "taken_over":
                    self._give_up()
                    return
                resources.close()
                self._save()
            except LeaseLostError:
                self._give_up()
                return
        self._finish()

    def _restore(self) -> bool:
        """Lease the directory and read the newest state; False if nothing is left to do."""
        with configuration_errors():
            prepared = prepare(
                self._config,
                self._directory,
                self._supervision,
                extends=self._extends,
                source=self._source,
            )
        start = self._start = prepared.start
        self._checkpoints = prepared.checkpoints
        self._parts = prepared.parts
        self._step = start.step
        if start.step >= self._config.training.steps:
            self.result = nothing_to_do(self._directory, start.step, self._config)
            return False
        print_header(self._name, self._directory, start, self._parts)
        self._started = time.perf_counter()
        return True

    def _join(self) -> bool:
        """Let the parts take their place among other runs; False if one of them cannot."""
        try:
            for part in self._parts:
                self._start = part.join(self._start, self._compile)
        except LeaseLostError:
            raise
        except EndRunError as error:
            self.result = TrainResult(
                status=cast(Status, error.status),
                step=self._start.step,
                checkpoint_step=self._checkpoints.latest_step(),
                message=str(error),
            )
            return False
        return True

    def _open(self, resources: contextlib.ExitStack) -> None:
        """Open the files of the metrics, compile the step, and wait for the other processes."""
        start = self._start
        with configuration_errors(), self._directory.usable():
            reporter = Reporter(self._name, self._directory, start.assembly, start.step)
            self._watches = Watches(
                self._directory,
                start.assembly,
                reporter,
                self._stopwatch,
                start.step,
                self._watchdog,
            )
        self._reporter = resources.enter_context(contextlib.closing(reporter))
        self._loop_resources = resources.enter_context(contextlib.ExitStack())
        self._compile()
        self._watchdog.beat("waiting for the first step")
        barrier("before the first step", self._config.timeouts.first)

    def _compile(self) -> None:
        """Compile the step, unless that was done."""
        if self._compiled is not None:
            return
        self._watchdog.beat("compiling")
        say("compiling the training step ...")
        started = time.perf_counter()
        start = self._start
        with self._stopwatch.on(COMPILE):
            self._compiled = compile_steps(start.assembly, start.step, start.state)
        self._compiled_from = start.step
        self._compile_seconds = time.perf_counter() - started
        say(f"compiled in {self._compile_seconds:.1f} s")

    def _begin_loop(self, assembly: Assembly, step: int, state: TrainState) -> None:
        """Make the loop of the steps after `step`, which donates their state, on its mesh."""
        self._assembly = assembly
        assert self._compiled is not None and self._reporter is not None  # by `_open`
        config = assembly.plan.config
        watches = self._watches
        reporter = self._reporter
        self._saving = make_saving(assembly, self._checkpoints, reporter)
        if self._trace is None or not self._trace.is_written:
            self._trace = make_trace(self._directory, config, step)
        trace = self._trace
        resources = self._loop_resources
        step_function = self._compiled
        for part in self._parts:
            step_function = part.around(step_function, assembly, step)
        with jax.set_mesh(assembly.mesh):
            hooks = make_hooks(assembly, step, self._saving, trace, watches, self._parts)
            if trace is not None:
                resources.callback(trace.close)
                if trace.start.is_due(step):
                    trace.start.run(step, state)
            initial = functools.partial(first_state, assembly)
            step_function = resources.enter_context(
                assembly.feed.session(step_function, reporter.log_numbers, initial)
            )
            reporter.start()
            resources.enter_context(self._stopwatch.on(LOOP))
            for part in self._parts:
                part.begin(assembly, step, state, watches)
            self._loop = Loop(
                state,
                step_function,
                assembly.feed,
                first_step=step,
                last_step=config.training.steps,
                hooks=hooks,
                report=watches.report_steps,
                report_every=config.tracking.print_every,
                max_skipped=config.training.step_guard.max_skipped,
                publish=assembly.workers.publish,
                stop=StopOrEvent(self._supervision.stop, self._parts),
                stopwatch=self._stopwatch,
                beat=self._watchdog.beat,
            )
            resources.callback(self._loop.close)

    def _advance(self) -> StepMetrics | None:
        """Take a step on the mesh of the run, and leave the caller's mesh alone."""
        with jax.set_mesh(self._assembly.mesh):
            return self._loop.advance()

    def _leave(self) -> None:
        """End the loop after the step just taken."""
        with jax.set_mesh(self._assembly.mesh):
            self._loop.leave()

    def _end_loop(self) -> None:
        """Close what belongs to the loop, whose state stays."""
        with jax.set_mesh(self._assembly.mesh):
            self._loop_resources.close()
        for part in self._parts:
            part.end(self._loop.step, cast(Status, self._loop.status))

    def _move(self) -> None:
        """Go on with another mesh, to which the state is moved."""
        leaves = jax.tree.leaves(self._loop.state)
        step = self._loop.step
        del self._loop  # so that the devices hold one state only
        self._watchdog.beat("resizing", step)
        with self._stopwatch.on(RESIZE):
            moves = (part.move(leaves, step) for part in self._parts)
            moved = next(moved for moved in moves if moved is not None)
        self._watches.on_mesh(moved.assembly)
        self._compiled = moved.compiled
        self._compiled_from = step
        self._begin_loop(moved.assembly, step, moved.state)

    def _go_back(self) -> bool:
        """Go on from an earlier step without the data of those refused; False if that cannot be."""
        assembly = self._assembly
        refused = self._loop.refused
        if refused is None or not assembly.reads_data:
            return False
        self._checkpoints.check_held()  # the next line writes
        continuation = without_refused(self._directory, assembly, refused)
        if continuation is None:
            return False
        shapes = shapes_of(self._loop.state)
        del self._loop  # so that the device holds one state only
        self._checkpoints.finish()
        self._watchdog.beat("restoring")
        with configuration_errors(), self._stopwatch.on(RESTORE):
            sources = [source for part in self._parts for source in part.sources()]
            start = continuation.restore_or_start(
                assembly, self._checkpoints, sources=sources, target=shapes
            )
        for part in self._parts:
            part.restore(start)
            part.record(start)
        if start.step < self._compiled_from:
            self._watchdog.beat("compiling")
            with self._stopwatch.on(COMPILE):
                self._compiled = compile_steps(start.assembly, start.step, start.state)
            self._compiled_from = start.step
            barrier("before the steps that follow", self._config.timeouts.first)
        assert self._reporter is not None  # by `_open`
        self._reporter.go_back(start.step)
        say(rollback_message(self._directory, start.assembly, refused, start.step))
        self._begin_loop(start.assembly, start.step, start.state)
        return True

    def _save(self) -> None:
        """Save the state that the steps ended with, if it may be saved."""
        if self._status in ("preempted", "interrupted") and has_arrays(self._loop.state):
            say(f"{self._status}: saving step {self._step} (a second signal ends at once)")
        try:
            with self._stopwatch.on(CHECKPOINT), jax.set_mesh(self._assembly.mesh):
                self._is_saved = save_last(
                    self._status, self._step, self._loop.state, self._saving, self._checkpoints
                )
        except ReplicasDifferError as error:
            logger.error("step %d: %s", self._step, error)
            self._status = "corrupted"
            self._is_saved = False
        self._checkpoint_step = self._checkpoints.latest_step()

    def _finish(self) -> None:
        """Write the last files, outside of the mesh: samples are generated on one device."""
        trace = self._trace
        facts: dict[str, Any] = {
            "status": self._status,
            "steps": self._step,
            "compile_seconds": self._compile_seconds,
            "wall_seconds": time.perf_counter() - self._started,
            "checkpoint_step": self._checkpoint_step,
            "restored_from": self._start.origin,
            "profile": str(trace.directory) if trace is not None and trace.is_written else None,
            "parts": {name: row for part in self._parts for name, row in part.rows().items()},
        }
        summary = finish_run(
            self._name, self._directory, self._assembly, self._watches, self._loop.state, facts
        )
        status, message = end_of_run(
            self._status,
            self._directory,
            self._config,
            refused=self._loop.refused,
            checkpoint_step=self._checkpoint_step,
            is_saved=self._is_saved,
        )
        self.result = TrainResult(
            status=status,
            step=self._step,
            checkpoint_step=self._checkpoint_step,
            message=message,
            summary=summary,
        )

    def _give_up(self) -> None:
        """End without touching the files, which another process writes by now."""
        if self._reporter is not None:
            self._reporter.abandon()
        reason = self._directory.why_lost()
        self.result = TrainResult(
            status="taken_over", step=self._step, checkpoint_step=None, message=reason
        )
