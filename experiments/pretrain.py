# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model; the same command continues.

    python -m experiments.pretrain [recipe] [--dotted.field value ...]

On a terminal the progress is a live view, elsewhere a line (`--tracking.console`). A trace of some
steps is `--profile.steps 10:13`; further trackers are `--tracking.trackers tensorboard wandb`.
A finished run started again says so. After several refused steps in a row it goes back and jumps
their data (`jaxmoe/run/rollback.py`). Exit codes: 0 done, 2 bad configuration, 3 diverged, 69
another process of the run was lost, 74 the last state could not be saved, 75 saved after SIGTERM,
76 a device holds or computes other bits than it should, 77 another process has taken the run over,
124 nothing moved for the time allowed by `--processes.watchdog`, 130 saved after Ctrl-C. Before the
first step there is nothing to save, and a signal ends the run at once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Sequence

import jax

from experiments.cli import flags as cli
from experiments.cli.exit_codes import exit_code
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.checkpoint import CheckpointManager, LeaseLostError
from jaxmoe.resilience.agreement import check_agreement
from jaxmoe.resilience.endings import Ending
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.resilience.stop import Reason, StopRequest
from jaxmoe.resilience.watchdog import JAX_LATER, Watchdog
from jaxmoe.run.assemble import assemble, describe_devices
from jaxmoe.run.config import FIXED_FIELDS, FREE_FIELDS
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.finish import finish_run
from jaxmoe.run.header import nothing_to_do, print_header
from jaxmoe.run.load import check_trains
from jaxmoe.run.loop import compile_steps, save_last
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.reporter import Reporter, check_packages
from jaxmoe.run.restore import Begun, Lineage, open_snapshots, read_skipped
from jaxmoe.run.rollback import train_and_go_back
from jaxmoe.training.stopwatch import (
    CHECKPOINT,
    COMPILE,
    FINISH,
    RESTORE,
    START,
    Stopwatch,
    process_age,
)
from sharding.coordination import barrier


def main(argv: Sequence[str], *, age: float = 0.0) -> int:
    """Runs the command; returns the exit code.

    Args:
        argv: of the command.
        age: seconds for which the process has been there for this run alone.
    """
    spent = Stopwatch(START, already=age)
    prog, about = "python -m experiments.pretrain", __doc__ or ""
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, about)
    with cli.exit_on_bad_configuration():
        check_packages(config.tracking)
        # JAX's own end of the others, a stack of C++, is for when the pulse of ours fails.
        start_process(
            start=config.processes.start, heartbeat=config.processes.heartbeat + JAX_LATER
        )
    name = config.run.name or recipe
    directory = RunDirectory(config.run.directory or f"runs/pretrain/{name}")
    with (
        Watchdog(config.processes, exit_code) as watchdog,
        StopRequest(functools.partial(_end_before_steps, directory, watchdog)) as stop,
        contextlib.ExitStack() as held,
        watchdog.exit_on_error(),
    ):
        with cli.exit_on_bad_configuration():
            check_agreement(config, config.processes.barrier)
            check_trains(directory, config)
            assembly = assemble(config)
            if jax.process_index() == 0:  # for all of them
                directory.acquire(
                    steal=config.run.steal_lock,
                    heartbeat=config.run.lock_heartbeat,
                    on_lost=stop.taken_over,
                )
                held.callback(directory.release)
                way_out = f", and begin there with --checkpoint.initial {directory.path}"
                directory.check_config(config, FREE_FIELDS, FIXED_FIELDS, way_out)
            checkpoints = CheckpointManager(
                directory.checkpoints_directory,
                keep=config.checkpoint.keep,
                verify=config.checkpoint.verify,
                fence=directory.fence if jax.process_index() == 0 else None,
            )
            held.callback(checkpoints.close)
            watchdog.beat("restoring")
            barrier("before restoring", config.processes.barrier)
            if (snapshots := open_snapshots(assembly, directory)) is not None:
                held.callback(snapshots.finish)
            lineage = Lineage(assembly.loader, read_skipped(directory))
            try:
                with spent.on(RESTORE):
                    begun = lineage.restore_or_start(assembly, checkpoints, snapshots=snapshots)
            except LeaseLostError:
                return _taken_over(directory)
            if jax.process_index() == 0:
                directory.write_environment(describe_devices(assembly.mesh))
        if begun.step >= config.training.steps:
            say(nothing_to_do(directory, begun.step, config))
            return int(cli.ExitCode.DONE)
        print_header(name, directory, begun.assembly, begun.step)
        if begun.origin is not None:
            say(f"restored {begun.origin}")
        return _train(name, directory, begun, checkpoints, snapshots, stop, spent, watchdog)


def _train(
    name: str,
    directory: RunDirectory,
    begun: Begun,
    checkpoints: CheckpointManager,
    snapshots: SnapshotStore | None,
    stop: StopRequest,
    spent: Stopwatch,
    watchdog: Watchdog,
) -> int:
    """Compiles, trains, and leaves the run's files behind."""
    started = time.perf_counter()
    assembly = begun.assembly
    with jax.set_mesh(assembly.mesh):
        with cli.exit_on_bad_configuration():
            reporter = Reporter(name, directory, assembly, begun.step)
            watches = Watches(directory, assembly, reporter, spent, begun.step, watchdog)
        with contextlib.closing(reporter):
            watchdog.beat("compiling")
            compiling = time.perf_counter()
            with spent.on(COMPILE):
                compiled = compile_steps(assembly, begun.step, begun.state)
            compile_seconds = time.perf_counter() - compiling
            say(f"compiled in {compile_seconds:.1f} s")
            watchdog.beat("waiting for the first step")
            barrier("before the first step", assembly.plan.config.processes.first)
            try:
                trained = train_and_go_back(
                    directory, begun, checkpoints, snapshots, compiled, stop, watches
                )
            except LeaseLostError:  # while it went back
                return _taken_over(directory, reporter)
            assembly, result, trace = trained.assembly, trained.result, trained.trace
            if result.status == "taken_over":
                return _taken_over(directory, reporter)
            watchdog.beat("the last save", result.step)
        if result.status in ("preempted", "interrupted"):
            say(f"{result.status}: saving step {result.step} (a second signal ends at once)")
        try:
            with spent.on(CHECKPOINT):
                is_saved = save_last(result, trained.saving, checkpoints)
        except LeaseLostError:
            return _taken_over(directory, reporter)
    watches.note(result.step, result.status)
    facts = {
        "status": result.status,
        "steps": result.step,
        "compile_seconds": compile_seconds,
        "wall_seconds": time.perf_counter() - started,
        "checkpoint_step": checkpoints.latest_step(),
        "restored_from": begun.origin,
        "profile": str(trace.directory) if trace is not None and trace.is_written else None,
        "goodput": watches.goodput(),
        "warnings": watches.warnings,
    }
    watchdog.beat("writing the report")
    with spent.on(FINISH):
        finish_run(name, directory, assembly, reporter, result, facts)
    watches.note(result.step, result.status)
    if result.status not in ("diverged", "corrupted") and not is_saved:
        print(
            "error: the last state could not be saved; the run can continue from"
            f" step {facts['checkpoint_step']}",
            file=sys.stderr,
        )
        return int(cli.ExitCode.NOT_SAVED)
    return exit_code(result.status)


def _end_before_steps(directory: RunDirectory, watchdog: Watchdog, reason: Reason) -> None:
    """A signal while the run is being made ready, which may take many minutes."""
    say(f"{reason} before the first step: nothing to save, the same command goes on")
    directory.release()
    watchdog.leave(Ending(reason))


def _taken_over(directory: RunDirectory, reporter: Reporter | None = None) -> int:
    """Leaves the files of the run alone, which another process writes by now."""
    if reporter is not None:
        reporter.abandon()
    try:
        directory.fence()
        reason = f"run.directory={directory.path} was held by another process for a while"
    except (LeaseLostError, OSError) as error:
        reason = str(error)
    print(f"error: {reason}", file=sys.stderr)
    return int(cli.ExitCode.TAKEN_OVER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], age=process_age()))
