# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps snapshots of the state in the memory of the hosts, where they outlive the processes.

Every process writes to its own directory in shared memory, which a supervisor makes and deletes. A
step is renamed into place when it is complete, and the two newest are kept; memory for three is
needed while one is written (`snapshot_files.py`). Copying to the host and the parity block the run,
writing does not.

A restore takes the newest step of which all parts but at most one are held. The part of a lost
process is rebuilt from the others, and the result is compared with the fingerprints that the
devices computed before the copy. On the mesh that saved it each process reads its own part. On
another mesh, or with another number of processes, the parts go one after the other to all
processes, and each takes what it needs: it holds its part of the state and one part that was saved.

Replicated arrays are kept by each process. Two hosts lost at once need a checkpoint.
"""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from jaxmoe.checkpoint.manifest import (
    CheckpointAbandonedError,
    CheckpointError,
    CheckpointManifest,
    check_fingerprints,
    check_target,
    make_manifest,
)
from jaxmoe.contrib.survival.parity import Block, Peers, TooManyLostError, only_lost, pad_words
from jaxmoe.contrib.survival.pieces import Piece, num_words, pack_words, pieces_of, place_words
from jaxmoe.contrib.survival.relayout import Parts
from jaxmoe.contrib.survival.snapshot_files import (
    COMPARED,
    FoundStep,
    Held,
    SnapshotFiles,
    describe_pieces,
    find_steps,
    read_pieces,
)
from jaxmoe.state_tree import flatten
from sharding.distributed import agree, gather, share

logger = logging.getLogger(__name__)

Pieces = tuple[tuple[Piece, ...], ...]
"""Pieces of each process."""


class Restored(NamedTuple):
    """Result of a restore."""

    step: int
    state: Any
    rebuilt: int | None
    """Process whose part was rebuilt from parity."""
    saved_by: int | None = None
    """Number of processes that saved it in another layout; None for the same layout."""

    @property
    def words(self) -> str:
        """Description for a log."""
        how = "" if self.rebuilt is None else f" (process {self.rebuilt} rebuilt from parity)"
        where = "" if self.saved_by is None else f" of {self.saved_by} processes on another mesh"
        return f"step {self.step} from snapshots in memory{where}{how}"


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
        directories = (
            directory if isinstance(directory, Mapping) else {jax.process_index(): directory}
        )
        self._files = {
            member: SnapshotFiles(pathlib.Path(directories[member]), run, keep)
            for member in sorted(directories)
        }
        self._run = run
        process_of = process_of or (lambda device: device.process_index)
        devices: dict[int, list[jax.Device]] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            devices.setdefault(process_of(device), []).append(device)
        self._devices = [devices[process] for process in sorted(devices)]
        self._peers = Peers([member[0] for member in self._devices])
        self._found: tuple[Any, Pieces, int] | None = None
        self._writing: threading.Thread | None = None
        self._failed: list[str] = []

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
        buffers = {process: pack_words(state, pieces[process], size) for process in self._files}
        parity = self._peers.encode(buffers)
        self._writing = threading.Thread(
            target=self._write_all,
            args=(step, _spell(manifest, self._run), pieces, buffers, parity),
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
        steps = self._found_steps(pieces)
        why = ""
        for step in sorted((step for step in steps if step >= at_least), reverse=True):
            holders = steps[step]
            try:
                lost = only_lost(holders.has)
                if holders.is_same:
                    holder = holders.has.index(True)
                    state = self._read(step, target, pieces, size, lost, check, holder)
                else:
                    state = self._read_elsewhere(step, target, holders, lost, check)
            except (TooManyLostError, CheckpointError) as error:
                why = why or f"step {step}: {error}"
                continue
            return Restored(step, state, lost, holders.of if not holders.is_same else None)
        # The table is the same on every process; the first one logs.
        if why and 0 in self._files:
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
        steps = self._found_steps(pieces)
        holding_by_step = {step: holding.has for step, holding in steps.items() if holding.is_same}
        for step in sorted(
            holding_by_step, key=lambda step: (sum(holding_by_step[step]), step), reverse=True
        ):
            holders = [process for process, has in enumerate(holding_by_step[step]) if has]
            manifest = _manifest(self._share(step, "manifest", holders[0]))
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
            for process in self._files.keys() & set(holders):
                buffer_file = self._files[process].at(step) / "words.npy"
                shutil.copyfile(buffer_file, directory / f"{process}.npy")
        except OSError as error:
            problem = str(error)
        agree(0)  # a barrier: all files are written
        if problem is None and not all(
            (directory / f"{process}.npy").exists() for process in holders
        ):
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
        for process in self._files:
            for other_step in self._files[process].steps():
                if other_step != step:
                    self._files[process].delete(other_step)

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
        read = {
            process: nothing if process == lost else files.load(step)
            for process, files in self._files.items()
        }
        text = self._share(step, "manifest", holder)
        manifest = _manifest(text)
        if check is not None:
            check(manifest)
        buffers = {process: word for process, (word, _) in read.items()}
        if lost is not None:
            parity = {process: block for process, (_, block) in read.items()}
            rebuilt, block = self._peers.rebuild(lost, buffers, parity)
            if lost in buffers:
                buffers[lost] = rebuilt
        state = place_words([(pieces[process], buffers[process]) for process in buffers], target)
        check_fingerprints(manifest, state, f"the snapshot of step {step} in memory")
        if lost is not None and lost in buffers:  # complete for the next loss
            self._write_all(step, text, pieces, {lost: buffers[lost]}, {lost: block})
        return state

    def _read_elsewhere(
        self,
        step: int,
        target: Any,
        found_step: FoundStep,
        lost: int | None,
        check: Callable[[CheckpointManifest], None] | None,
    ) -> Any:
        """Return the state of a step of another layout, of which at most one part is lost."""
        holders = {number: at for number, at in enumerate(found_step.where) if at is not None}
        texts = {number: self._share(step, "pieces", at) for number, at in holders.items()}
        pieces = [
            read_pieces(texts[(number - 1) % found_step.of], of_next=True)
            if number == lost
            else read_pieces(texts[number], of_next=False)
            for number in range(found_step.of)
        ]
        manifest = _manifest(self._share(step, "manifest", next(iter(holders.values()))))
        if check is not None:
            check(manifest)
        check_target(manifest, target, f"the snapshot of step {step} in memory")
        size = pad_words(max(map(num_words, pieces)), found_step.of)
        nothing = np.zeros(size, np.uint32), np.zeros(size // max(found_step.of - 1, 1), np.uint32)
        read = {
            member: files.load(step) if member in holders.values() else nothing
            for member, files in self._files.items()
        }
        buffers = {member: word for member, (word, _) in read.items()}
        parts = Parts(target)
        for number in range(found_step.of):
            if number == lost:
                saved = [found_step.number_of(process) for process in range(len(self._devices))]
                parity = {member: block for member, (_, block) in read.items()}
                part, _ = self._peers.rebuild(number, buffers, parity, saved, found_step.of)
            else:
                part = self._peers.share_words(holders[number], buffers)
            parts.fill(pieces[number], part)
        state = parts.state()
        check_fingerprints(manifest, state, f"the snapshot of step {step} in memory")
        return state

    def _pieces(self, state: Any) -> tuple[Pieces, int]:
        """Return the pieces of each process, and the words that the largest needs."""
        leaves = flatten(state)
        shapes = {path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in leaves.items()}
        if self._found is None or self._found[0] != shapes:
            pieces = pieces_of(state, self._devices)
            size = pad_words(max(map(num_words, pieces)), len(pieces))
            self._found = shapes, pieces, size
        return self._found[1:]

    def _found_steps(self, pieces: Pieces) -> dict[int, FoundStep]:
        """Return where the parts of each step are."""
        whole_steps = {
            process: files.whole_steps(describe_pieces(process, pieces))
            for process, files in self._files.items()
        }
        return find_steps(self._gather_steps(whole_steps), len(pieces))

    def _gather_steps(self, whole_steps: Mapping[int, list[Held]]) -> list[list[Held]]:
        """Return the steps that each process holds."""
        mine = np.zeros((len(whole_steps), COMPARED, 1 + len(Held._fields)), np.uint32)
        for row, process in enumerate(self._files):
            for place, holding in enumerate(whole_steps[process]):
                mine[row, place] = 1, *holding
        table = gather(mine).reshape(-1, *mine.shape[1:]).tolist()
        return [[Held(*fields) for is_present, *fields in row if is_present] for row in table]

    def _share(self, step: int, name: str, holder: int) -> str:
        """Return a text of one process, on all of them."""
        mine = self._files[holder].read(step, name) if holder in self._files else b""
        return share(np.frombuffer(mine, np.uint8), bool(mine)).tobytes().decode()

    def _write_all(
        self,
        step: int,
        manifest: str,
        pieces: Pieces,
        buffers: Mapping[int, UInt32[np.ndarray, " size"]],
        parity: Mapping[int, Block],
    ) -> None:
        for process, files in self._files.items():
            if process not in buffers:
                continue
            texts = {"manifest": manifest, "pieces": describe_pieces(process, pieces)}
            problem = files.write(
                step, {"words": buffers[process], "parity": parity[process]}, texts
            )
            if problem is not None:
                self._failed.append(
                    f"the snapshot of step {step} was not kept by process {process}, the run"
                    f" goes on:"
                    f" {problem}"
                )


def _manifest(text: str) -> CheckpointManifest:
    return CheckpointManifest.from_json(json.loads(text)["manifest"], "the snapshot")


def _spell(manifest: CheckpointManifest, run: str) -> str:
    """Return the manifest as text, the same on every process."""
    return json.dumps({"run": run, "manifest": manifest.to_json()}, sort_keys=True)
