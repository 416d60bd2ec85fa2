# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a source of rows offers, whatever it reads.

A row is S + 1 tokens, a pure function of (split, epoch, index, S); the order in which rows are
visited is the loader's business. A source that packs several documents into a row tells them apart
by segment ids; how its rows are composed may change from epoch to epoch, how many there are may
not, so that a step finds its epoch by a division. A source whose entropy is known says so: it is
the lowest loss that any model can reach, and the difference to it is the excess.

To add a source: a config class with `name` and `build(seed)` that returns an object with this
interface, its own file, and a place in the union of `jaxmoe/data/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from jaxmoe.data.tokenizer import TokenizerConfig
from pallas_kernels.array_types import Float, Int, Shaped

Split = Literal["train", "validation"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """S + 1 tokens, S of them to be predicted."""

    tokens: Int[np.ndarray, " row"]
    segment_ids: Int[np.ndarray, " row"] | None = None
    """0 for padding, otherwise the document within the row, from 1. None: one document."""
    loss_weights: Float[np.ndarray, " row"] | None = None
    """Weight of the prediction of each token, at least 0; the first token of the row is never
    predicted. None: 1 everywhere."""


class SourceKind:
    """Properties of a data config that do not need the source to be built."""

    __slots__ = ()

    tokenizer: TokenizerConfig | None = None
    """Config of the tokenizer; None where rows are not made from text."""
    takes_tokenizer: ClassVar[bool] = False
    """Whether `tokenizer` is a field of the config, which may hold any."""


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

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Row `index` of a split in an epoch (validation has only epoch 0)."""
        ...

    def entropy_bits_per_token(self, sequence_length: int) -> float | None:
        """Exact mean bits per predicted token of a row; None where nobody knows."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, in values that JSON holds: kind, sizes, sha256."""
        ...

    def describe(self, sequence_length: int) -> str:
        """The data in one line, for people."""
        ...

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """All of a split as bytes; None where it is not text, or too much to count n-grams in."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Text to token ids."""
        ...

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Token ids to text."""
        ...
