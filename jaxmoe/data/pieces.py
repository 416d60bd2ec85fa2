# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts documents into pieces that a row holds, and finds a piece without a table of all of them.

A document of n tokens has n - 1 predictions. It is cut into pieces of S predictions (S + 1 tokens:
the last token of a piece is the first of the next, so that every token but the document's first is
predicted exactly once); the last piece has what remains. All others fill a row, so that only the
last pieces, at most one of each document, are kept as arrays: memory grows with the number of
documents, and not with their lengths.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmoe.data.store import DocumentSet
from pallas_kernels.array_types import Int

Long = Literal["cut", "truncate", "leave_out"]
"""Pieces to keep of a document of several: all, the first, or none."""


class DocumentPiece(NamedTuple):
    """Part of a document."""

    document: int
    """Number of the document."""
    start: int
    """Its first token, within the document."""
    length: int
    """Its tokens, at most S + 1."""


class Pieces:
    """Pieces of documents, in the order of the documents.

    Args:
        documents: Documents of one split; of those with weights, pieces without a trained token
            are left out.
        sequence_length: S.
        long: Pieces to keep of documents with weights that do not fit into a row.
    """

    def __init__(self, documents: DocumentSet, sequence_length: int, long: Long):
        self._length = sequence_length
        self._predictions = np.maximum(documents.lengths.astype(np.int64) - 1, 0)
        counts = -(-self._predictions // sequence_length)
        self._ends = np.cumsum(counts)
        total = int(counts.sum())
        self._numbers: Int[np.ndarray, " pieces"] | None = None
        self.num_left_out = 0
        """Pieces that are in no row."""
        self.num_unused = 0
        """Documents of which no piece is in a row."""
        last = self._ends[counts > 0] - 1
        remainders = self._predictions[counts > 0] % sequence_length
        short, lengths = last[remainders > 0], remainders[remainders > 0] + 1
        if documents.weights is not None:
            self._numbers, self.num_unused = _trained_pieces(documents, sequence_length, long)
            self.num_left_out = total - len(self._numbers)
            is_kept = np.isin(short, self._numbers, assume_unique=True)
            short, lengths = np.searchsorted(self._numbers, short[is_kept]), lengths[is_kept]
            total = len(self._numbers)
        self.count = total
        """Pieces that are kept; their numbers are 0 to `count` - 1."""
        self.short = short.astype(self.dtype)
        """Numbers of the pieces that do not fill a row, ascending."""
        self.short_lengths = lengths.astype(np.int32)
        """Tokens of each of them."""

    @property
    def dtype(self) -> Any:
        """Dtype of numbers of pieces."""
        return np.int32 if self.count < 2**31 else np.int64

    @property
    def num_predictions(self) -> int:
        """Predictions of all pieces."""
        full = (self.count - len(self.short)) * self._length
        return full + int(self.short_lengths.sum()) - len(self.short_lengths)

    def __getitem__(self, number: int) -> DocumentPiece:
        """Return the piece of a number."""
        if self._numbers is not None:
            number = int(self._numbers[number])
        document = int(np.searchsorted(self._ends, number, side="right"))
        of_document = int(self._predictions[document])
        before = int(self._ends[document]) - -(-of_document // self._length)
        start = (number - before) * self._length
        return DocumentPiece(document, start, min(of_document - start, self._length) + 1)


def cut(
    lengths: Int[np.ndarray, " documents"], sequence_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pieces as arrays: of documents with weights, and what `Pieces` is tested against.

    Args:
        lengths: Tokens of each document; a document of fewer than 2 has no piece.
        sequence_length: S.

    Returns:
        Document, number within the document, and tokens of each piece.
    """
    predictions = np.maximum(lengths.astype(np.int64) - 1, 0)
    counts = -(-predictions // sequence_length)
    owner = np.repeat(np.arange(len(lengths)), counts)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    remaining = predictions[owner] - piece * sequence_length
    return owner, piece, np.minimum(remaining, sequence_length) + 1


def _trained_pieces(
    documents: DocumentSet, sequence_length: int, long: Long
) -> tuple[Int[np.ndarray, " pieces"], int]:
    """Return the numbers of the pieces to pack, and how many documents have none of their own.

    Args:
        documents: Documents with weights.
        sequence_length: S.
        long: Pieces to keep of documents that do not fit into a row.
    """
    owner, piece, lengths = cut(documents.lengths, sequence_length)
    is_kept = np.ones(len(owner), bool)
    if long == "truncate":
        is_kept = piece == 0
    elif long == "leave_out":
        is_kept = documents.lengths[owner] <= sequence_length + 1
    predicted = documents.starts[owner] + piece * sequence_length + 1
    is_kept &= documents.trained_in(predicted, lengths - 1) > 0
    return np.flatnonzero(is_kept), len(np.unique(owner)) - len(np.unique(owner[is_kept]))
