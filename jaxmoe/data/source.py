# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a source of rows.

A row is S + 1 tokens, a pure function of (split, epoch, index, S); the loader orders the rows. A
source that packs several documents into a row separates them by segment ids. The composition of
rows may change between epochs, their number may not, so that a division gives the epoch of a step.
The entropy of a source, where known, is the lowest loss that any model can reach.

To add a source: a file with a config class (a `SourceKind` with `name` and `build(seed)`) and a
class with the interface `Source`; its row under `data` in `jaxmoe/catalog/runs.py`;
`tests/test_architecture.py` (its name).
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from jaxmoe.data.tokenizer import TokenizerConfig
from pallas_kernels.array_types import Float, Int, Shaped

Split = Literal["train", "validation"]
TemplateName = Literal["chatml", "plain", "tokenizer"]
"""How conversations are written, see `jaxmoe.data.chat.template_of`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """S + 1 tokens, of which all but the first are predicted."""

    tokens: Int[np.ndarray, " row"]
    segment_ids: Int[np.ndarray, " row"] | None = None
    """0 for padding, otherwise the document within the row, from 1. None: one document."""
    loss_weights: Float[np.ndarray, " row"] | None = None
    """Weight of the prediction of each token, at least 0; the first token of the row is never
    predicted. None: 1 everywhere."""
    task: int | None = None
    """Number of the part of a mixture that the row is from, where it is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SourceTraits:
    """Properties of a source that are known before it is built."""

    has_rows: bool = True
    """There is data to train and evaluate on."""
    has_loss_weights: bool = False
    """Parts of rows are not predicted, although they are no padding."""
    packs_levels: bool = False
    """The documents of a step are packed by level; see `jaxmoe.contrib.levels`."""
    task_names: tuple[str, ...] = ()
    """Names of the parts of a mixture, whose numbers are tasks; empty for other data."""
    template: TemplateName | None = None
    """How the data writes conversations; None without any."""


class SourceKind(abc.ABC):
    """Base class of data configs: how to build the source, and what is known without."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    tokenizer: TokenizerConfig | None = None
    """Config of the tokenizer; None where rows are not made from text."""
    takes_tokenizer: ClassVar[bool] = False
    """Whether `tokenizer` is a field of the config, which may hold any."""
    is_implied: ClassVar[bool] = True
    """Whether flags that several sources have may choose it without its name."""

    @abc.abstractmethod
    def build(self, seed: int = 0) -> Source:
        """Return the source of rows.

        Args:
            seed: Seed of the order of rows.
        """

    @property
    def traits(self) -> SourceTraits:
        """Properties that the rest of the library depends on."""
        return SourceTraits()

    def for_evaluation(self) -> Any:
        """Return the config that holds out all of its data, where it can; else itself."""
        return self

    def with_tokenizer(self, path: pathlib.Path) -> Any:
        """Return the config with a copy of its tokenizer.json: itself, where it reads none.

        Args:
            path: The copy.
        """
        del path
        return self


@runtime_checkable
class Source(Protocol):
    """Rows of tokens, random access."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, greater than every id."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token; None if tokens are not text."""
        ...

    def num_rows(self, split: Split, sequence_length: int) -> int | None:
        """Return the number of rows of S + 1 tokens in a split; None if unlimited."""
        ...

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Return row `index` of a split in an epoch (validation has only epoch 0)."""
        ...

    def entropy_bits_per_token(self, sequence_length: int) -> float | None:
        """Return the exact mean bits per predicted token of a row; None if unknown."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the data as JSON values: kind, sizes, sha256."""
        ...

    def describe(self, sequence_length: int) -> str:
        """Return a description in one line."""
        ...

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """Return a split as bytes; None if it is not text or too large to count n-grams."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of token ids."""
        ...


def token_bytes(source: Any, token: int, *, is_first: bool = False) -> bytes:
    """Return the bytes that a token adds to a text, in UTF-8.

    Args:
        source: A source or a tokenizer; one without a method `token_bytes` decodes the token alone.
        token: Its id; an id without text, such as the separator, has none.
        is_first: Whether no text precedes it: some tokenizers leave out a space there.
    """
    if (source_bytes := getattr(source, "token_bytes", None)) is not None:
        return source_bytes(token, is_first=is_first)
    return source.decode(np.asarray([token], np.int32)).encode()
