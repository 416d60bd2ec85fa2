# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rolls a run back to a checkpoint when too many steps in a row were refused.

    refused   steps b-k+1 .. b, each of which changed nothing (k = training.guard.max_skipped)
    dumped    their batches, to bad_data/ (`jaxmoe replay` analyses them)
    restored  the newest valid checkpoint that has read none of them, or the initial state
    skipped   their rows, once: step b-k+1 reads what step b+1 would have read

The steps between are trained again, on the same data. The window does not depend on how often
metrics are reported. The skipped rows are recorded twice (see `jaxmoe.data.skipped`): first in
`skipped.json`, and then in the data position of every later checkpoint, so that a restart at any
moment, from any checkpoint, continues as the run would have. A checkpoint of an abandoned step is
set aside.

After `training.guard.rollbacks` windows the run ends as diverged. Every process decides from the
same metrics and records; the first one writes. Learning rate, clipping and the order of the data
after the window do not change.

`jaxmoe/run/trainer.py` does this in `_go_back`.

    <run>/bad_data/step<n>.npz    tokens, targets, loss_weights, segment_ids and positions (where
                                  rows have them): [rows, positions];  rows: their numbers;  step: n

The first process reads all rows of a batch again, those of other hosts too, because a batch is a
function of the step. The number of a row is its index in the infinite sequence of the split
(`Loader.row`). Dumps are never deleted. `experiments/replay.py` analyses them.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pathlib
import re
from typing import Any

import jax
import numpy as np

from jaxmoe.data import Batch, Loader
from jaxmoe.disk import DiskGuard, replace_file
from jaxmoe.messages import command_line
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.restore import Continuation
from sharding.distributed import agree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedBatch:
    """Batch of a refused step."""

    step: int
    """Number of the step, from 1."""
    rows: np.ndarray
    """Number of each row in the endless sequence of the split."""
    batch: Batch


def dump_batches(directory: RunDirectory, loader: Loader, refused: tuple[int, int]) -> None:
    """Write the batches of some steps; a full disk loses the dump and does not end the run.

    Args:
        directory: Run directory.
        loader: Loader that produced the batches.
        refused: First and last step, from 1.
    """
    if jax.process_index() != 0:
        return
    guard = DiskGuard(directory.bad_data_directory)
    for step in range(refused[0], refused[1] + 1):
        batch = loader.batch(step - 1)
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in batch.arrays().items()}
        first = loader.first_row(step - 1)
        rows = np.arange(first, first + batch.tokens.shape[0])
        file = io.BytesIO()
        np.savez_compressed(file, step=np.int64(step), rows=rows, **arrays)
        with guard.warning_once():
            replace_file(_file(directory, step), file.getvalue())


def dumped_steps(directory: RunDirectory) -> list[int]:
    """Return the steps with a dumped batch, ascending."""
    names = (path.name for path in directory.bad_data_directory.glob("step*.npz"))
    matches = (re.fullmatch(r"step(\d+)\.npz", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def read_batch(directory: RunDirectory, step: int) -> DumpedBatch:
    """Return the dumped batch of a refused step.

    Args:
        directory: Run directory.
        step: Number of the step, from 1.

    Raises:
        ValueError: The step was not dumped, or the file is damaged.
    """
    path = _file(directory, step)
    if not path.exists():
        have = ", ".join(map(str, dumped_steps(directory))) or "none"
        raise ValueError(
            f"step={step}: {directory.bad_data_directory} has no batch of that step (has: {have})"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        rows = arrays.pop("rows")
        number = int(arrays.pop("step"))
        return DumpedBatch(step=number, rows=rows, batch=Batch.from_arrays(arrays))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a dump of a batch ({error}): remove it") from error


def _file(directory: RunDirectory, step: int) -> pathlib.Path:
    return directory.bad_data_directory / f"step{step}.npz"


logger = logging.getLogger(__name__)


def without_refused(
    directory: RunDirectory,
    assembly: Assembly,
    refused: tuple[int, int],
) -> Continuation | None:
    """Write the data of refused steps, and return the states that go on without them.

    Args:
        directory: Run directory, held by this process.
        assembly: Plan, devices and data of the steps.
        refused: First and last of the refused steps.

    Returns:
        How the run continues without the rows of these steps; None if it cannot go back: for the
        last time it did, or jobs that share its batches do not go back with it.
    """
    loader = assembly.loader
    dump_batches(directory, loader, refused)
    is_last = len(loader.skipped.windows) >= assembly.plan.config.training.step_guard.rollbacks
    if is_last or assembly.job is not None:
        return None
    return _jump(directory, loader, refused)


def _jump(directory: RunDirectory, loader: Loader, refused: tuple[int, int]) -> Continuation | None:
    """Record skipped rows, and return how to continue without them; None if that fails."""
    first, last = refused
    loader = loader.without_steps(first - 1, last - 1)  # step n reads batch n - 1
    problem = None
    if jax.process_index() == 0:
        try:
            directory.write_skipped(loader.skipped.to_json())
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        logger.warning("the run cannot go back: %s", problem or "the first process says why")
        return None
    return Continuation(loader, loader.skipped)


def rollback_message(
    directory: RunDirectory, assembly: Assembly, refused: tuple[int, int], step: int
) -> str:
    """Return the message about a rollback.

    Args:
        directory: Run directory.
        assembly: Plan, devices and data of the steps that follow.
        refused: First and last of the refused steps.
        step: Step to which the run went back.
    """
    windows = assembly.loader.skipped.windows
    first, last = refused
    back = f"the checkpoint of step {step}" if step else "the initial state"
    return (
        f"rolled back to {back}: steps {first} to {last} were refused, and their data are skipped"
        f" before step {first} (rollback {len(windows)} of at most"
        f" {assembly.plan.config.training.step_guard.rollbacks}); look into it with"
        f" {command_line('replay', directory.path, '--step', first)}"
    )
