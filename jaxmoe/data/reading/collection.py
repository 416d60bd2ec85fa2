# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a collection of documents, such as files or a data set.

To add a collection: `jaxmoe/data/reading/collection.py` (the interface to implement),
`jaxmoe/data/packed.py` (`build_sources`, which its config's `build` calls).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from jaxmoe.data.reading.records import BadRecord, Record
from jaxmoe.data.tokenizer import Tokenizer


@runtime_checkable
class Collection(Protocol):
    """Source of documents; its `str` is what the user wrote."""

    @property
    def has_weights(self) -> bool:
        """Whether every record has loss weights, and is held out whole if at all."""
        ...

    def identity(self) -> Any:
        """Return the key of the cache, cheap to compute, as JSON values."""
        ...

    def content(self) -> dict[str, Any]:
        """Return names, sizes and sha256 for the fingerprint."""
        ...

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """Yield the documents in order; the tokenizer cuts ids without borders. None: text only."""
        ...

    def warnings(self) -> list[str]:
        """Return what `records`, read to the end, found that does not stop it."""
        ...
