# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that checkpoints have not changed since they were written.

    jaxmoe checkpoint verify runs/pretrain/tiny [--level files]

Prints one line per step. Compares every file with its checksum and, without `--level files`, every
array with its fingerprint. Changes nothing. Exit codes: 0 all steps are whole, 65 a step is
damaged, 2 no such run.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Literal

from experiments.cli import flags as cli
from experiments.cli.model import with_about, with_model
from experiments.cli.output import say
from experiments.cli.process import start_process
from jaxmoe.checkpoint import CheckpointDamagedError, CheckpointManager
from jaxmoe.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsConfig:
    """Checkpoints to read."""

    directory: str = "runs/pretrain/tiny"
    """Run directory, or directory of checkpoints."""
    step: int | None = None
    """Step of the checkpoint."""

    @property
    def checkpoints(self) -> pathlib.Path:
        """Directory of the steps."""
        inner = RunDirectory(self.directory).checkpoints_directory
        return inner if os.path.isdir(inner) else pathlib.Path(self.directory)

    def open(self) -> tuple[CheckpointManager, list[int]]:
        """Open the checkpoints for reading.

        Returns:
            The manager, and the steps: all of them, or the one of `step`.

        Raises:
            ValueError: There are no steps, or not the one of `step`.
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
    """Checkpoints and checks."""

    run: CheckpointsConfig = CheckpointsConfig()
    """Checkpoints; all steps by default."""
    level: Literal["full", "files"] = "full"
    """Check files and arrays, or only files."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe checkpoint verify"
    config = cli.parse_flags(VerifyConfig(), with_model(argv), prog, with_about(__doc__))
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
