# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a study: flags, run directory, missing trials, table and picture.

A study is a class with `run` and `write`; its command is one call of `run_study`. The directory is
held by one process; a signal stops a study between two trials, and the same command continues.

To add a study: experiments/studies/gates/ is the smallest one, experiments/gates.py its command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax

from experiments.cli import flags
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import say
from experiments.cli.process import end_unsaved, start_process
from jaxmoe.optim import LinearConfig, ScheduleBase
from jaxmoe.optional import require
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory

EXIT_CODES = {
    "preempted": ExitCode.PREEMPTED,
    "interrupted": ExitCode.INTERRUPTED,
    "taken_over": ExitCode.TAKEN_OVER,
    "failed": 1,
}
"""Exit code of a study by its status; 0 for any other."""


class StudyStoppedError(Exception):
    """A signal arrived: the current trial is abandoned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudyRunConfig:
    """Run directory and name of a study."""

    directory: str | None = None
    """Run directory; runs/<command>/<name> when None."""
    name: str | None = None
    """Name of the study; the recipe's when None. The same name continues the same study."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """Base of the configs of studies."""

    most_seeds: ClassVar[int] = 10
    """Most trainings per arm."""

    run: StudyRunConfig = StudyRunConfig()
    """Run directory and name of the study."""
    seeds: int
    """Trainings per arm; training i of every arm has the same initial values and batches."""
    schedule: ScheduleBase = LinearConfig()
    """Learning rate by step."""
    evaluation_batches: int = 16
    """Held-out batches."""

    def __post_init__(self):
        if not 1 <= self.seeds <= self.most_seeds:
            raise ValueError(f"seeds={self.seeds} must lie between 1 and {self.most_seeds}")
        if self.evaluation_batches < 1:
            raise ValueError(f"evaluation_batches={self.evaluation_batches} must be at least 1")


class Destination(Protocol):
    """Settings that say into which run directory a command writes."""

    @property
    def run(self) -> StudyRunConfig:
        """Run directory and name."""
        ...


Config = TypeVar("Config", bound=Destination)


@runtime_checkable
class Study(Protocol):
    """A comparison of trials in one directory."""

    def run(self, stop: StopRequest) -> str:
        """Run every missing trial; return the status ("done", or the reason of a stop)."""
        ...

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return the tables as text."""
        ...


def check_stop(stop: StopRequest) -> None:
    """Raise StoppedError once a signal has arrived."""
    if stop.reason is not None:
        raise StudyStoppedError


def run_study(
    command: str,
    recipes: Mapping[str, Callable[[], Config]],
    argv: Sequence[str],
    description: str,
    open_study: Callable[[Any, RunDirectory], Study],
    *,
    free: tuple[str, ...],
    name_of: Callable[[str, Any], str] = lambda recipe, config: recipe,
    check: Callable[[str, Any], None] = lambda recipe, config: None,
) -> int:
    """Run the command of a study.

    Args:
        command: Name of the command: `routers` of `jaxmoe routers`.
        recipes: Functions that return a config, by name.
        argv: Arguments of the command.
        description: Text of `--help`.
        open_study: Function from config and run directory to the study. It may raise ValueError.
        free: Fields of the config that may change when a directory is continued.
        name_of: Function from recipe and config to the name of the study.
        check: Checks made before the directory is created; raises ValueError.

    Returns:
        The exit code.
    """
    recipe, config = flags.parse(recipes, "short", argv, f"jaxmoe {command}", description)
    with flags.exit_on_bad_configuration():
        start_process()
        require("matplotlib.figure")  # an early error: trials take many minutes
        check(recipe, config)
    run = config.run
    name = run.name or name_of(recipe, config)
    directory = RunDirectory(run.directory or f"runs/{command}/{name}")
    started = time.perf_counter()
    with StopRequest(on_second=end_unsaved) as stop, contextlib.ExitStack() as stack:
        with flags.exit_on_bad_configuration():
            directory.acquire(on_lost=stop.taken_over)
            stack.callback(directory.release)
            directory.check_config(config, free=free)
            study = open_study(config, directory)
            directory.write_environment([str(device) for device in jax.devices()])
        status = study.run(stop)
        with flags.exit_on_bad_configuration():
            say(study.write(status, time.perf_counter() - started))
    return int(EXIT_CODES.get(status, ExitCode.DONE))
