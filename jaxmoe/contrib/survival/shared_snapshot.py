# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what is left of a snapshot of which more processes are lost than parity restores.

Every process that has its part copies it to a directory that all processes share, from which each
reads what it needs: arrays that are replicated, and parts of arrays that others hold.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.contrib.survival.pieces import Piece
from jaxmoe.contrib.survival.snapshot_store import Pieces, SnapshotStore
from jaxmoe.contrib.survival.surviving import Box, Survey, Survivors, inside, overlap
from jaxmoe.training.state import TrainState
from sharding.distributed import agree

logger = logging.getLogger(__name__)


class SurvivingPieces(Survivors):
    """Reads the pieces of some processes.

    Args:
        survey: What is left.
        pieces: Pieces of the processes whose words are there.
    """

    def __init__(self, survey: Survey, pieces: Mapping[int, tuple[Piece, ...]]):
        self.survey = survey
        self._files: dict[int, np.ndarray] = {}
        self._pieces: dict[str, dict[Box, tuple[int, Piece]]] = {}
        for process, process_pieces in pieces.items():
            for piece in process_pieces:
                self._pieces.setdefault(piece.path, {})[piece.index] = process, piece

    def read(self, path: str, box: Box, instead: np.ndarray) -> np.ndarray:
        """Return a part of an array, with `instead` where it is lost."""
        values = np.array(instead)
        for index, (process, piece) in self._pieces.get(path, {}).items():
            if (shared_box := overlap(box, index)) is None:
                continue
            dtype = jnp.dtype(piece.dtype)
            buffer = self._words(process)[piece.start : piece.stop]
            data = np.ascontiguousarray(buffer).view(np.uint8)
            data = data[: math.prod(piece.shape) * dtype.itemsize].view(dtype)
            values[inside(shared_box, box)] = data.reshape(piece.shape)[inside(shared_box, index)]
        return values

    def _words(self, process: int) -> np.ndarray:
        if process not in self._files:
            file = self.survey.step / f"{process}.npy"
            self._files[process] = np.load(file, mmap_mode="r")
        return self._files[process]


@contextlib.contextmanager
def shared_snapshot(
    store: SnapshotStore,
    directory: pathlib.Path,
    target: TrainState,
    check: Callable[[CheckpointManifest], None],
) -> Iterator[SurvivingPieces | None]:
    """Open what is left of the most complete snapshot; every process must call this.

    Yields None, with a warning where there is a reason, if there is none that all can read.

    Args:
        store: Snapshots of this process.
        directory: Directory that all processes share; made for the time of the context.
        target: State with the arrays and shardings wanted.
        check: Raises ValueError for a manifest that must not be used.
    """
    is_first = jax.process_index() == 0
    problem = None
    if is_first:
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        except OSError as error:
            problem = error
            logger.warning("snapshots cannot be shared: %s", error)
    if agree(problem is not None):
        yield None
        return
    try:
        copied = store.copy_fullest(target, directory, check)
        yield None if copied is None else _open(directory, *copied)
    finally:
        agree(0)  # a barrier: all processes have read, or failed
        if is_first:
            shutil.rmtree(directory, ignore_errors=True)


def _open(
    directory: pathlib.Path, manifest: CheckpointManifest, pieces: Pieces, holders: list[int]
) -> SurvivingPieces:
    remaining = {process: pieces[process] for process in holders}
    boxes = {
        (piece.path, piece.index)
        for process_pieces in remaining.values()
        for piece in process_pieces
    }
    lost: dict[str, tuple[Box, ...]] = {}
    for path, index in sorted(
        {(piece.path, piece.index) for process_pieces in pieces for piece in process_pieces} - boxes
    ):
        lost[path] = (*lost.get(path, ()), index)
    survey = Survey(step=directory, manifest=manifest, files=(), stored={}, lost=lost)
    return SurvivingPieces(survey, remaining)
