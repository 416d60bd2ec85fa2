# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a source of rows offers, whatever it reads.

A row is S + 1 tokens, a pure function of (split, index, S); the order in which rows are visited is
the loader's business. A source whose entropy is known says so: it is the lowest loss that any
model can reach, and the difference to it is the excess.

To add a source: a config class with `name` and `build(seed)` that returns an object with this
interface, its own file, and a place in the union of `jaxmoe/data/__init__.py`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from pallas_kernels.array_types import Int

Split = Literal["train", "validation"]


@runtime_checkable
class Source(Protocol):
    """Rows of tokens, random access."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is below it."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token; None where bits per byte means nothing."""
        ...

    def num_rows(self, split: Split, sequence_length: int) -> int | None:
        """Rows of S + 1 tokens in a split; None where there is no end."""
        ...

    def row(self, split: Split, index: int, sequence_length: int) -> Int[np.ndarray, " row"]:
        """Row `index` of a split: S + 1 tokens, S of them to be predicted."""
        ...

    def entropy_bits_per_token(self, sequence_length: int) -> float | None:
        """Exact mean bits per predicted token of a row; None where nobody knows."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, in values that JSON holds: kind, sizes, sha256."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Text to token ids."""
        ...

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Token ids to text."""
        ...
