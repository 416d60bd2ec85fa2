# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the snapshots of one process: a directory per step, renamed into place whole.

words.npy       what the devices of the process hold, each part once
parity.npy      1 / (N - 1) of that, for the other processes (`parity.py`)
manifest.json   as in a checkpoint: arrays, fingerprints, config, data; and the run
pieces.json     number of the process, and the place of each part in the words: its own, and
                those of the process after it, so that one lost process loses no description
files.json      size and checksum of each file
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmoe.checkpoint import checksums
from jaxmoe.contrib.survival.parity import Block, Words
from jaxmoe.contrib.survival.pieces import Piece

logger = logging.getLogger(__name__)

COMPARED = 3
"""Steps that a process may hold: those kept, and one about to be replaced."""
_PENDING = ".pending"


class Held(NamedTuple):
    """A whole step of one process."""

    step: int
    digest: int
    """Checksum of the manifest, the same on every process that has the step."""
    process: int
    """Number of the process that saved it."""
    of: int
    """Number of processes that saved it."""
    is_same: bool
    """Whether it is in the layout of this start."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStep:
    """Where the parts of a step are."""

    where: Sequence[int | None]
    """Process that now holds the part of each process that saved; None for a lost part."""
    is_same: bool
    """Whether the parts are those of this mesh and these processes."""

    @property
    def of(self) -> int:
        """Number of processes that saved."""
        return len(self.where)

    @property
    def has(self) -> list[bool]:
        """Whether each part is held."""
        return [process is not None for process in self.where]

    def number_of(self, process: int) -> int | None:
        """Return the number of the part that a process holds; None if it holds none."""
        return self.where.index(process) if process in self.where else None


def find_steps(table: Sequence[Sequence[Held]], processes: int) -> dict[int, FoundStep]:
    """Return where the parts of each step are, of the manifest that the most processes have.

    Args:
        table: Steps that each process holds.
        processes: Number of processes of this start.
    """
    steps = {}
    for step in {holding.step for row in table for holding in row}:
        holders = {
            at: holding for at, row in enumerate(table) for holding in row if holding.step == step
        }
        digests = [holding.digest for holding in holders.values()]
        digest = max(digests, key=digests.count)
        holders = {at: holding for at, holding in holders.items() if holding.digest == digest}
        of = next(iter(holders.values())).of
        where: list[int | None] = [None] * of
        for process, holding in reversed(holders.items()):
            where[holding.process] = process
        is_same = of == processes and all(holding.is_same for holding in holders.values())
        steps[step] = FoundStep(where, is_same)
    return steps


def describe_pieces(process: int, pieces: Sequence[Sequence[Piece]]) -> str:
    """Return the text of pieces.json.

    Args:
        process: Number of the process.
        pieces: Pieces of each process.
    """
    following = pieces[(process + 1) % len(pieces)]
    layout, after = (
        [dataclasses.astuple(piece) for piece in process_pieces]
        for process_pieces in (pieces[process], following)
    )
    return json.dumps({"process": process, "of": len(pieces), "pieces": layout, "next": after})


def read_pieces(text: str, *, of_next: bool) -> tuple[Piece, ...]:
    """Return the pieces in pieces.json.

    Args:
        text: Text of the file.
        of_next: Whether to return those of the process after the one that wrote it.
    """
    listed = json.loads(text)["next" if of_next else "pieces"]
    return tuple(
        Piece(path, tuple((first, last) for first, last in index), dtype, start, stop)
        for path, index, dtype, start, stop in listed
    )


class SnapshotFiles:
    """Snapshots of one process.

    Args:
        directory: Directory in memory.
        run: Id of the run; snapshots of another run are not used.
        keep: Number of newest steps to keep.
    """

    def __init__(self, directory: pathlib.Path, run: str, keep: int):
        self._directory = directory
        self._run = run
        self._keep = keep
        for leftover in directory.glob(f"*{_PENDING}"):
            shutil.rmtree(leftover, ignore_errors=True)

    def at(self, step: int) -> pathlib.Path:
        """Return the directory of a step."""
        return self._directory / str(step)

    def steps(self) -> list[int]:
        """Return the steps, the newest last."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())

    def whole_steps(self, layout: str) -> list[Held]:
        """Return the steps that are whole and of this run; log why others are not used.

        Args:
            layout: Text of pieces.json in the layout of this start.
        """
        steps = []
        for step in self.steps()[-COMPARED:]:
            path = self.at(step)
            try:
                lines = checksums.damage(path)
                if not lines and json.loads((path / "manifest.json").read_text())["run"] != (
                    self._run
                ):
                    lines = ["it is of another run, or of another config"]
                text = (path / "pieces.json").read_text()
                saved = json.loads(text)
                digest = zlib.crc32((path / "manifest.json").read_bytes())
                holding = Held(step, digest, saved["process"], saved["of"], text == layout)
            except (OSError, ValueError, KeyError, TypeError) as error:
                lines = [str(error)]
            if lines:
                logger.warning("the snapshot %s is not used: %s", path, "; ".join(lines[:3]))
            else:
                steps.append(holding)
        return steps

    def load(self, step: int) -> tuple[Words, Block]:
        """Return the words and the parity of a step."""
        return np.load(self.at(step) / "words.npy"), np.load(self.at(step) / "parity.npy")

    def read(self, step: int, name: str) -> bytes:
        """Return a text of a step.

        Args:
            step: Step.
            name: manifest or pieces.
        """
        return (self.at(step) / f"{name}.json").read_bytes()

    def write(
        self, step: int, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]
    ) -> str | None:
        """Write a step and delete older ones; return why that is not possible, or None.

        Args:
            step: Step.
            arrays: Words and parity.
            texts: Manifest and pieces.
        """
        path = self.at(step)
        try:
            _write(path, arrays, texts)
        except OSError as error:
            shutil.rmtree(path.with_name(path.name + _PENDING), ignore_errors=True)
            return str(error)
        for older in self.steps()[: -self._keep]:
            self.delete(older)
        return None

    def delete(self, step: int) -> None:
        """Delete a step."""
        _delete(self.at(step))


def _write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Write a step, and rename it into place when it is complete."""
    pending = path.with_name(path.name + _PENDING)
    shutil.rmtree(pending, ignore_errors=True)
    pending.mkdir(parents=True)
    needed = sum(array.nbytes for array in arrays.values())
    if (free := shutil.disk_usage(pending).free) < 1.02 * needed:
        raise OSError(
            f"{free / 1e6:.1f} MB are free in {path.parent}, {needed / 1e6:.1f} MB are needed:"
            " give the supervisor another directory with --snapshots"
        )
    for name, array in arrays.items():
        np.save(pending / f"{name}.npy", array)
    for name, text in texts.items():
        (pending / f"{name}.json").write_text(text, encoding="utf-8")
    checksums.write_list(pending)
    _delete(path)
    pending.rename(path)


def _delete(path: pathlib.Path) -> None:
    """Delete a step after renaming it, so that any step found is complete."""
    if path.exists():
        trash = path.with_name(f"{path.name}.deleted{_PENDING}")
        shutil.rmtree(trash, ignore_errors=True)
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
