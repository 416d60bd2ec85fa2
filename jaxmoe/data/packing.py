# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packing: documents of any length into rows of S + 1 tokens, nothing lost.

`best_fit`: a document of n tokens has n - 1 predictions. It is cut into pieces of S predictions
(S + 1 tokens: the last token of a piece is the first of the next, so that every token but the
document's first is predicted exactly once), and the pieces are packed longest first, each into the
row with the least room that takes it, or a new one (best-fit decreasing; Ding et al., "Fewer
truncations improve language modeling", arXiv 2404.10830, section 3). A row holds only whole pieces;
what stays free is padding. Which lengths share a row depends on the lengths alone, so that the
number of rows, and the work of packing, is that of one epoch; which documents of equal length fill
the places is drawn anew in each.

`concatenate`: the documents in an order drawn anew in each epoch, end to end (two separators that
meet are one), cut every S tokens. No padding and no segments, attention runs across documents; the
last tokens of an epoch, fewer than S, are not seen in it.

The order of rows is the loader's; that of the held-out split, which nobody shuffles, is mixed here
by a constant, so that its first batches are like the others.

To add a packing: a class with `num_rows`, `row` and `efficiency`, and its name in `Packing`.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import uuid
from typing import Literal

import numpy as np

from jaxmoe.data.documents import DocumentSet
from jaxmoe.data.source import Row
from pallas_kernels.array_types import Int

logger = logging.getLogger(__name__)

Packing = Literal["best_fit", "concatenate"]

_KEPT_EPOCHS = 3
"""Plans in memory: batches made ahead may already be those of the next epoch."""


class BestFit:
    """Documents packed into rows with segments.

    Args:
        documents: Of one split.
        sequence_length: S.
        seed: Of the order in each epoch; None: the held-out split, which has one epoch.
        file: Where the packing of the lengths is kept; None: it is not.
    """

    def __init__(
        self,
        documents: DocumentSet,
        *,
        sequence_length: int,
        seed: int | None,
        file: pathlib.Path | None,
    ):
        self._documents, self._length, self._seed = documents, sequence_length, seed
        self._owner, self._piece, self._piece_lengths = cut(documents.lengths, sequence_length)
        by_length = np.argsort(-self._piece_lengths, kind="stable")
        slots = _read(file, len(by_length))
        if slots is None:
            slots = best_fit(self._piece_lengths[by_length], sequence_length + 1)
            _write(file, slots)
        self.num_rows = int(slots.max(initial=-1)) + 1
        # The places of row r, of those in order of length: order[borders[r]:borders[r + 1]].
        self._order = np.argsort(slots, kind="stable")
        self._borders = np.searchsorted(slots[self._order], np.arange(self.num_rows + 1))
        self._rows = np.arange(self.num_rows)
        if seed is None:
            self._rows = _frozen_generator(0).permutation(self.num_rows)
        self._filled = functools.lru_cache(maxsize=_KEPT_EPOCHS)(self._fill)

    def row(self, index: int, epoch: int) -> Row:
        """One row: its pieces from the left, then padding."""
        capacity = self._length + 1
        tokens = np.zeros(capacity, np.int32)
        segment_ids = np.zeros(capacity, np.int32)
        place = 0
        number = self._rows[index]
        chosen = self._order[self._borders[number] : self._borders[number + 1]]
        for segment, piece in enumerate(self._filled(epoch)[chosen].tolist(), start=1):
            begin = int(self._piece[piece]) * self._length
            end = place + int(self._piece_lengths[piece])
            document = self._documents.document(int(self._owner[piece]))
            tokens[place:end] = document[begin : begin + end - place]
            segment_ids[place:end] = segment
            place = end
        return Row(tokens, segment_ids)

    def efficiency(self) -> float:
        """Predictions that count, of all that rows of this length could hold."""
        predictions = self._piece_lengths.sum() - len(self._piece_lengths)
        return float(predictions / max(1, self.num_rows * self._length))

    def _fill(self, epoch: int) -> Int[np.ndarray, " pieces"]:
        """The pieces in order of length; equal lengths in an order of the epoch."""
        if self._seed is None:
            return np.argsort(-self._piece_lengths, kind="stable")
        drawn = _frozen_generator(self._seed, epoch).permutation(len(self._piece_lengths))
        return drawn[np.argsort(-self._piece_lengths[drawn], kind="stable")]


class Concatenated:
    """Documents end to end, cut into rows without segments.

    Args:
        documents: Of one split.
        sequence_length: S.
        seed: Of the order in each epoch; None: the held-out split, in its own order.
        separator: The id that neighbours share; None: none is left out.
    """

    def __init__(
        self,
        documents: DocumentSet,
        *,
        sequence_length: int,
        seed: int | None,
        separator: int | None,
    ):
        self._documents, self._length, self._seed = documents, sequence_length, seed
        first = documents.tokens[documents.starts] if len(documents.starts) else np.zeros(0)
        is_shared = np.zeros(len(first), bool) if separator is None else first == separator
        self._skipped = (is_shared & (documents.lengths > 1)).astype(np.int64)
        self._kept = documents.lengths - self._skipped
        self.num_rows = max(0, (int(self._kept.sum()) - 1) // sequence_length)
        self._rows = np.arange(self.num_rows)
        if seed is None:
            self._rows = _frozen_generator(0).permutation(self.num_rows)
        self._ordered = functools.lru_cache(maxsize=_KEPT_EPOCHS)(self._order)

    def row(self, index: int, epoch: int) -> Row:
        """One window of S + 1 tokens."""
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
        """Nothing is padded."""
        return 1.0

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in the order of the epoch, and where each ends."""
        order = np.arange(len(self._kept))
        if self._seed is not None:
            order = _frozen_generator(self._seed, epoch).permutation(len(self._kept))
        return order, np.cumsum(self._kept[order])


def cut(
    lengths: Int[np.ndarray, " documents"], sequence_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most S + 1 tokens that overlap by one.

    Args:
        lengths: Tokens of each document; one of fewer than 2 has nothing to predict, and no piece.
        sequence_length: S.

    Returns:
        For each piece: its document, its number within that, its tokens.
    """
    predictions = np.maximum(lengths.astype(np.int64) - 1, 0)
    counts = -(-predictions // sequence_length)
    owner = np.repeat(np.arange(len(lengths)), counts)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rest = predictions[owner] - piece * sequence_length
    return owner, piece, np.minimum(rest, sequence_length) + 1


def best_fit(lengths: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """The row of each piece, packed in the order given.

    The rooms that rows have left are bits of one integer: the least room that takes a piece is the
    lowest bit from its length on. About a microsecond for each piece, however many rows are open.

    Args:
        lengths: Tokens of each piece, from 1 to the capacity, none longer than the one before.
        capacity: Tokens of a row.
    """
    num_full = int(np.searchsorted(-lengths, -capacity, side="right"))  # each a row of its own
    rows = list(range(num_full))
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, num_rows = 0, num_full
    for length in lengths[num_full:].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows.append(row)
        room -= length
        open_rows[room].append(row)
        rooms |= 1 << room
    return np.array(rows, np.int64)


def _read(file: pathlib.Path | None, num_pieces: int) -> np.ndarray | None:
    """The packing that was kept, if it is whole."""
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
    except OSError as error:  # a cache that others may only read, or a full disk: made again then
        logger.warning("%s is not kept (%s)", file, error.strerror)
        new.unlink(missing_ok=True)


def _frozen_generator(*key: int) -> np.random.RandomState:
    """A generator whose stream depends on the key alone, and on no version of numpy."""
    return np.random.RandomState(np.random.Philox(np.random.SeedSequence(key)))
