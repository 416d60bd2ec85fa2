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
from typing import Any

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.documents import cache_key, plan_documents, writing_to
from jaxmoe.data.held_out import train_texts
from jaxmoe.data.packing import BestFit, Concatenated
from jaxmoe.data.pieces import Long
from jaxmoe.data.reading.collection import Collection
from jaxmoe.data.reading.config import ReadingConfig
from jaxmoe.data.source import Row, Split
from jaxmoe.data.store import DocumentSet, Store
from jaxmoe.data.subset import Subset
from jaxmoe.data.text_only import TokenizerText, encode_document
from jaxmoe.data.tokenizer import Tokenizer
from pallas_kernels.array_types import Int, Shaped

_MOST_TEXT = 2**25
"""Bytes of a split above which n-grams are not counted, because it would take too long."""
_PART = 2**18
"""Ids that are decoded at once."""
_CONTEXT = 16
"""Ids before a part that are decoded with it."""
_INCOMPLETE = "\ufffd".encode()
"""Text of a part of a character."""
_SPLITS: tuple[Split, Split] = ("train", "validation")
_FATES = {"cut": "cut", "truncate": "truncated", "leave_out": "left out"}
_OF_WEIGHTS = ("trained_tokens", "untrained_documents")
"""Facts of documents with loss weights."""


def build_sources(
    config: ReadingConfig,
    kind: str,
    collections: Mapping[str, Collection],
    *,
    held_out: Collection | None = None,
    unit: str = "documents",
    long: Long = "cut",
    seed: int,
) -> dict[str, PackedSource]:
    """Return one source per collection, with one tokenizer.

    Args:
        config: Config that says how to read.
        kind: Kind of the sources in fingerprints.
        collections: Collections by name.
        held_out: Collection of the validation split, if it is separate.
        unit: Word for the documents, in the plural.
        long: Pieces to keep of documents with weights that do not fit into a row.
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
        documents = store.split(fraction)
        facts = {"train": store.facts}
        directories: dict[Split, pathlib.Path] = dict.fromkeys(_SPLITS, store.directory)
        if held_out is not None:
            held_out_plan = plan(held_out)
            documents["validation"] = held_out_plan.split(0.0)["train"]
            facts["validation"] = held_out_plan.facts
            directories["validation"] = held_out_plan.directory
        partition = None
        if config.partition is not None:
            train = documents["train"]
            partition, numbers = config.partition.of_documents(
                train.document, len(train.lengths), file=store.directory / f"parts-{fraction}"
            )
            documents["train"] = train.members(numbers)
        sources[name] = PackedSource(
            kind=kind,
            config=config,
            tokenizer=tokenizer,
            documents=documents,
            unit=unit,
            long=long,
            facts=facts,
            directories=directories,
            seed=seed,
            partition=partition,
        )
    return sources


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightCounts:
    """What is trained of documents with loss weights, and what is left out."""

    documents: int
    skipped: int
    """Records that cannot be used."""
    tokens: int
    trained: int
    """Tokens with a weight above 0."""
    untrained: int
    """Documents left out because no token of them has a weight above 0."""
    long: int
    """Documents that do not fit into a row."""
    pieces: int
    """Pieces of documents that are in no row."""
    unused: int
    """Documents of which no piece is in a row."""
    fate: str
    """What becomes of documents that do not fit into a row: cut, truncated or left out."""

    def describe(self, unit: str, sequence_length: int) -> str:
        """Return the counts in words, without those that are 0.

        Args:
            unit: Word for the documents.
            sequence_length: S.
        """
        parts = [f"{self.trained / max(1, self.tokens):.1%} of them trained"]
        if self.untrained:
            parts.append(f"{self.untrained:,} {unit} without a trained token left out")
        if self.long:
            parts.append(
                f"{self.long:,} {unit} longer than {sequence_length + 1} tokens {self.fate} (in no"
                f" row: {self.pieces:,} pieces, {self.unused:,} whole {unit})"
            )
        return ", ".join(parts)


class PackedSource(TokenizerText):
    """Documents of one tokenizer, packed into rows.

    Args:
        kind: Kind of the source in the fingerprint.
        config: Config that says how it was read.
        tokenizer: Tokenizer of all documents.
        documents: Documents of each split.
        unit: Word for the documents, in the plural.
        long: Pieces to keep of documents with weights that do not fit into a row.
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
        unit: str,
        long: Long,
        facts: dict[str, dict[str, Any]],
        directories: dict[Split, pathlib.Path],
        seed: int,
        partition: Subset | None = None,
    ):
        self._kind = kind
        self._config = config
        self.tokenizer = tokenizer
        self.documents = documents
        self.unit = unit
        self._long: Long = long
        self._facts = facts
        self._seed = seed
        self._directories = directories
        self.partition = partition
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
            size if size >= 0 else _text_size(self.tokenizer, _predict(documents, number))
            for number, size in enumerate(documents.sizes.tolist())
        )
        if not counted:
            raise DataError(
                "no byte of the validation split is predicted: its documents are too short. Hold "
                f"out more (data.validation_fraction={self._config.validation_fraction})"
            )
        return counted / documents.trained_tokens()

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
        weights = self.documents["train"].weights
        return {
            "kind": self._kind,
            **{
                split: {
                    **facts["content"],
                    "documents": facts["documents"],
                    "tokens": facts["tokens"],
                    "skipped_records": facts["skipped_records"],
                    **{name: facts[name] for name in _OF_WEIGHTS if name in facts},
                }
                for split, facts in self._facts.items()
            },
            "validation_fraction": self._config.validation_fraction,
            "packing": self._config.packing,
            **({} if weights is None else {"long_documents": self._long}),
            "tokenizer": self.tokenizer.fingerprint(),
            **({} if self.partition is None else {"partition": self.partition.fingerprint()}),
        }

    def describe(self, sequence_length: int) -> str:
        """Return documents, tokens, tokenizer and packing efficiency in one line."""
        count, tokens, skipped = map(self._total, ("documents", "tokens", "skipped_records"))
        ratio = self.bytes_per_token
        counts = self.weight_counts(sequence_length)
        return (
            f"{self._kind}: {count:,} {self.unit}, {tokens:,} tokens"
            + (f" ({skipped:,} records left out)" if skipped else "")
            + ("" if counts is None else f", {counts.describe(self.unit, sequence_length)}")
            + f", {self.tokenizer.fingerprint()['kind']} tokenizer of {self.vocab_size:,} ids"
            + ("" if ratio is None else f", {ratio:.2f} bytes/token")
            + ("" if self.partition is None else f", {self.partition.describe()}")
            + f", {self._config.packing} rows"
            + f" {self.packed('train', sequence_length).efficiency():.1%} full"
        )

    def _total(self, fact: str) -> int:
        """Return the sum of a fact over the files of both splits."""
        return sum(facts.get(fact, 0) for facts in self._facts.values())

    def weight_counts(self, sequence_length: int) -> WeightCounts | None:
        """Return what is trained, and what is left out; None for documents without weights.

        Args:
            sequence_length: S, which decides what is cut.
        """
        if self.documents["train"].weights is None:
            return None
        packed = [self.packed(split, sequence_length) for split in _SPLITS]
        return WeightCounts(
            documents=self._total("documents"),
            skipped=self._total("skipped_records"),
            tokens=self._total("tokens"),
            trained=self._total("trained_tokens"),
            untrained=self._total("untrained_documents"),
            long=sum(int(part.is_long.sum()) for part in packed if isinstance(part, BestFit)),
            pieces=sum(part.num_left_out for part in packed if isinstance(part, BestFit)),
            fate=_FATES[self._long],
            unused=sum(part.num_unused for part in packed if isinstance(part, BestFit)),
        )

    def text(self, split: Split) -> Shaped[np.ndarray, " length"] | None:
        """Return the documents, separated by byte 0; None above 32 MB, or if parts of documents
        are not predicted."""
        documents = self.documents[split]
        if documents.weights is not None:
            return None
        most = _MOST_TEXT if self.vocab_size <= 256 else _MOST_TEXT // 2
        if not self.tokenizer.is_text or documents.lengths.sum() > most:
            return None
        texts = map(self.tokenizer.decode, map(documents.document, range(len(documents.lengths))))
        joined = b"\0".join(texts)
        return np.frombuffer(joined, np.uint8) if len(joined) <= _MOST_TEXT else None

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a text, after the id that begins every document."""
        return encode_document(self.tokenizer, text)

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
            part = f"{self.partition.label}-"
        if documents.weights is not None:
            part += f"{self._long}-"
        file_name = f"slots-{split}-{fraction}-{part}{sequence_length}.npy"
        return BestFit(
            documents,
            sequence_length=sequence_length,
            seed=seed,
            file=self._directories[split] / file_name,
            long=self._long,
        )


def _text_size(tokenizer: Tokenizer, tokens: np.ndarray) -> int:
    """Return the bytes of the text of ids, decoded in parts where a character ends.

    Each part is decoded behind the ids before it, whose text is subtracted. If the text of a part
    does not continue theirs, all ids are decoded at once.
    """
    size = 0
    begin = 0
    before = b""
    context = tokens[:0]
    while len(tokens) - begin > _PART:
        for end in range(begin + _PART, min(begin + _PART + _CONTEXT, len(tokens))):
            next_context = tokens[end - _CONTEXT : end]
            next_before = tokenizer.decode(next_context)
            if next_before and not next_before.endswith(_INCOMPLETE):
                break
        else:
            return len(tokenizer.decode(tokens))
        text = tokenizer.decode(np.concatenate([context, tokens[begin:end]]))
        if not text.startswith(before):
            return len(tokenizer.decode(tokens))
        size += len(text) - len(before)
        begin, context, before = end, next_context, next_before
    text = tokenizer.decode(np.concatenate([context, tokens[begin:]]))
    if not text.startswith(before):
        return len(tokenizer.decode(tokens))
    return size + len(text) - len(before)


def _predict(documents: DocumentSet, number: int) -> np.ndarray:
    """Return the tokens of a document that are predicted with a weight above 0."""
    weights = documents.document_weights(number)
    tokens = documents.document(number)[1:]
    return tokens if weights is None else tokens[weights[1:] > 0]
