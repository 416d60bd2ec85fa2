# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fields of all sources that read documents."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

from jaxmoe.data.batch import DataError
from jaxmoe.data.documents import BadRecords
from jaxmoe.data.packing import Packing
from jaxmoe.data.source import SourceTraits
from jaxmoe.data.subset import PartitionedConfig
from jaxmoe.data.text_only import copy_config
from jaxmoe.data.tokenizer import BytesConfig, TokenizerConfig
from jaxmoe.disk import cache_directory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig(PartitionedConfig):
    """Fields of all sources that read documents."""

    takes_tokenizer: ClassVar[bool] = True

    tokenizer: TokenizerConfig = BytesConfig()
    """Tokenizer of text; model.vocab_size must be at least its vocabulary."""
    packing: Packing = "best_fit"
    """best_fit: documents side by side, attention within each. concatenate: documents end to end,
    cut at every row, attention across documents; computes faster. levels: the documents of the
    best_fit rows of a step, packed again into micro-batches by level, see jaxmoe/contrib/levels."""
    validation_fraction: float = 0.05
    """Share of documents to hold out; of the end of each, if that is less than one document."""
    on_bad_record: BadRecords = "stop"
    """stop: a bad record ends the run. skip: bad records are left out, counted and reported."""
    cache: str | None = None
    """Directory of cached tokens; $XDG_CACHE_HOME/jaxmoe/data (~/.cache/...) when None."""

    def __post_init__(self):
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} must lie between 0 and 1"
            )

    @property
    def traits(self) -> SourceTraits:
        """Properties that the rest of the library depends on."""
        return SourceTraits(packs_levels=self.packing == "levels")

    def with_tokenizer(self, path: pathlib.Path) -> Any:
        """Return the config with a copy of its tokenizer.json, if it has one."""
        return dataclasses.replace(self, tokenizer=copy_config(self.tokenizer, path))

    @property
    def cache_directory(self) -> pathlib.Path:
        """Directory of cached tokens.

        Raises:
            DataError: `cache` is empty, a URL, or no path.
        """
        if self.cache is None:
            return cache_directory() / "data"
        if not self.cache.strip() or "://" in self.cache or "\0" in self.cache:
            raise DataError(
                f"data.cache={self.cache!r} must be a local directory, which is created if it does "
                f"not exist: name one, or leave it out for {cache_directory() / 'data'}"
            )
        return pathlib.Path(self.cache).expanduser()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextReadingConfig(ReadingConfig):
    """Fields of all sources whose records are one text each."""

    text_field: str = "text"
    """Field (JSON) or column (Parquet) of the text."""

    def __post_init__(self):
        # Not super(): a dataclass with slots is created twice, and the first is not an ancestor.
        ReadingConfig.__post_init__(self)
        if not self.text_field:
            raise ValueError("data.text_field is empty: name the field that holds the text")
