# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides a source of packed documents, for all configs that read files or data sets.

Bytes per token are those of the held-out predictions: the bytes of the documents, divided by their
tokens without the first (the separator, which is not text) and with the last. Where records are
token ids, or the end of a document is held out, bytes are counted by decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.collection import Collection
from jaxmoe.data.documents import (
    BadRecords,
    DocumentSet,
    Store,
    cache_key,
    plan_documents,
    writing_to,
)
from jaxmoe.data.held_out import train_texts
from jaxmoe.data.packing import BestFit, Concatenated, Packing
from jaxmoe.data.partition import Partition, PartitionedConfig, part_of_documents
from jaxmoe.data.source import Row, Split
from jaxmoe.data.text_only import TextOnly, copied, encode_document
from jaxmoe.data.tokenizer import BytesConfig, Tokenizer, TokenizerConfig
from jaxmoe.disk import cache_directory
from pallas_kernels.array_types import Int, Shaped

_MOST_TEXT = 2**25
"""Bytes of a split above which n-grams are not counted, because it would take too long."""
_SPLITS: tuple[Split, Split] = ("train", "validation")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig(PartitionedConfig):
    """Fields of all sources that read documents."""

    takes_tokenizer: ClassVar[bool] = True

    text_field: str = "text"
    """Field (JSON) or column (Parquet) of the text."""
    tokenizer: TokenizerConfig = BytesConfig()
    """Tokenizer of text; model.vocab_size must be at least its vocabulary."""
    packing: Packing = "best_fit"
    """best_fit: documents side by side, attention within each. concatenate: documents end to end,
    cut at every row, attention across documents; computes faster. levels: the documents of the
    best_fit rows of a step, packed again into micro-batches by level, see jaxmoe/data/levels."""
    validation_fraction: float = 0.05
    """Share of documents to hold out; of the end of each, if that is less than one document."""
    on_bad_record: BadRecords = "stop"
    """stop: a bad record ends the run. skip: bad records are left out, counted and reported."""
    cache: str | None = None
    """Directory of cached tokens; $XDG_CACHE_HOME/jaxmoe/data (~/.cache/...) when None."""

    def __post_init__(self):
        self.check()

    @property
    def packs_levels(self) -> bool:
        """Whether the documents of a step are packed by level."""
        return self.packing == "levels"

    def with_tokenizer(self, path: pathlib.Path) -> Any:
        """Return the config with a copy of its tokenizer.json, if it has one."""
        return dataclasses.replace(self, tokenizer=copied(self.tokenizer, path))

    def build_text(self, seed: int = 0) -> Any:
        """Return a source that encodes and decodes; it reads data only to train a tokenizer.

        Args:
            seed: Seed of the order of documents.

        Raises:
            DataError: The tokenizer cannot be read, or the data that it is trained on.
        """
        if self.tokenizer.is_trained:
            config: Any = self
            return config.build(seed)
        return TextOnly(self.tokenizer.build(lambda: (), pathlib.Path()))

    def check(self) -> None:
        """Raise a ValueError for invalid values."""
        self.check_partition()
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} must lie between 0 and 1"
            )
        if not self.text_field:
            raise ValueError("data.text_field is empty: name the field that holds the text")

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


def build_sources(
    config: ReadingConfig,
    kind: str,
    collections: Mapping[str, Collection],
    *,
    held_out: Collection | None = None,
    seed: int,
) -> dict[str, PackedSource]:
    """Return one source per collection, with one tokenizer.

    Args:
        config: Config that says how to read.
        kind: Kind of the sources in fingerprints.
        collections: Collections by name.
        held_out: Collection of the validation split, if it is separate.
        seed: Seed of the order of documents.

    Raises:
        DataError: A file or record cannot be read, or a split has no documents.
    """
    cache = config.cache_directory
    fraction = config.validation_fraction if held_out is None else 0.0
    identities = [collection.identity() for collection in collections.values()]
    with writing_to(cache):
        tokenizer = config.tokenizer.build(
            lambda: (text for c in collections.values() for text in train_texts(c, fraction)),
            cache / cache_key("tokenizer", identities, fraction),
        )

    def plan(collection: Collection) -> Store:
        return plan_documents(
            collection, tokenizer, on_bad_record=config.on_bad_record, cache=cache
        )

    sources = {}
    for name, collection in collections.items():
        store = plan(collection)
        documents, facts = store.split(fraction), {"train": store.facts}
        directories: dict[Split, pathlib.Path] = dict.fromkeys(_SPLITS, store.directory)
        if held_out is not None:
            other = plan(held_out)
            documents["validation"] = other.split(0.0)["train"]
            facts["validation"] = other.facts
            directories["validation"] = other.directory
        partition = None
        if config.partition is not None:
            train = documents["train"]
            partition, numbers = part_of_documents(
                config.partition,
                train.document,
                len(train.lengths),
                file=store.directory / f"parts-{fraction}-{config.partition.split('/')[1]}.npz",
            )
            documents["train"] = train.members(numbers)
        sources[name] = PackedSource(
            kind=kind,
            config=config,
            tokenizer=tokenizer,
            documents=documents,
            facts=facts,
            directories=directories,
            seed=seed,
            partition=partition,
        )
    return sources


class PackedSource:
    """Documents of one tokenizer, packed into rows.

    Args:
        kind: Kind of the source in the fingerprint.
        config: Config that says how it was read.
        tokenizer: Tokenizer of all documents.
        documents: Documents of each split.
        facts: Sizes and sha256 of what was read, by split.
        directories: Directories for cached packings, by split.
        seed: Seed of the order of documents.
        partition: Part to which the training documents belong, if they are partitioned.
    """

    def __init__(
        self,
        *,
        kind: str,
        config: ReadingConfig,
        tokenizer: Tokenizer,
        documents: dict[Split, DocumentSet],
        facts: dict[str, dict[str, Any]],
        directories: dict[Split, pathlib.Path],
        seed: int,
        partition: Partition | None = None,
    ):
        self._kind, self._config, self.tokenizer = kind, config, tokenizer
        self.documents, self._facts, self._seed = documents, facts, seed
        self._directories, self.partition = directories, partition
        counts = ", ".join(
            f"{split}: {len(lengths)} documents of {lengths.sum()} tokens"
            for split in _SPLITS
            for lengths in [documents[split].lengths]
        )
        for split in _SPLITS:
            if not (documents[split].lengths > 1).any():
                raise DataError(
                    f"the {split} split of the data has no text ({counts}; equal documents are in "
                    "one split): bring more, or hold out another part "
                    f"(data.validation_fraction={config.validation_fraction})"
                )
        self.packed = functools.lru_cache(maxsize=8)(self._pack)

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of held-out text per prediction."""
        return self._bytes_per_token

    @functools.cached_property
    def _bytes_per_token(self) -> float | None:
        if not self.tokenizer.is_text:
            return None
        documents = self.documents["validation"]
        counted = sum(
            size if size >= 0 else len(self.tokenizer.decode(documents.document(number)[1:]))
            for number, size in enumerate(documents.sizes.tolist())
        )
        if not counted:
            raise DataError(
                "no byte of the validation split is predicted: its documents are too short. Hold "
                f"out more (data.validation_fraction={self._config.validation_fraction})"
            )
        return counted / int(np.maximum(documents.lengths - 1, 0).sum())

    def num_rows(self, split: Split, sequence_length: int) -> int:
        """Return the number of rows of an epoch, the same in every epoch."""
        return self.packed(split, sequence_length).num_rows

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Return row `index` of an epoch.

        Raises:
            DataError: There is no such row.
        """
        plan = self.packed(split, sequence_length)
        if not 0 <= index < plan.num_rows:
            raise DataError(
                f"row {index} is not in the {split} split, which has {plan.num_rows} rows of "
                f"sequence_length={sequence_length}"
            )
        return plan.row(index, epoch)

    def entropy_bits_per_token(self, sequence_length: int) -> None:
        """Return None: the entropy of real text is unknown."""
        del sequence_length

    def fingerprint(self) -> dict[str, Any]:
        """Return what was read, and how it became tokens."""
        return {
            "kind": self._kind,
            **{
                split: {
                    **facts["content"],
                    "documents": facts["documents"],
                    "tokens": facts["tokens"],
                    "skipped_records": facts["skipped_records"],
                }
                for split, facts in self._facts.items()
            },
            "validation_fraction": self._config.validation_fraction,
            "packing": self._config.packing,
            "tokenizer": self.tokenizer.fingerprint(),
            **({} if self.partition is None else {"partition": self.partition.fingerprint()}),
        }

    def describe(self, sequence_length: int) -> str:
        """Return documents, tokens, tokenizer and packing efficiency in one line."""
        count = sum(facts["documents"] for facts in self._facts.values())
        tokens = sum(facts["tokens"] for facts in self._facts.values())
        skipped = sum(facts["skipped_records"] for facts in self._facts.values())
        ratio = self.bytes_per_token
        return (
            f"{self._kind}: {count:,} documents, {tokens:,} tokens"
            + (f" ({skipped:,} records left out)" if skipped else "")
            + f", {self.tokenizer.fingerprint()['kind']} tokenizer of {self.vocab_size:,} ids"
            + ("" if ratio is None else f", {ratio:.2f} bytes/token")
            + ("" if self.partition is None else f", {self.partition.describe()}")
            + f", {self._config.packing} rows"
            + f" {self.packed('train', sequence_length).efficiency():.1%} full"
        )

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """Return the documents, separated by byte 0; None above 32 MB."""
        documents = self.documents[split]
        most = _MOST_TEXT if self.vocab_size <= 256 else _MOST_TEXT // 2
        if not self.tokenizer.is_text or documents.lengths.sum() > most:
            return None
        texts = map(self.tokenizer.decode, map(documents.document, range(len(documents.lengths))))
        joined = b"\0".join(texts)
        return np.frombuffer(joined, np.uint8) if len(joined) <= _MOST_TEXT else None

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a text, after the separator that begins every document."""
        return encode_document(self.tokenizer, text)

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of the tokens; invalid UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(np.asarray(tokens)).decode("utf-8", errors="replace")

    def _pack(self, split: Split, sequence_length: int) -> BestFit | Concatenated:
        documents = self.documents[split]
        seed = self._seed if split == "train" else None
        if self._config.packing == "concatenate":
            return Concatenated(
                documents,
                sequence_length=sequence_length,
                seed=seed,
                separator=self.tokenizer.separator,
            )
        fraction = self._config.validation_fraction if len(self._facts) == 1 else 0.0
        part = ""
        if split == "train" and self.partition is not None:
            part = f"{self.partition.part + 1}of{self.partition.clusters.num_parts}-"
        kept = f"slots-{split}-{fraction}-{part}{sequence_length}.npy"
        return BestFit(
            documents,
            sequence_length=sequence_length,
            seed=seed,
            file=self._directories[split] / kept,
        )
