# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads documents from a Hugging Face data set (extra `datasets`).

    --data.dataset roneneldan/TinyStories data:huggingface

A name is looked up on the hub, or in its cache if there is no network; a directory must be one that
`Dataset.save_to_disk` wrote. The whole split is read once, in the planning pass. `data:files` reads
text, JSON lines and Parquet files without this extra.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

from jaxmoe.data.batch import DataError
from jaxmoe.data.packed import PackedSource, build_sources
from jaxmoe.data.reading.config import TextReadingConfig
from jaxmoe.data.reading.formats import text_record, way_to_text
from jaxmoe.data.reading.records import BadRecord, Record
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.optional import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceConfig(TextReadingConfig):
    """A data set of the Hugging Face hub, or one saved to a directory."""

    name: ClassVar[str] = "huggingface"

    dataset: str = ""
    """Name on the hub, or a directory that `save_to_disk` wrote."""
    subset: str | None = None
    """Configuration of the data set, if it has several."""
    dataset_split: str = "train"
    """Split whose documents are read."""
    revision: str | None = None
    """Commit or tag on the hub; the newest when None."""

    def build(self, seed: int = 0) -> PackedSource:
        """Read, tokenise and plan the documents, or read them from the cache.

        Raises:
            DataError: The data set or a record cannot be used.
        """
        if not self.dataset:
            raise DataError("data.dataset is empty: give a name on the hub, or a directory")
        return build_sources(self, self.name, {"": HubRows(self)}, seed=seed)[""]


class HubRows:
    """Documents of a data set: a collection.

    Args:
        config: Data set to read.

    Raises:
        DataError: It cannot be loaded, or has no such split or column.
    """

    has_weights = False

    def __init__(self, config: HuggingFaceConfig):
        self._config = config
        self._rows = self._load()
        if config.text_field not in self._rows.column_names:
            names = self._rows.column_names
            way_out = way_to_text(names, "column")
            raise DataError(
                f"data.dataset={config.dataset} has no column {config.text_field!r}; it has "
                f"{', '.join(map(repr, names))}: {way_out}"
            )

    def __str__(self) -> str:
        return f"data.dataset={self._config.dataset}"

    def identity(self) -> Any:
        """Return the fingerprint of the rows by the `datasets` library, and the column."""
        return {**self.content(), "text_field": self._config.text_field}

    def content(self) -> dict[str, Any]:
        """Return name, split, number of rows and their fingerprint by the `datasets` library."""
        return {
            "dataset": self._config.dataset,
            "subset": self._config.subset,
            "split": self._config.dataset_split,
            "rows": len(self._rows),
            "sha256": self._rows._fingerprint,
        }

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """Yield the documents in the order of the rows."""
        del tokenizer
        field = self._config.text_field
        for number, row in enumerate(self._rows.select_columns([field])):
            yield text_record(row[field], field, f"{self._config.dataset} row {number}")

    def warnings(self) -> list[str]:
        """Return nothing: the `datasets` library verifies its files."""
        return []

    def _load(self) -> Any:
        datasets = require("datasets", "datasets")
        config = self._config
        try:
            if not pathlib.Path(config.dataset).is_dir():
                return datasets.load_dataset(
                    config.dataset,
                    config.subset,
                    split=config.dataset_split,
                    revision=config.revision,
                )
            loaded = datasets.load_from_disk(config.dataset)
        except (OSError, ValueError) as error:
            raise DataError(f"data.dataset={config.dataset} cannot be loaded: {error}") from error
        if not isinstance(loaded, dict):  # a single split was saved
            return loaded
        if config.dataset_split not in loaded:
            raise DataError(
                f"data.dataset_split: {config.dataset} has no split {config.dataset_split!r}; it"
                f" has {', '.join(map(repr, loaded))}: name one"
            )
        return loaded[config.dataset_split]
