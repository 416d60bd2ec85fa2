# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps snapshots of the state in the memory of the hosts, where they outlive the processes.

    <directory>/<step>/words.npy       what the devices of this process hold, each part once
    <directory>/<step>/parity.npy      1 / (N - 1) of that, for the other processes (`parity.py`)
    <directory>/<step>/manifest.json   as in a checkpoint: arrays, fingerprints, config, data
    <directory>/<step>/pieces.json     run, process, and the place of each part in the words
    <directory>/<step>/files.json      size and checksum of each file

Every process writes to its own directory in shared memory, which a supervisor makes and deletes. A
step is renamed into place when it is complete, and the two newest are kept; memory for three is
needed while one is written. Copying to the host and the parity block the run, writing does not.

A restore takes the newest step that all processes but at most one hold completely, on the same
mesh. The part of a lost process is rebuilt from the others, and the result is compared with the
fingerprints that the devices computed before the copy.

Replicated arrays are kept by each process. Two hosts lost at once, another mesh or another number
of processes need a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from jaxmoe.checkpoint import checksums
from jaxmoe.checkpoint.manifest import (
    CheckpointAbandonedError,
    CheckpointDamagedError,
    CheckpointManifest,
    check_fingerprints,
    make_manifest,
)
from jaxmoe.resilience.parity import Block, Peers, TooManyLostError, Words, only_lost, padded
from jaxmoe.resilience.pieces import Piece, num_words, pack_words, pieces_of, place_words
from jaxmoe.state_tree import flatten
from sharding.distributed import agree, gather, share

logger = logging.getLogger(__name__)

Pieces = tuple[tuple[Piece, ...], ...]
"""Pieces of each process."""

_PENDING = ".pending"
_COMPARED = 3
"""Steps that a process may hold: those kept, and one about to be replaced."""


class Restored(NamedTuple):
    """Result of a restore."""

    step: int
    state: Any
    rebuilt: int | None
    """Process whose part was rebuilt from parity."""

    @property
    def words(self) -> str:
        """Description for a log."""
        how = "" if self.rebuilt is None else f" (process {self.rebuilt} rebuilt from parity)"
        return f"step {self.step} from snapshots in memory{how}"


class SnapshotStore:
    """Snapshots of this process; every process must make each call.

    Args:
        directory: Directory of this process, in memory; {process: directory} for several, in a test
            where one process stands for them.
        run: Id of the run; snapshots of another run are not used.
        keep: Number of newest steps to keep.
        process_of: Process of a device.
    """

    def __init__(
        self,
        directory: Any,
        *,
        run: str,
        keep: int = 2,
        process_of: Callable[[jax.Device], int] | None = None,
    ):
        given = directory if isinstance(directory, Mapping) else {jax.process_index(): directory}
        self._directories = {own: pathlib.Path(given[own]) for own in sorted(given)}
        self._run, self._keep = run, keep
        process_of = process_of or (lambda device: device.process_index)
        devices: dict[int, list[jax.Device]] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            devices.setdefault(process_of(device), []).append(device)
        self._devices = [devices[process] for process in sorted(devices)]
        self._peers = Peers([own[0] for own in self._devices])
        self._found: tuple[Any, Pieces, int] | None = None
        self._writing: threading.Thread | None = None
        self._failed: list[str] = []
        for own in self._directories.values():
            for leftover in own.glob(f"*{_PENDING}"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self, step: int, state: Any, *, config: Mapping[str, Any], data: Mapping[str, Any]
    ) -> None:
        """Keep a state; return when it has been copied and may be donated.

        A snapshot that cannot be written (no space) is reported by the next call.

        Args:
            step: Name of the snapshot.
            state: Tree of named arrays.
            config: Config of the run as JSON.
            data: Data position.
        """
        self.finish()
        manifest = make_manifest(state, step=step, config=config, data=data)
        pieces, size = self._pieces(state)
        words = {own: pack_words(state, pieces[own], size) for own in self._directories}
        parity = self._peers.encode(words)
        self._writing = threading.Thread(
            target=self._write_all,
            args=(step, _spell(manifest, self._run), pieces, words, parity),
            name="snapshot",
        )
        self._writing.start()

    def finish(self) -> None:
        """Wait for the snapshot being written, and log failures."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        for reason in self._failed:
            logger.warning("%s", reason)
        self._failed.clear()

    def restore_newest(
        self,
        target: Any,
        *,
        at_least: int = 0,
        check: Callable[[CheckpointManifest], None] | None = None,
    ) -> Restored | None:
        """Return the newest state that can be restored; None, with a warning, if there is none.

        Args:
            target: State with the arrays and shardings wanted.
            at_least: First step of interest.
            check: Raises ValueError for a manifest that must not be used.
        """
        pieces, size = self._pieces(target)
        held, why = self._holders(pieces), ""
        for step in sorted((step for step in held if step >= at_least), reverse=True):
            try:
                lost = only_lost(held[step])
                state = self._read(step, target, pieces, size, lost, check, held[step].index(True))
            except (TooManyLostError, CheckpointDamagedError, CheckpointAbandonedError) as error:
                why = why or f"step {step}: {error}"
                continue
            return Restored(step, state, lost)
        # The table is the same on every process; the first one logs.
        if why and 0 in self._directories:
            logger.warning("no snapshot in memory of %d processes is used: %s", len(pieces), why)
        return None

    def copy_fullest(
        self, target: Any, directory: pathlib.Path, check: Callable[[CheckpointManifest], None]
    ) -> tuple[CheckpointManifest, Pieces, list[int]] | None:
        """Copy the words of the newest step of which the most processes have their part to files.

        Args:
            target: State with the arrays and shardings wanted.
            directory: Existing directory that all processes share; gets `<process>.npy`.
            check: Raises ValueError for a manifest that must not be used.

        Returns:
            The manifest, the pieces of each process, and the processes that have theirs; None
            without a step, or if a process cannot write its file or see those of others.
        """
        pieces, _ = self._pieces(target)
        held = self._holders(pieces)
        for step in sorted(held, key=lambda step: (sum(held[step]), step), reverse=True):
            holders = [process for process, has in enumerate(held[step]) if has]
            text = self._share_manifest(step, holders[0])
            manifest = CheckpointManifest.from_json(json.loads(text)["manifest"], "the snapshot")
            try:
                check(manifest)
            except CheckpointAbandonedError:
                continue
            is_shared = self._copy(step, directory, holders)
            return (manifest, pieces, holders) if is_shared else None
        return None

    def _copy(self, step: int, directory: pathlib.Path, holders: list[int]) -> bool:
        """Copy the words of a step to files; return whether every process sees all of them."""
        problem = None
        try:
            for own in self._directories.keys() & set(holders):
                words = self._directories[own] / str(step) / "words.npy"
                shutil.copyfile(words, directory / f"{own}.npy")
        except OSError as error:
            problem = str(error)
        agree(0)  # a barrier: all files are written
        if problem is None and not all((directory / f"{own}.npy").exists() for own in holders):
            problem = f"{directory} is not on a disk that all processes share"
        if problem is not None:
            logger.warning("the snapshot of step %d cannot be shared: %s", step, problem)
        return not agree(problem is not None)

    def keep_only(self, step: int | None) -> None:
        """Delete all steps but the one from which the run continues.

        Args:
            step: Step to keep; None deletes all.
        """
        self.finish()
        for own in self._directories:
            for other in self._steps(own):
                if other != step:
                    _delete(self._directories[own] / str(other))

    def _read(
        self,
        step: int,
        target: Any,
        pieces: Pieces,
        size: int,
        lost: int | None,
        check: Callable[[CheckpointManifest], None] | None,
        holder: int,
    ) -> Any:
        """Return the state of a step of which at most one process lacks its part."""
        block_size = size // max(len(pieces) - 1, 1)
        nothing = np.zeros(size, np.uint32), np.zeros(block_size, np.uint32)
        read = {own: nothing if own == lost else self._load(own, step) for own in self._directories}
        text = self._share_manifest(step, holder)
        manifest = CheckpointManifest.from_json(json.loads(text)["manifest"], "the snapshot")
        if check is not None:
            check(manifest)
        words = {own: word for own, (word, _) in read.items()}
        if lost is not None:
            parity = {own: block for own, (_, block) in read.items()}
            found, block = self._peers.rebuild(lost, words, parity)
            if lost in words:
                words[lost] = found
        state = place_words([(pieces[own], words[own]) for own in words], target)
        check_fingerprints(manifest, state, f"the snapshot of step {step} in memory")
        if lost is not None and lost in words:  # complete for the next loss
            self._write_all(step, text, pieces, {lost: words[lost]}, {lost: block})
        return state

    def _pieces(self, state: Any) -> tuple[Pieces, int]:
        """Return the pieces of each process, and the words that the largest needs."""
        leaves = flatten(state)
        shapes = {path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in leaves.items()}
        if self._found is None or self._found[0] != shapes:
            pieces = pieces_of(state, self._devices)
            size = padded(max(map(num_words, pieces)), len(pieces))
            self._found = shapes, pieces, size
        return self._found[1:]

    def _steps(self, own: int) -> list[int]:
        directory = self._directories[own]
        if not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())

    def _whole_steps(self, own: int, pieces: tuple[Piece, ...]) -> list[tuple[int, int]]:
        """Return the usable steps of a process, with the checksum of their manifests."""
        whole = []
        for step in self._steps(own)[-_COMPARED:]:
            path = self._directories[own] / str(step)
            try:
                lines = checksums.damage(path)
                if not lines and json.loads((path / "manifest.json").read_text())["run"] != (
                    self._run
                ):
                    lines = ["it is of another run, or of another config"]
                if not lines and (path / "pieces.json").read_text() != self._own(own, pieces):
                    lines = ["it is of another mesh, another state or other processes"]
                digest = zlib.crc32((path / "manifest.json").read_bytes())
            except (OSError, ValueError, KeyError, TypeError) as error:
                lines = [str(error)]
            if lines:
                logger.warning("the snapshot %s is not used: %s", path, "; ".join(lines[:3]))
            else:
                whole.append((step, digest))
        return whole

    def _holders(self, pieces: Pieces) -> dict[int, list[bool]]:
        """Return for each step which processes have their part, of the manifest that most have."""
        whole = {own: self._whole_steps(own, pieces[own]) for own in self._directories}
        held, found = self._gather_steps(whole), {}
        for step in {step for steps in held for step, _ in steps}:
            digests = [dict(steps).get(step) for steps in held]
            digest = max((one for one in digests if one is not None), key=digests.count)
            found[step] = [digest == other for other in digests]
        return found

    def _gather_steps(
        self, whole: Mapping[int, list[tuple[int, int]]]
    ) -> list[list[tuple[int, int]]]:
        """Return the steps that each process holds."""
        mine = np.zeros((len(whole), _COMPARED, 3), np.uint32)
        for row, own in enumerate(self._directories):
            for place, (step, digest) in enumerate(whole[own]):
                mine[row, place] = 1, step, digest
        table = gather(mine).reshape(-1, _COMPARED, 3).tolist()
        return [[(step, digest) for there, step, digest in row if there] for row in table]

    def _share_manifest(self, step: int, holder: int) -> str:
        """Return the manifest, which is the same on all processes that have it."""
        mine = b""
        if holder in self._directories:
            mine = (self._directories[holder] / str(step) / "manifest.json").read_bytes()
        return share(np.frombuffer(mine, np.uint8), bool(mine)).tobytes().decode()

    def _load(self, own: int, step: int) -> tuple[Words, Block]:
        path = self._directories[own] / str(step)
        return np.load(path / "words.npy"), np.load(path / "parity.npy")

    def _own(self, own: int, pieces: tuple[Piece, ...]) -> str:
        """Return the part of the manifest that belongs to this process alone."""
        listed = [dataclasses.astuple(piece) for piece in pieces]
        return json.dumps({"process": own, "of": len(self._devices), "pieces": listed})

    def _write_all(
        self,
        step: int,
        manifest: str,
        pieces: Pieces,
        words: Mapping[int, UInt32[np.ndarray, " size"]],
        parity: Mapping[int, Block],
    ) -> None:
        for own in words:
            path = self._directories[own] / str(step)
            try:
                needed = words[own].nbytes + parity[own].nbytes
                _write(
                    path,
                    needed,
                    {"words": words[own], "parity": parity[own]},
                    {"manifest": manifest, "pieces": self._own(own, pieces[own])},
                )
            except OSError as error:
                self._failed.append(
                    f"the snapshot of step {step} was not kept by process {own}, the run goes on:"
                    f" {error}"
                )
                shutil.rmtree(path.with_name(path.name + _PENDING), ignore_errors=True)
                continue
            for older in self._steps(own)[: -self._keep]:
                _delete(self._directories[own] / str(older))


def _spell(manifest: CheckpointManifest, run: str) -> str:
    """Return the manifest as text, the same on every process."""
    return json.dumps({"run": run, "manifest": manifest.to_json()}, sort_keys=True)


def _write(
    path: pathlib.Path,
    needed: int,
    arrays: Mapping[str, np.ndarray],
    texts: Mapping[str, str],
) -> None:
    """Write a step, and rename it into place when it is complete."""
    pending = path.with_name(path.name + _PENDING)
    shutil.rmtree(pending, ignore_errors=True)
    pending.mkdir(parents=True)
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
