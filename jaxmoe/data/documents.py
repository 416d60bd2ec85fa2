# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The planning pass: every document is read once, tokenised, and kept as tokens and offsets.

A collection (files, a Hugging Face dataset) gives records; what comes of them is a directory in the
cache, $XDG_CACHE_HOME/jaxmoe/data/<key>:

    tokens.bin     the tokens of all documents, end to end, in 1, 2 or 4 bytes each (memory-mapped)
    offsets.npy    where each document begins, and the end of the last
    digests.npy    8 bytes of the sha256 of each document's text
    sizes.npy      bytes of text of each document; -1 where the record was already token ids
    facts.json     what was read: sizes, sha256, records that were skipped
    slots-*.npy    the packing of a split into rows of one length (see `packing.py`)

The key is the hash of what was asked: the names, sizes and times of change of the files, the
tokenizer, the fields. The directory appears in one rename, so that what exists is whole; two
processes that make it at once make the same.

A document is held out by its own sha256, so that equal ones stay together and adding one moves no
other. Where that would be fewer than five, as many as the fraction says are taken in the order of
their sha256; where it would be less than one, the last part of every document.

To add a collection: an object with `identity`, `content` and `records` (see `Collection`).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.formats import BadRecord, Record
from jaxmoe.data.source import Split
from jaxmoe.data.tokenizer import ByteTokenizer, Tokenizer
from pallas_kernels.array_types import Int, Shaped

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Raised when the files of the cache change their meaning."""
_FEWEST_BY_DIGEST = 5
"""Held-out documents; where fewer are to be expected, they are counted off instead."""
_BATCH_CHARACTERS = 2**20
_BATCH_TEXTS = 4096
_BATCH_IDS = 2**20

BadRecords = Literal["stop", "skip"]


@runtime_checkable
class Collection(Protocol):
    """Where documents come from; `str` of it is what the user wrote."""

    def identity(self) -> Any:
        """What the cache is found by, cheap to get, in values that JSON holds."""
        ...

    def content(self) -> dict[str, Any]:
        """What the fingerprint holds: names, sizes, sha256."""
        ...

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """The documents in order; the tokenizer cuts ids without borders. None: text only."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentSet:
    """The documents of one split, as ranges of one array of tokens."""

    tokens: Shaped[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    lengths: Int[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]
    """Bytes of text; -1 where nobody has counted them."""

    def document(self, number: int) -> Shaped[np.ndarray, " S"]:
        """The tokens of a document, separators included."""
        start = int(self.starts[number])
        return self.tokens[start : start + int(self.lengths[number])]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Store:
    """What the planning pass left in the cache."""

    directory: pathlib.Path
    tokens: Shaped[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " borders"]
    digests: Shaped[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]
    facts: dict[str, Any]

    def split(self, fraction: float) -> dict[Split, DocumentSet]:
        """Train and validation.

        Args:
            fraction: Of the documents that is held out; 0: none.
        """
        lengths = np.diff(self.offsets)
        if fraction == 0.0:
            whole = self._where(np.ones(len(lengths), bool))
            return {"train": whole, "validation": self._where(np.zeros(len(lengths), bool))}
        is_held_out = held_out(self.digests, fraction)
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
        )


def held_out(digests: Shaped[np.ndarray, " documents"], fraction: float) -> np.ndarray | None:
    """Which documents are held out; None: they are too few, and the end of each is.

    Args:
        digests: Of the documents, 64 bits.
        fraction: Of them.
    """
    expected = len(digests) * fraction
    if expected >= _FEWEST_BY_DIGEST:
        return digests < np.uint64(int(fraction * 2**64))
    if expected < 1:
        return None
    return digests <= np.sort(digests)[round(expected) - 1]


def train_texts(collection: Collection, fraction: float) -> Iterator[str]:
    """The texts that a vocabulary may be trained on: none of what will be held out."""
    texts = (
        record.value
        for record in collection.records(None)
        if isinstance(record, Record) and isinstance(record.value, str) and record.value
    )
    if not fraction:
        yield from texts
        return
    first = list(itertools.islice(texts, math.ceil(_FEWEST_BY_DIGEST / fraction)))
    mask = held_out(np.array([_digest(text.encode()) for text in first], np.uint64), fraction)
    if mask is None:
        yield from (text[: int(len(text) * (1 - fraction))] for text in first)
        return
    yield from (text for text, is_held_out in zip(first, mask, strict=True) if not is_held_out)
    for text in texts:  # there are so many that each one's digest decides, whatever the others
        if _digest(text.encode()) >= int(fraction * 2**64):
            yield text


def plan_documents(
    collection: Collection,
    tokenizer: Tokenizer,
    *,
    on_bad_record: BadRecords,
    cache: pathlib.Path,
) -> Store:
    """Reads and tokenises all documents, unless the cache holds them.

    Args:
        collection: The documents.
        tokenizer: Of all of them.
        on_bad_record: "stop" at the first record that cannot be used, or "skip" and count them.
        cache: The directory of all such stores.

    Raises:
        DataError: A file or (with "stop") a record cannot be used, or there is no text.
    """
    key = cache_key(collection.identity(), tokenizer.fingerprint(), on_bad_record)
    directory = cache / key
    if (store := _open(directory)) is not None:
        return store
    new = cache / f"{key}.{uuid.uuid4().hex}.new"
    with writing_to(cache):
        try:
            new.mkdir(parents=True)
            _write(new, collection, tokenizer, on_bad_record)
            _publish(new, directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    store = _open(directory)
    assert store is not None  # it was written whole
    return store


@contextlib.contextmanager
def writing_to(cache: pathlib.Path) -> Iterator[None]:
    """Says in words that the cache cannot be written.

    Raises:
        DataError: Instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache {cache} cannot be written ({error.strerror}): free space, or choose "
            "another place with --data.cache"
        ) from error


def _publish(new: pathlib.Path, directory: pathlib.Path) -> None:
    """Gives a whole store its name, unless another process was first."""
    try:
        new.rename(directory)
    except OSError:
        if _open(directory) is not None:
            return
        # A damaged one. It is moved, not deleted in place: the name must never stand for a part.
        damaged = new.with_suffix(".damaged")
        directory.rename(damaged)
        new.rename(directory)
        shutil.rmtree(damaged, ignore_errors=True)


def cache_key(*parts: Any) -> str:
    """Hexadecimal digits by which the cache finds what was asked."""
    content = json.dumps([_FORMAT, *parts], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:24]


def _write(
    directory: pathlib.Path,
    collection: Collection,
    tokenizer: Tokenizer,
    on_bad_record: BadRecords,
) -> None:
    dtype = next(
        d
        for d in (np.uint8, np.uint16, np.uint32)
        if tokenizer.vocab_size <= 2 ** (8 * np.dtype(d).itemsize)
    )
    lengths, digests, sizes = array.array("q"), array.array("Q"), array.array("q")
    skipped: list[str] = []
    with (directory / "tokens.bin").open("wb") as stream:
        for ids, digest, size in _documents(collection, tokenizer, on_bad_record, skipped):
            stream.write(np.ascontiguousarray(ids, dtype).data)
            lengths.append(len(ids))
            digests.append(digest)
            sizes.append(size)
    if not lengths:
        found = "only empty documents"
        if skipped:
            found = f"{len(skipped)} records that cannot be used, the first: {skipped[0]}"
        raise DataError(f"{collection} holds no text: found {found}")
    for message in skipped[:3]:
        logger.warning("left out: %s", message)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    np.save(directory / "offsets.npy", offsets)
    np.save(directory / "digests.npy", np.array(digests, np.uint64))
    np.save(directory / "sizes.npy", np.array(sizes, np.int64))
    facts = {
        "content": collection.content(),
        "skipped_records": len(skipped),
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "dtype": np.dtype(dtype).name,
    }
    (directory / "facts.json").write_text(json.dumps(facts))


def _documents(
    collection: Collection, tokenizer: Tokenizer, on_bad_record: BadRecords, skipped: list[str]
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Tokens, digest and bytes of each document that is not empty."""
    waiting: list[tuple[str, bytes]] = []
    characters = 0
    for record in collection.records(tokenizer):
        checked = record if isinstance(record, BadRecord) else _checked(record, tokenizer)
        if isinstance(checked, BadRecord):
            if on_bad_record == "stop":
                raise DataError(f"{checked} (--data.on_bad_record skip leaves such records out)")
            skipped.append(str(checked))
        elif isinstance(checked, bytes):
            text = record.value if isinstance(record, Record) else ""
            assert isinstance(text, str)
            if text:
                waiting.append((text, checked))
                characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(waiting) >= _BATCH_TEXTS:
                yield from _tokenized(waiting, tokenizer)
                waiting, characters = [], 0
        elif len(checked):
            yield from _tokenized(waiting, tokenizer)  # so that documents keep their order
            waiting, characters = [], 0
            yield checked, _digest_of_ids(checked), -1
    yield from _tokenized(waiting, tokenizer)


def _tokenized(
    texts: list[tuple[str, bytes]], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, int, int]]:
    if not texts:
        return
    encoded = tokenizer.encode_all([text for text, _ in texts])
    for ids, (_, content) in zip(encoded, texts, strict=True):
        ends = np.array([tokenizer.separator], ids.dtype)
        yield np.concatenate([ends, ids, ends]), _digest(content), len(content)


def _checked(record: Record, tokenizer: Tokenizer) -> bytes | np.ndarray | BadRecord:
    """The text in UTF-8, or token ids; a BadRecord where the tokenizer cannot take it."""
    value, size = record.value, tokenizer.vocab_size
    if isinstance(value, str):
        if not tokenizer.is_text:
            raise DataError(
                f"{record.where} holds text, and data.tokenizer:ids reads token ids only: choose "
                "data.tokenizer:bytes, :file or :trained"
            )
        content = value.encode()
        if isinstance(tokenizer, ByteTokenizer) and (at := content.find(0)) >= 0:
            return BadRecord(
                f"{record.where}: byte 0 at offset {at} of the text, which is what separates "
                "documents in data.tokenizer:bytes: take it out, or choose another tokenizer"
            )
        return content
    if len(value) and (value.min() < 0 or value.max() >= size):
        at = int(np.argmax((value < 0) | (value >= size)))
        raise DataError(
            f"{record.where}: token id {value[at]} at position {record.first + at} of the file is "
            f"outside the vocabulary of {size} (ids 0 to {size - 1}): give the tokenizer that made "
            "the file (data.tokenizer:file --data.tokenizer.path tokenizer.json), or the number of "
            "its ids (data.tokenizer:ids --data.tokenizer.vocab_size N)"
        )
    return value


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def _digest_of_ids(ids: np.ndarray) -> int:
    """The same for any type of integer, and in parts: a file may be one document."""
    digest = hashlib.sha256()
    for begin in range(0, len(ids), _BATCH_IDS):
        digest.update(ids[begin : begin + _BATCH_IDS].astype("<i8").data)
    return int.from_bytes(digest.digest()[:8], "big")


def _open(directory: pathlib.Path) -> Store | None:
    """What is there, if it is whole."""
    try:
        facts = json.loads((directory / "facts.json").read_text())
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
    except (OSError, EOFError, ValueError, KeyError, IndexError):
        return None
    return Store(
        directory=directory,
        tokens=tokens,
        offsets=offsets,
        digests=digests,
        sizes=sizes,
        facts=facts,
    )
