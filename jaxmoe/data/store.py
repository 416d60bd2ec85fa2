# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Holds planned documents: tokens, borders and loss weights, memory-mapped from the cache."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from jaxmoe.data.held_out import held_out
from jaxmoe.data.source import Split
from pallas_kernels.array_types import Int, Shaped

FORMAT = 3
"""Version of the cache's files; increased when their meaning changes. 2: weights.bin."""
WEIGHTS = "weights.bin"
"""File of the loss weights of the tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentSet:
    """Documents of one split, as ranges of one array of tokens."""

    tokens: Shaped[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    lengths: Int[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]
    """Bytes of text of each document; -1 where unknown."""
    weights: Shaped[np.ndarray, " tokens"] | None = None
    """Loss weight of each token, in a document of which it is not the first; None: 1."""

    def document(self, number: int) -> Shaped[np.ndarray, " S"]:
        """Return the tokens of a document, separators included."""
        start = int(self.starts[number])
        return self.tokens[start : start + int(self.lengths[number])]

    def document_weights(self, number: int) -> Shaped[np.ndarray, " S"] | None:
        """Return the loss weights of the tokens of a document; None: 1."""
        if self.weights is None:
            return None
        start = int(self.starts[number])
        return self.weights[start : start + int(self.lengths[number])]

    def trained_tokens(self) -> int:
        """Return the number of tokens that are predicted with a weight above 0."""
        if self.weights is None:
            return int(np.maximum(self.lengths - 1, 0).sum())
        return int(self.trained_in(self.starts + 1, self.lengths - 1).sum())

    def trained_in(
        self, starts: Int[np.ndarray, " ranges"], lengths: Int[np.ndarray, " ranges"]
    ) -> Int[np.ndarray, " ranges"]:
        """Return the tokens with a weight above 0 in ranges of the tokens.

        Args:
            starts: First token of each range.
            lengths: Tokens of each range.
        """
        if self.weights is None:
            return lengths
        ranges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        counts = [np.count_nonzero(self.weights[start:end]) for start, end in ranges]
        return np.array(counts, np.int64)

    def members(self, numbers: Int[np.ndarray, " members"]) -> DocumentSet:
        """Return some of the documents."""
        return DocumentSet(
            tokens=self.tokens,
            starts=self.starts[numbers],
            lengths=self.lengths[numbers],
            sizes=self.sizes[numbers],
            weights=self.weights,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Store:
    """Result of the planning pass in the cache."""

    directory: pathlib.Path
    tokens: Shaped[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " borders"]
    digests: Shaped[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]
    facts: dict[str, Any]
    weights: Shaped[np.ndarray, " tokens"] | None = None

    def split(self, fraction: float) -> dict[Split, DocumentSet]:
        """Return the train and the validation split.

        Args:
            fraction: Share of the documents to hold out; 0: none. Documents with weights are held
                out whole.
        """
        lengths = np.diff(self.offsets)
        if fraction == 0.0:
            all_rows = self._where(np.ones(len(lengths), bool))
            return {"train": all_rows, "validation": self._where(np.zeros(len(lengths), bool))}
        is_held_out = held_out(self.digests, fraction, is_whole=self.weights is not None)
        if is_held_out is not None:
            return {"train": self._where(~is_held_out), "validation": self._where(is_held_out)}
        cut = lengths - np.ceil(lengths * fraction).astype(np.int64)
        unknown = np.full(len(lengths), -1)
        return {
            "train": DocumentSet(
                tokens=self.tokens, starts=self.offsets[:-1], lengths=cut, sizes=unknown
            ),
            "validation": DocumentSet(
                tokens=self.tokens,
                starts=self.offsets[:-1] + cut,
                lengths=lengths - cut,
                sizes=unknown,
            ),
        }

    def _where(self, mask: np.ndarray) -> DocumentSet:
        return DocumentSet(
            tokens=self.tokens,
            starts=self.offsets[:-1][mask],
            lengths=np.diff(self.offsets)[mask],
            sizes=self.sizes[mask],
            weights=self.weights,
        )


def open_store(directory: pathlib.Path) -> Store | None:
    """Return the store in a directory, None if it is missing, damaged or of another format."""
    try:
        facts = json.loads((directory / "facts.json").read_text())
        if facts["format"] != FORMAT:
            return None
        offsets, digests, sizes = (
            np.load(directory / f"{name}.npy") for name in ("offsets", "digests", "sizes")
        )
        dtype = np.dtype(facts["dtype"])
        size = (directory / "tokens.bin").stat().st_size
        if (
            size != offsets[-1] * dtype.itemsize
            or not len(digests) == len(sizes) == len(offsets) - 1
        ):
            return None
        tokens = np.memmap(directory / "tokens.bin", dtype, "r")
        weights = None
        if "trained_tokens" in facts:
            weights = np.memmap(directory / WEIGHTS, np.uint8, "r")
            if len(weights) != offsets[-1]:
                return None
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError):
        return None
    return Store(
        directory=directory,
        tokens=tokens,
        offsets=offsets,
        digests=digests,
        sizes=sizes,
        facts=facts,
        weights=weights,
    )
