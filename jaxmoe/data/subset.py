# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Subset`: a part of the training documents, which a source reads in place of all.

    of_documents(document, number)       a subset of so many documents, and its members
    of_rows(draw), then rows(draw)       a subset of an unlimited source, whose rows are documents

Held-out documents are never left out, so that runs on different parts are evaluated on the same
text. A subset depends on the documents alone, not on `training.seed`. Its fingerprint is part of
that of the source.

`partition` is a field of the configs whose sources know single documents. A source that wraps
another would see rows, in which documents are packed side by side or joined end to end.

To let another source read a subset: its config inherits `PartitionedConfig`, its `build` asks
its `partition`, and the source has that attribute as well. To add a kind of subset: a config
derived from `SubsetConfig`, and its row under `subset` in `jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.source import SourceKind
from pallas_kernels.array_types import Int, Shaped

Document = Callable[[int], Shaped[np.ndarray, " S"]]
"""Function from the number of a document to its tokens."""
DrawRow = Callable[[int, int], np.ndarray]
"""Function from row number and S to the tokens of a row of an unlimited source."""


class RowNumbers(abc.ABC):
    """Numbers of the rows of an unlimited source that belong to a subset, in order."""

    @abc.abstractmethod
    def number(self, index: int, sequence_length: int) -> int:
        """Return the number of row `index` of the subset.

        Args:
            index: Row of the subset, from 0.
            sequence_length: S; whether a row belongs to it depends on its tokens.

        Raises:
            DataError: The subset has no more rows.
        """


class Subset(abc.ABC):
    """Subset of certain documents."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Name in those of files, the same for the same subset of the same documents."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the subset as JSON values."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return which subset it is, in a few words."""

    @abc.abstractmethod
    def rows(self, draw: DrawRow) -> RowNumbers:
        """Return the rows of an unlimited source that belong to the subset.

        Args:
            draw: Function from row number and S to the tokens of a row.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SubsetConfig(abc.ABC):
    """Base class of the kind `subset`: which documents a source reads."""

    name: ClassVar[str]
    """Name in the catalogue."""

    @abc.abstractmethod
    def of_documents(
        self, document: Document, num_documents: int, *, file: pathlib.Path | None = None
    ) -> tuple[Subset, Int[np.ndarray, " members"]]:
        """Return a subset of documents, and the numbers of those in it.

        Args:
            document: Tokens of each training document.
            num_documents: Number of training documents.
            file: Beginning of the path of files that may keep the result; none are kept when None.

        Raises:
            DataError: There are too few documents.
        """

    @abc.abstractmethod
    def of_rows(self, draw: DrawRow) -> Subset:
        """Return a subset of an unlimited source, whose rows are documents.

        Args:
            draw: Function from row number and S to the tokens of a row, the same for every seed.

        Raises:
            DataError: There are too few different rows.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartitionedConfig(SourceKind):
    """Field of all sources that can read a part of their documents."""

    partition: SubsetConfig | None = None
    """Part of the training documents to train on; None for all of them. Held-out documents stay
    whole."""
