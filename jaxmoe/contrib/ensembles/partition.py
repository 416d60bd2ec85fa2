# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains on one part of the documents: `--data.partition.part 3/8` is the third of eight.

The training documents are clustered (`clusters.py`), and a run reads those of one cluster; the
parts are disjoint and together everything. Runs on all parts are an ensemble:
`experiments/ensemble.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import threading
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jaxmoe.contrib.ensembles.clusters import (
    Clusters,
    assign_documents,
    document_features,
    fit_documents,
)
from jaxmoe.data.batch import DataError
from jaxmoe.data.subset import Document, DrawRow, RowNumbers, Subset, SubsetConfig
from pallas_kernels.array_types import Int

logger = logging.getLogger(__name__)

_FITTED_ROWS = 1024
_FITTED_TOKENS = 256
"""Rows of an unlimited source on which its parts are fitted, and their tokens."""
_BLOCK = 256
"""Rows of an unlimited source that are drawn at a time to find those of a part."""
_MOST_MISSES = 2**16
"""Rows of other parts in a row after which a part counts as empty."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition(Subset):
    """Part of the documents that a source trains on."""

    part: int
    """Number of the part, from 0."""
    clusters: Clusters
    """Centroids of all parts."""

    def __str__(self) -> str:
        return f"{self.part + 1}/{self.clusters.num_parts}"

    def fingerprint(self) -> dict[str, Any]:
        """Return part and sha256 of the centroids as JSON values."""
        return {"part": str(self), "centroids": self.clusters.digest()}

    @property
    def label(self) -> str:
        """Part and number of parts."""
        return f"{self.part + 1}of{self.clusters.num_parts}"

    def describe(self) -> str:
        """Return which part it is."""
        return f"part {self.part + 1} of {self.clusters.num_parts}"

    def rows(self, draw: DrawRow) -> PartRows:
        """Return the rows of the part; see the base class."""
        return PartRows(self, draw)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPartConfig(SubsetConfig):
    """One of several clusters of similar documents (c-BTM)."""

    name: ClassVar[str] = "clusters"

    part: str = "1/1"
    """Part, from 1, and number of parts, such as 3/8: the third of eight clusters of similar
    documents."""

    def __post_init__(self):
        parse_part(self.part)

    @property
    def number(self) -> int:
        """Number of the part, from 0."""
        return parse_part(self.part)[0]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return parse_part(self.part)[1]

    def of_documents(
        self, document: Document, num_documents: int, *, file: pathlib.Path | None = None
    ) -> tuple[Partition, Int[np.ndarray, " members"]]:
        """Return the part, and its documents; centroids and parts are cached beside the file."""
        if file is not None:
            file = file.with_name(f"{file.name}-{self.num_parts}.npz")
        cached = _read(file, num_documents, self.num_parts)
        if cached is None:
            clusters = fit_documents(document, num_documents, self.num_parts)
            parts = assign_documents(clusters, document, num_documents)
            _write(file, clusters, parts)
        else:
            clusters, parts = cached
        return Partition(part=self.number, clusters=clusters), np.flatnonzero(parts == self.number)

    def of_rows(self, draw: DrawRow) -> Partition:
        """Return the part of an unlimited source, fitted on its first rows."""
        rows = [draw(number, _FITTED_TOKENS) for number in range(_FITTED_ROWS)]
        clusters = fit_documents(rows.__getitem__, len(rows), self.num_parts)
        return Partition(part=self.number, clusters=clusters)


def parse_part(text: str) -> tuple[int, int]:
    """Return the part, from 0, and the number of parts of `3/8`.

    Raises:
        ValueError: The text has another form, or there is no such part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ValueError(
            f"data.partition.part={text!r} must be PART/PARTS: 3/8 is the third of eight parts"
        )
    part = int(match[1])
    num_parts = int(match[2])
    if num_parts < 1:
        raise ValueError(
            f"data.partition.part={text} has no parts: 3/8 is the third of eight parts"
        )
    if not 1 <= part <= num_parts:
        raise ValueError(
            f"data.partition.part={text}: there is no part {part} of {num_parts}: choose from"
            f" 1/{num_parts} to {num_parts}/{num_parts}"
        )
    return part - 1, num_parts


class PartRows(RowNumbers):
    """Numbers of the rows of an unlimited source that belong to one part, in order.

    The n-th is found by drawing all rows before it, once: a run that resumes draws the rows of all
    parts up to its step again.

    Args:
        partition: Part of the rows.
        draw: Function from row number and S to the tokens of a row.
    """

    def __init__(self, partition: Partition, draw: DrawRow):
        self._partition = partition
        self._draw = draw
        self._found: dict[int, list[int]] = {}
        self._drawn: dict[int, int] = {}
        self._lock = threading.Lock()

    def number(self, index: int, sequence_length: int) -> int:
        """Return the number of row `index` of the part.

        Args:
            index: Row of the part, from 0.
            sequence_length: S; the part of a row depends on its tokens.

        Raises:
            DataError: The part has no more rows.
        """
        with self._lock:
            numbers = self._found.setdefault(sequence_length, [])
            while len(numbers) <= index:
                numbers += self._next_block(sequence_length, numbers[-1] if numbers else 0)
            return numbers[index]

    def _next_block(self, sequence_length: int, latest: int) -> Sequence[int]:
        """Return the members among the next rows."""
        first = self._drawn.get(sequence_length, 0)
        if first - latest > _MOST_MISSES:
            raise DataError(
                f"data.partition.part={self._partition}: none of {_MOST_MISSES} rows of"
                f" sequence_length={sequence_length} belongs to this part: ask for fewer parts, or"
                " longer rows"
            )
        rows = range(first, first + _BLOCK)
        features = np.stack([document_features(self._draw(row, sequence_length)) for row in rows])
        parts = self._partition.clusters.nearest(features)
        self._drawn[sequence_length] = rows.stop
        return (first + np.flatnonzero(parts == self._partition.part)).tolist()


def _read(
    file: pathlib.Path | None, num_documents: int, num_parts: int
) -> tuple[Clusters, np.ndarray] | None:
    """Return cached centroids and parts, if they are of this size."""
    if file is None or not file.exists():
        return None
    try:
        clusters = Clusters.read(file)
        parts = np.load(_parts_file(file))
    except (DataError, OSError, ValueError, EOFError):
        return None
    if clusters.num_parts != num_parts or parts.shape != (num_documents,):
        return None
    return clusters, parts


def _write(file: pathlib.Path | None, clusters: Clusters, parts: np.ndarray) -> None:
    if file is None:
        return
    new = file.with_suffix(f".{uuid.uuid4().hex}.npy")
    try:
        for target, write in (
            (_parts_file(file), lambda: np.save(new, parts)),
            (file, lambda: new.write_bytes(clusters.to_bytes())),  # last: then both are there
        ):
            write()
            os.replace(new, target)
    except OSError as error:  # a read-only cache or a full disk: computed again next time
        logger.warning("%s is not cached (%s)", file, error.strerror)
        new.unlink(missing_ok=True)


def _parts_file(file: pathlib.Path) -> pathlib.Path:
    """Return the file of the parts beside that of the centroids."""
    return file.with_suffix(".parts.npy")
