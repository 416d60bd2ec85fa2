# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whether checkpoints are what was written.

    python -m experiments.checkpoint verify --run.directory runs/pretrain/tiny [--level files]

A line for each step: every file by its checksum and, unless `--level files`, every array by its
fingerprint. Nothing is changed. Exit codes: 0 all are whole, 65 a step is damaged, 2 no such run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from jaxmoe.checkpoint import CheckpointDamagedError, CheckpointManager
from jaxmoe.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsConfig:
    """Which checkpoints."""

    directory: str = "runs/pretrain/tiny"
    """A run directory, or a directory of checkpoints."""
    step: int | None = None
    """Of the checkpoint."""

    @property
    def checkpoints(self) -> pathlib.Path:
        """The directory that holds the steps."""
        inner = RunDirectory(self.directory).checkpoints_directory
        return inner if inner.is_dir() else pathlib.Path(self.directory)

    def open(self) -> tuple[CheckpointManager, list[int]]:
        """Its manager, for reading, and the steps that are meant: all when none is named.

        Raises:
            ValueError: there are none, or not that one.
        """
        manager = CheckpointManager(self.checkpoints, is_writer=False)
        steps = manager.steps()
        if not steps:
            raise ValueError(f"run.directory={self.directory} holds no checkpoints")
        if self.step is not None:
            if self.step not in steps:
                have = ", ".join(map(str, steps))
                raise ValueError(
                    f"run.step={self.step}: run.directory={self.directory} has the steps {have}"
                )
            steps = [self.step]
        return manager, steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """What to verify."""

    run: CheckpointsConfig = CheckpointsConfig()
    """The checkpoints; all steps unless one is named."""
    level: Literal["full", "files"] = "full"
    """Files and arrays, or the files alone."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.checkpoint verify"
    config = cli.parse_flags(VerifyConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
        manager, steps = config.run.open()
    code = cli.ExitCode.DONE
    for step in steps:
        try:
            if config.level == "full":
                manager.restore(step, None)
            else:
                manager.check_files(step)
            manifest = manager.manifest(step)
            arrays = f"{len(manifest.arrays)} arrays"
            if config.level == "files":
                arrays += " not read"
            elif not manifest.fingerprints:
                arrays += " read, without fingerprints to compare"
            say(f"{step}: whole, {arrays}")
        except CheckpointDamagedError as error:
            say(f"{step}: {error}")
            code = cli.ExitCode.DAMAGED
    manager.close()
    return int(code)
