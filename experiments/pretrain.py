# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model; the same command continues.

    python -m experiments.pretrain [recipe] [--dotted.field value ...]

On a terminal the progress is a live view, elsewhere a line (`--tracking.console`). A trace of some
steps is `--profile.steps 10:13`; further trackers are `--tracking.trackers tensorboard wandb`.
A finished run started again says so. Exit codes: 0 done, 2 bad configuration, 3 diverged, 74 the
last state could not be saved, 75 saved after SIGTERM, 76 a device holds other bits than its
replicas, 130 saved after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

import jax

from experiments import aftermath, cli
from experiments.around_steps import (
    compile_steps,
    make_saving,
    make_trace,
    save_last,
    train,
)
from experiments.assembly import Assembly, assemble, devices_in_words
from experiments.config import FIXED_FIELDS, FREE_FIELDS
from experiments.finished import check_trains
from experiments.opening import already_done, print_header
from experiments.output import say
from experiments.process import start_process
from experiments.recipes import DEFAULT, RECIPES
from experiments.reporting import Reporter, check_packages
from experiments.run_directory import RunDirectory
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.data import check_position
from jaxmoe.training.state import TrainState
from jaxmoe.training.stop import StopRequest

_EXIT_CODES = {
    "done": cli.ExitCode.DONE,
    "diverged": cli.ExitCode.DIVERGED,
    "corrupted": cli.ExitCode.CORRUPTED,
    "preempted": cli.ExitCode.PREEMPTED,
    "interrupted": cli.ExitCode.INTERRUPTED,
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog, about = "python -m experiments.pretrain", __doc__ or ""
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, about)
    with cli.exit_on_bad_configuration():
        check_packages(config.tracking)
        start_process()
    name = config.run.name or recipe
    directory = RunDirectory(config.run.directory or f"runs/pretrain/{name}")
    with StopRequest() as stop, contextlib.ExitStack() as held:
        with cli.exit_on_bad_configuration():
            check_trains(directory, config)
            assembly = assemble(config)
            if jax.process_index() == 0:  # for all of them
                directory.acquire()
                held.callback(directory.release)
                directory.check_config(config, free=FREE_FIELDS, fixed=FIXED_FIELDS)
            checkpoints = CheckpointManager(
                directory.checkpoints_directory,
                keep=config.checkpoint.keep,
                verify=config.checkpoint.verify,
            )
            held.callback(checkpoints.close)
            first_step, state = _restore_or_start(assembly, checkpoints)
            if jax.process_index() == 0:
                directory.write_environment(devices_in_words(assembly.mesh))
        if first_step >= config.training.steps:
            say(already_done(directory, first_step, config))
            return int(cli.ExitCode.DONE)
        print_header(name, directory, assembly, first_step)
        return _train(name, directory, assembly, checkpoints, first_step, state, stop)


def _restore_or_start(assembly: Assembly, checkpoints: CheckpointManager) -> tuple[int, TrainState]:
    """The newest checkpoint that is whole, checked against the data, or a new state."""
    state = assembly.new_state()
    found = checkpoints.restore_newest(
        state,
        check=lambda manifest: check_position(
            manifest.data, assembly.loader.position(manifest.step)
        ),
        is_strict=assembly.plan.config.checkpoint.on_damage == "stop",
    )
    return (0, state) if found is None else found


def _train(
    name: str,
    directory: RunDirectory,
    assembly: Assembly,
    checkpoints: CheckpointManager,
    first_step: int,
    state: TrainState,
    stop: StopRequest,
) -> int:
    """Compiles, trains, and leaves the run's files behind."""
    started = time.perf_counter()
    with jax.set_mesh(assembly.mesh):
        with cli.exit_on_bad_configuration():
            reporter = Reporter(name, directory, assembly, first_step)
        with contextlib.closing(reporter):
            compiling = time.perf_counter()
            compiled = compile_steps(assembly, first_step, state)
            compile_seconds = time.perf_counter() - compiling
            say(f"compiled in {compile_seconds:.1f} s")
            saving = make_saving(assembly, checkpoints, reporter)
            trace = make_trace(directory, assembly.plan.config, first_step)
            result = train(assembly, reporter, compiled, first_step, state, saving, trace, stop)
        if result.status in ("preempted", "interrupted"):
            say(f"{result.status}: saving step {result.step} (a second signal ends at once)")
        is_saved = save_last(result, saving, checkpoints)
    facts = {
        "status": result.status,
        "steps": result.step,
        "compile_seconds": compile_seconds,
        "wall_seconds": time.perf_counter() - started,
        "checkpoint_step": checkpoints.latest_step(),
        "profile": str(trace.directory) if trace is not None and trace.is_written else None,
    }
    aftermath.leave(name, directory, assembly, reporter, result, facts)
    if result.status not in ("diverged", "corrupted") and not is_saved:
        print(
            "error: the last state could not be saved; the run can continue from"
            f" step {facts['checkpoint_step']}",
            file=sys.stderr,
        )
        return int(cli.ExitCode.NOT_SAVED)
    return int(_EXIT_CODES[result.status])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
