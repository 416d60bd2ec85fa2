# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the batches of refused steps.

    <run>/bad_data/step<n>.npz    tokens, targets, loss_weights, segment_ids and positions (where
                                  rows have them): [rows, positions];  rows: their numbers;  step: n

The first process reads all rows of a batch again, those of other hosts too, because a batch is a
function of the step. The number of a row is its index in the infinite sequence of the split
(`Loader.row`). Dumps are never deleted. `experiments/replay.py` analyses them.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import re
from typing import Any

import jax
import numpy as np

from jaxmoe.data import Batch, Loader
from jaxmoe.disk import DiskGuard, replace_file
from jaxmoe.run.directory import RunDirectory


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
    found = (re.fullmatch(r"step(\d+)\.npz", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


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
        rows, number = arrays.pop("rows"), int(arrays.pop("step"))
        return DumpedBatch(step=number, rows=rows, batch=Batch.from_arrays(arrays))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a dump of a batch ({error}): remove it") from error


def _file(directory: RunDirectory, step: int) -> pathlib.Path:
    return directory.bad_data_directory / f"step{step}.npz"
