# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model, or resumes an interrupted run.

    jaxmoe pretrain [recipe] [--dotted.field value ...]
    jaxmoe pretrain resume RUN [--training.steps 900 ...]
    jaxmoe pretrain branch RUN --run.name NAME [--checkpoint.initial.step 300 ...]

The same command resumes, and so does `resume RUN`. With flags `resume` extends the run: more steps,
another schedule, learning rate or evaluation, with the optimiser's state. `branch` does so in a new
run, from any checkpoint of RUN: before the decay of a WSD schedule, say.

Progress is a live view on a terminal and lines of key=value elsewhere
(`--tracking.console`). `--profile.steps 10:13` traces steps 10 to 13. `--tracking.trackers
tensorboard wandb` sends metrics to further trackers. After several refused steps in a row a run
goes back to a checkpoint and skips their data (`jaxmoe/run/rollback.py`).

Exit codes: 0 done, 2 bad configuration, 3 diverged, 69 another process of the run was lost, 74 the
last state could not be saved, 75 saved after SIGTERM or SIGHUP, 76 a device holds or computes other
bits than it should, 77 another process took the run over, 124 nothing moved within
`--processes.watchdog`, 130 saved after Ctrl-C. Before the first step a signal ends the run at once:
nothing is to be saved. A second SIGTERM or Ctrl-C does not wait for the save, and gives 74.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import jaxmoe.run  # its names are loaded when a run begins, not for --help
from experiments.cli import flags
from experiments.cli.continuation import WORDS, named_fields, parse_continuation
from experiments.cli.exit import exit_code, run_command
from experiments.cli.following import after_training, say_next
from experiments.cli.output import say, warn, write
from experiments.cli.process import end_unsaved, start_process
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.errors import ConfigurationError, printable
from jaxmoe.optional import MissingPackageError
from jaxmoe.resilience.stop import Reason, StopRequest
from jaxmoe.resilience.watchdog import JAX_LATER, Ending, Watchdog
from jaxmoe.run.config import PretrainConfig
from jaxmoe.training.stopwatch import START, Stopwatch, process_age


def main(argv: Sequence[str], *, age: float = 0.0) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Arguments of the command line.
        age: Seconds that the process has spent on this run before the call.
    """
    prog = "jaxmoe pretrain"
    description = __doc__ or ""
    extends: bool | frozenset[str] = False
    if argv and argv[0] in WORDS:
        recipe = None
        config = parse_continuation(argv, prog, description)
        extends = named_fields(argv[2:])
    else:
        recipe, config = flags.parse(RECIPES, DEFAULT, argv, prog, description)
    name = config.run.name or recipe
    return train(
        config,
        command="pretrain",
        name=name,
        fixed_fields=named_fields(argv),
        shown=recipe or argv[0],
        extends=extends,
        age=age,
    )


def train(
    config: PretrainConfig,
    *,
    command: str,
    name: str | None,
    fixed_fields: frozenset[str],
    shown: str = "",
    extends: bool | frozenset[str] = False,
    age: float = 0.0,
) -> int:
    """Train a run, and return the exit code of the command.

    Args:
        config: Configuration of the run.
        command: Name of the command, for messages.
        name: Name of the run; that of its directory when None.
        fixed_fields: Fields that the command line names; other sizes are fitted to the data.
        shown: Name in the first message; `name` when empty.
        extends: Whether a run that is there may go on with changed fields; or those that the
            command line names.
        age: Seconds that the process has spent on this run before the call.
    """
    stopwatch = Stopwatch(START, already=age)
    write(
        printable(
            f"{command} {shown or name}: finding devices, reading data, building the model ..."
        )
    )
    with flags.exit_on_bad_configuration():
        jaxmoe.run.check_packages(config.tracking)
        # JAX ends processes itself only where the heartbeat of the watchdog has failed to.
        start_process(start=config.timeouts.start, heartbeat=config.timeouts.heartbeat + JAX_LATER)
    run = jaxmoe.run.Run(config, name=name, extends=extends, fixed_fields=fixed_fields)
    with (
        Watchdog(config.timeouts, exit_code) as watchdog,
        StopRequest(functools.partial(_end_before_steps, run, watchdog), end_unsaved) as stop,
        contextlib.ExitStack() as resources,
        watchdog.exit_on_error(),
        flags.exit_on_bad_configuration(ConfigurationError, MissingPackageError),
    ):
        result = run.train(
            jaxmoe.run.Supervision(
                watchdog=watchdog, stop=stop, stopwatch=stopwatch, resources=resources
            )
        )
    if result.status == "done":
        say_next(after_training(command, config, str(run.directory.path)))
    if result.message:
        warn(printable(f"error: {result.message}", kept="\n"))
    return exit_code(result.status)


def _end_before_steps(run: jaxmoe.run.Run, watchdog: Watchdog, reason: Reason) -> None:
    """End the process on a signal that comes before the first step."""
    say(f"{reason} before the first step: nothing to save; run the same command to start again")
    run.directory.release()
    watchdog.leave(Ending(reason))


if __name__ == "__main__":
    run_command(functools.partial(main, age=process_age()))
