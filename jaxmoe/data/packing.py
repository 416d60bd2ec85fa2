# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packs documents of any length into rows of S + 1 tokens.

`best_fit`: documents are cut into pieces of at most S + 1 tokens (`pieces.py`). They are packed
longest first, each into the row with the least free space that fits it, or a new row (best-fit
decreasing; Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830, section
3). A row holds only whole pieces; the rest is padding. The lengths in a row depend on the lengths
of the pieces alone, so that rows are packed once for all epochs; documents of equal length swap
places in each epoch.

`concatenate`: the documents of an epoch in random order, end to end (two adjacent separators become
one), cut every S tokens. There is no padding and no segments, and attention crosses documents; the
last tokens of an epoch, fewer than S, are left out.

`levels`: the rows of `best_fit`, whose documents the loader packs again for each step
(`jaxmoe/contrib/levels`); held-out rows stay as they are.

Documents may have loss weights (`data:chat`). Of those, pieces without a trained token are left
out, so that every row has one, and `long` says what becomes of documents of several pieces.

The loader orders the rows. The held-out split, which is not shuffled, is permuted here by a
constant seed, so that its first batches resemble the others.

To add a packing: `jaxmoe/data/packing.py` (a class with `num_rows`, `row` and `efficiency`, and its
name in `Packing`), `jaxmoe/data/packed.py` (its construction).
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import uuid
from typing import Literal

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.order import frozen_generator
from jaxmoe.data.pieces import Long, Pieces
from jaxmoe.data.source import Row
from jaxmoe.data.store import DocumentSet
from pallas_kernels.array_types import Int

logger = logging.getLogger(__name__)

Packing = Literal["best_fit", "concatenate", "levels"]
CONCATENATED_WEIGHTS = (
    "data.packing=concatenate joins documents end to end: an answer would see other conversations, "
    "and a row may hold no answer. Choose best_fit or levels"
)

_KEPT_EPOCHS = 3
"""Number of epochs in memory: prefetched batches may belong to the next epoch."""


class BestFit:
    """Documents packed into rows with segments.

    Args:
        documents: Documents of one split.
        sequence_length: S.
        seed: Seed of the order in each epoch; None for the held-out split, which has one epoch.
        file: File that caches the packing of the lengths, if any.
        long: Pieces to keep of documents that do not fit into a row.
    """

    def __init__(
        self,
        documents: DocumentSet,
        *,
        sequence_length: int,
        seed: int | None,
        file: pathlib.Path | None,
        long: Long = "cut",
    ):
        self._documents = documents
        self._length = sequence_length
        self._seed = seed
        self._pieces = pieces = Pieces(documents, sequence_length, long)
        self.is_long = documents.lengths > sequence_length + 1
        self.num_left_out = pieces.num_left_out
        """Pieces that are in no row."""
        self.num_unused = pieces.num_unused
        """Documents of which no piece is in a row."""
        # The first rows hold a whole piece each. Row num_full + r holds the short pieces
        # order[borders[r]:borders[r + 1]], counted in order of length.
        self._num_full = pieces.count - len(pieces.short)
        slots = _read(file, len(pieces.short))
        if slots is None:
            slots = best_fit(-np.sort(-pieces.short_lengths), sequence_length + 1)
            _write(file, slots)
        num_shared = int(slots.max(initial=-1)) + 1
        self.num_rows = self._num_full + num_shared
        self._order = np.argsort(slots, kind="stable").astype(pieces.dtype)
        self._borders = np.searchsorted(slots[self._order], np.arange(num_shared + 1))
        self._rows = None if seed is not None else frozen_generator(0).permutation(self.num_rows)
        self._filled = functools.lru_cache(maxsize=_KEPT_EPOCHS)(self._fill)

    def row(self, index: int, epoch: int) -> Row:
        """Return a row: its pieces from the left, then padding."""
        capacity = self._length + 1
        tokens = np.zeros(capacity, np.int32)
        segment_ids = np.zeros(capacity, np.int32)
        has_weights = self._documents.weights is not None
        loss_weights = np.zeros(capacity, np.float32) if has_weights else None
        place = 0
        number = index if self._rows is None else int(self._rows[index])
        chosen = np.array([number])
        if number >= self._num_full:
            shared = number - self._num_full
            chosen = self._order[self._borders[shared] : self._borders[shared + 1]]
            chosen = self._num_full + chosen.astype(np.int64)
        for segment, piece in enumerate(self._filled(epoch)[chosen].tolist(), start=1):
            document, begin, length = self._pieces[piece]
            end = place + length
            tokens[place:end] = self._documents.document(document)[begin : begin + length]
            weights = self._documents.document_weights(document)
            if loss_weights is not None and weights is not None:
                loss_weights[place:end] = weights[begin : begin + length]
            segment_ids[place:end] = segment
            place = end
        return Row(tokens, segment_ids, loss_weights)

    def efficiency(self) -> float:
        """Return the share of predictions that are not padding."""
        return self._pieces.num_predictions / max(1, self.num_rows * self._length)

    def _fill(self, epoch: int) -> Int[np.ndarray, " pieces"]:
        """Return the pieces in order of length; equal lengths in random order of the epoch."""
        pieces = self._pieces
        numbers = np.arange(pieces.count, dtype=pieces.dtype)
        if self._seed is not None:
            frozen_generator(self._seed, epoch).shuffle(numbers)
        is_short = np.zeros(pieces.count, bool)
        is_short[pieces.short] = True
        is_short = is_short[numbers]
        short = numbers[is_short]
        lengths = pieces.short_lengths[np.searchsorted(pieces.short, short)]
        numbers[: self._num_full] = numbers[~is_short]
        numbers[self._num_full :] = short[np.argsort(-lengths, kind="stable")]
        return numbers


class Concatenated:
    """Documents end to end, cut into rows without segments.

    Args:
        documents: Documents of one split.
        sequence_length: S.
        seed: Seed of the order in each epoch; None for the held-out split, in its own order.
        separator: Id that adjacent documents share; None: all ids are kept.

    Raises:
        DataError: The documents have loss weights, of which a row may have none above 0.
    """

    def __init__(
        self,
        documents: DocumentSet,
        *,
        sequence_length: int,
        seed: int | None,
        separator: int | None,
    ):
        self._documents = documents
        self._length = sequence_length
        self._seed = seed
        if documents.weights is not None:
            raise DataError(CONCATENATED_WEIGHTS)
        first = documents.tokens[documents.starts] if len(documents.starts) else np.zeros(0)
        is_shared = np.zeros(len(first), bool) if separator is None else first == separator
        self._skipped = (is_shared & (documents.lengths > 1)).astype(np.int64)
        self._kept = documents.lengths - self._skipped
        self.num_rows = max(0, (int(self._kept.sum()) - 1) // sequence_length)
        self._rows = np.arange(self.num_rows)
        if seed is None:
            self._rows = frozen_generator(0).permutation(self.num_rows)
        self._ordered = functools.lru_cache(maxsize=_KEPT_EPOCHS)(self._order)

    def row(self, index: int, epoch: int) -> Row:
        """Return a window of S + 1 tokens."""
        order, ends = self._ordered(epoch)
        begin = int(self._rows[index]) * self._length
        end = begin + self._length + 1
        parts = []
        place = int(np.searchsorted(ends, begin, side="right"))
        while begin < end:
            number = int(order[place])
            start = begin - int(ends[place] - self._kept[number]) + int(self._skipped[number])
            part = self._documents.document(number)[start : start + end - begin]
            parts.append(part)
            begin += len(part)
            place += 1
        return Row(np.concatenate(parts).astype(np.int32))

    def efficiency(self) -> float:
        """Return 1: there is no padding."""
        return 1.0

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in the order of the epoch, and the end of each."""
        order = np.arange(len(self._kept))
        if self._seed is not None:
            order = frozen_generator(self._seed, epoch).permutation(len(self._kept))
        return order, np.cumsum(self._kept[order])


def best_fit(lengths: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """Return the row of each piece, packed in the given order.

    Bit i of one integer says that a row with i free tokens exists, so that the best fit is the
    lowest bit from a piece's length on: about a microsecond per piece for any number of rows.

    Args:
        lengths: Tokens of each piece, from 1 to the capacity, in descending order.
        capacity: Tokens of a row.
    """
    num_full = int(np.searchsorted(-lengths, -capacity, side="right"))  # each fills a row
    rows = list(range(num_full))
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    free_sizes = 0
    num_rows = num_full
    for length in lengths[num_full:].tolist():
        fitting = free_sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes ^= 1 << free
        else:
            free = capacity
            row = num_rows
            num_rows += 1
        rows.append(row)
        free -= length
        open_rows[free].append(row)
        free_sizes |= 1 << free
    return np.array(rows, np.int64)


def _read(file: pathlib.Path | None, num_pieces: int) -> np.ndarray | None:
    """Return the cached packing, if there is one of this size."""
    try:
        slots = None if file is None else np.load(file)
    except (OSError, ValueError, EOFError):
        return None
    return slots if slots is not None and slots.shape == (num_pieces,) else None


def _write(file: pathlib.Path | None, slots: np.ndarray) -> None:
    if file is None:
        return
    new = file.with_suffix(f".{uuid.uuid4().hex}.npy")
    try:
        np.save(new, slots)
        os.replace(new, file)
    except OSError as error:  # a read-only cache or a full disk: packed again next time
        logger.warning("%s is not cached (%s)", file, error.strerror)
        new.unlink(missing_ok=True)
