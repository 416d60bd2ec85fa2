# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the parts of a damaged step whose files are as they were written.

A step is written by several processes, each with its own files. Where some are damaged or missing,
the chunks of arrays in the others are intact: their files have the checksums of the step's list.
Only such files are opened, through a directory of links, so that reading any other chunk fails.

    survey(step)     which files are whole, and which boxes of arrays are lost
    opened(survey)   reads the rest
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import bounds, checksums
from jaxmoe.checkpoint.manifest import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    read_manifest,
)
from jaxmoe.json_bounds import parse_json
from jaxmoe.optional import require
from jaxmoe.state_tree import SEPARATOR
from sharding.distributed import share

Box = tuple[tuple[int, int], ...]
"""First index and index after the last, in every dimension."""

_ERRORS = (ValueError, OSError, RuntimeError, IndexError)
"""Exceptions of TensorStore for a chunk that cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What is left of a step."""

    step: pathlib.Path
    manifest: CheckpointManifest
    files: tuple[str, ...]
    """Files that are as they were written."""
    stored: dict[str, dict[str, Any]]
    """Description of each array in the store, by path; without those that are lost altogether."""
    lost: dict[str, tuple[Box, ...]]
    """Boxes that cannot be read, by path of the array."""

    def num_lost(self, path: str) -> int:
        """Return the number of values of an array that are lost."""
        boxes = self.lost.get(path, ())
        return sum(int(np.prod([last - first for first, last in box])) for box in boxes)


def damaged_steps(directory: Any) -> list[pathlib.Path]:
    """Return the steps that were set aside, the newest first; every process must call this.

    Args:
        directory: Directory to which damaged steps are moved.
    """
    place = pathlib.Path(directory)

    def find() -> list[str]:
        names = [path.name for path in place.iterdir()] if place.is_dir() else []
        numbered = [name for name in names if name.partition("-")[0].isdecimal()]
        return sorted(numbered, key=lambda name: int(name.partition("-")[0]), reverse=True)

    return [place / name for name in _share(find)]


def survey(step: pathlib.Path) -> Survey:
    """Return what is left of a step; every process must call this.

    The first process reads all arrays once.

    Args:
        step: Directory of the step.

    Raises:
        CheckpointDamagedError: The list of files, the manifest or the store cannot be used; raised
            on all processes.
    """
    result = _share(lambda: _survey(step))
    manifest = CheckpointManifest.from_json(result["manifest"], str(step))
    lost = {path: tuple(map(_box, boxes)) for path, boxes in result["lost"].items()}
    return Survey(
        step=step,
        manifest=manifest,
        files=tuple(result["files"]),
        stored=result["stored"],
        lost=lost,
    )


def _survey(step: pathlib.Path) -> dict[str, Any]:
    lines = bounds.places(step) or bounds.texts(step)
    names = checksums.whole_files(step)
    if lines or names is None:
        raise CheckpointDamagedError(
            f"{step}: {'; '.join(lines[:5]) or f'{checksums.LIST} is missing or damaged'}"
        )
    if "manifest/metadata" not in names:
        raise CheckpointDamagedError(f"{step}: its manifest is damaged")
    manifest = read_manifest(step)
    lost = {}
    result = Survey(step=step, manifest=manifest, files=tuple(names), stored={}, lost={})
    with open_surviving(result) as survivors:
        if lines := bounds.contents(survivors.place, has_store=False):
            raise CheckpointDamagedError(f"{step}: {'; '.join(lines[:5])}")
        result.stored.update(_store(survivors.place, manifest))
        for path in manifest.arrays:
            if boxes := survivors.unreadable(path):
                lost[path] = boxes
    return {
        "manifest": manifest.to_json(),
        "files": names,
        "stored": result.stored,
        "lost": lost,
    }


def _store(place: pathlib.Path, manifest: CheckpointManifest) -> dict[str, dict[str, Any]]:
    """Return the descriptions of arrays; every process has written all of them to its own store."""
    tensorstore = require("tensorstore")
    arrays = dict[str, dict[str, Any]]()
    for base in (place / "state", *sorted((place / "state").glob("ocdbt.process_*"))):
        for path in manifest.arrays.keys() - arrays.keys():
            spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}}
            try:
                store = tensorstore.KvStore.open(spec).result()
                value = store.read(f"{_key(path)}.zarray").result().value
                if len(value) <= bounds.MAX_DESCRIPTION:
                    stored = parse_json(value.decode())
                    if not bounds.differs_in_store(stored, manifest.arrays[path]):
                        arrays[path] = stored
            except (*_ERRORS, KeyError, TypeError, AttributeError):
                continue
    return arrays


class Survivors(abc.ABC):
    """What is left of a checkpoint or a snapshot."""

    survey: Survey

    @abc.abstractmethod
    def read(self, path: str, box: Box, instead: np.ndarray) -> np.ndarray:
        """Return a part of an array.

        Args:
            path: Name of the array.
            box: The part.
            instead: Values of the part where they are lost.
        """


class SurvivingFiles(Survivors):
    """Reads what is left of a step.

    Args:
        survey: Survey of the step.
        place: Directory with the files that are whole.
    """

    def __init__(self, survey: Survey, place: pathlib.Path):
        self.survey = survey
        self.place = place
        self._stores: dict[str, Any] = {}

    def read(self, path: str, box: Box, instead: np.ndarray) -> np.ndarray:
        """Return a part of an array; see `Survivors`."""
        values = np.array(instead)
        lost = set(self.survey.lost.get(path, ()))
        for chunk in self._chunks(path, box):
            if chunk not in lost and (shared_box := overlap(box, chunk)) is not None:
                values[inside(shared_box, box)] = self._read(path, shared_box)
        return values

    def unreadable(self, path: str) -> list[Box]:
        """Return the boxes of an array that cannot be read; reads all of it."""
        full_box = tuple((0, size) for size in self.survey.manifest.arrays[path]["shape"])
        boxes = []
        for chunk in self._chunks(path, full_box):
            try:
                if path in self.survey.stored:
                    self._read(path, chunk)
                    continue
            except _ERRORS:
                pass
            boxes.append(chunk)
        return boxes

    def _chunks(self, path: str, box: Box) -> Iterator[Box]:
        """Yield the boxes of the chunks that overlap a box."""
        shape = self.survey.manifest.arrays[path]["shape"]
        sizes = self.survey.stored.get(path, {"chunks": [max(size, 1) for size in shape]})["chunks"]
        ranges = (
            [
                (at * size, min((at + 1) * size, length))
                for at in range(first // size, -(-last // size))
            ]
            for (first, last), size, length in zip(box, sizes, shape, strict=True)
        )
        yield from itertools.product(*ranges)

    def _read(self, path: str, box: Sequence[tuple[int, int]]) -> np.ndarray:
        if path not in self._stores:
            tensorstore = require("tensorstore")  # a dependency of Orbax
            base = {"driver": "file", "path": f"{self.place}/state/"}
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": base, "path": _key(path)},
                "metadata": self.survey.stored[path],
            }
            opened = tensorstore.open(spec, open=True, assume_metadata=True, read=True)
            self._stores[path] = opened.result()
        return self._stores[path][tuple(slice(*ends) for ends in box)].read().result()


@contextlib.contextmanager
def open_surviving(survey: Survey) -> Iterator[SurvivingFiles]:
    """Open what is left of a step, through a directory of links to the files that are whole.

    Args:
        survey: Survey of the step.
    """
    with tempfile.TemporaryDirectory(prefix="jaxmoe-surviving-") as name:
        place = pathlib.Path(name)
        for file in (*survey.files, *checksums.OF_THE_COMMIT):
            if (source := survey.step.absolute() / file).exists():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).symlink_to(source)
        yield SurvivingFiles(survey, place)


def overlap(box: Box, chunk: Box) -> Box | None:
    """Return the part that two boxes share; None if there is none."""
    shared_box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, chunk, strict=True))
    return shared_box if all(first < last for first, last in shared_box) else None


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the place of a part in an array that holds a box."""
    return tuple(
        slice(first - start, last - start)
        for (first, last), (start, _) in zip(part, box, strict=True)
    )


def _key(path: str) -> str:
    """Return the prefix of the keys of an array in the store."""
    return path.replace(SEPARATOR, ".") + "/"


def _box(box: Sequence[Sequence[int]]) -> Box:
    return tuple((first, last) for first, last in box)


def _share(make: Callable[[], Any]) -> Any:
    """Return JSON that the first process makes, or raise its error on all processes."""
    sent: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            sent = {"made": make()}
        except (CheckpointError, OSError) as error:
            sent = {"error": str(error)}
    text = np.frombuffer(json.dumps(sent).encode(), np.uint8)
    sent = json.loads(share(text, jax.process_index() == 0).tobytes())
    if "error" in sent:
        raise CheckpointDamagedError(sent["error"])
    return sent["made"]
