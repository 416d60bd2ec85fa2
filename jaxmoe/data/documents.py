# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans documents: reads and tokenises each one once, and caches tokens and offsets.

The records of a collection (files, a Hugging Face dataset) become a directory in the cache,
$XDG_CACHE_HOME/jaxmoe/data/<key>:

    tokens.bin     the tokens of all documents, end to end, in 1, 2 or 4 bytes each (memory-mapped)
    offsets.npy    start of each document, and the end of the last
    digests.npy    8 bytes of the sha256 of each document's text
    sizes.npy      bytes of text of each document; -1 where the record was already token ids
    facts.json     sizes and sha256 of what was read, and the number of skipped records
    slots-*.npy    the packing of a split into rows of one length (see `packing.py`)
    parts-*.npz    centroids of a partition, and the part of each document (see `partition.py`)

The key is a hash of the request: names, sizes and modification times of the files, tokenizer,
fields. The directory is written under a temporary name and renamed, so that it is always whole;
processes that write it at the same time write the same content.

To add a collection: `jaxmoe/data/collection.py` (the interface to implement),
`jaxmoe/data/packed.py` (`build_sources`, which its config's `build` calls).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.collection import Collection
from jaxmoe.data.held_out import digest, held_out
from jaxmoe.data.reading.formats import BadRecord, Record
from jaxmoe.data.source import Split
from jaxmoe.data.tokenizer import ByteTokenizer, Tokenizer
from jaxmoe.messages import Progress
from pallas_kernels.array_types import Int, Shaped

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Version of the cache's files; increased when their meaning changes."""
_BATCH_CHARACTERS = 2**20
_BATCH_TEXTS = 4096
_BATCH_IDS = 2**20
_TOKENIZER_OF_IDS = (
    "give the tokenizer that made the file (data.tokenizer:file --data.tokenizer.path "
    "tokenizer.json), or the number of its ids (data.tokenizer:ids --data.tokenizer.vocab_size N)"
)

BadRecords = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentSet:
    """Documents of one split, as ranges of one array of tokens."""

    tokens: Shaped[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    lengths: Int[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]
    """Bytes of text of each document; -1 where unknown."""

    def document(self, number: int) -> Shaped[np.ndarray, " S"]:
        """Return the tokens of a document, separators included."""
        start = int(self.starts[number])
        return self.tokens[start : start + int(self.lengths[number])]

    def members(self, numbers: Int[np.ndarray, " members"]) -> DocumentSet:
        """Return some of the documents."""
        return DocumentSet(
            tokens=self.tokens,
            starts=self.starts[numbers],
            lengths=self.lengths[numbers],
            sizes=self.sizes[numbers],
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

    def split(self, fraction: float) -> dict[Split, DocumentSet]:
        """Return the train and the validation split.

        Args:
            fraction: Share of the documents to hold out; 0: none.
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


def plan_documents(
    collection: Collection,
    tokenizer: Tokenizer,
    *,
    on_bad_record: BadRecords,
    cache: pathlib.Path,
) -> Store:
    """Read and tokenise all documents, unless the cache holds them.

    Args:
        collection: Documents to read.
        tokenizer: Tokenizer of all documents.
        on_bad_record: "stop" at the first record that cannot be used, or "skip" and count them.
        cache: Directory of all stores.

    Raises:
        DataError: A file or (with "stop") a record cannot be used, or there is no text.
    """
    key = cache_key(collection.identity(), tokenizer.fingerprint(), on_bad_record)
    directory = cache / key
    if (store := _open(directory)) is None:
        store = _written(directory, collection, tokenizer, on_bad_record)
    for message in store.facts.get("warnings", ()):
        logger.warning("%s", message)
    return store


def _written(
    directory: pathlib.Path,
    collection: Collection,
    tokenizer: Tokenizer,
    on_bad_record: BadRecords,
) -> Store:
    """Write a store under a temporary name, rename it, and return it."""
    cache = directory.parent
    new = cache / f"{directory.name}.{uuid.uuid4().hex}.new"
    with writing_to(cache):
        try:
            new.mkdir(parents=True)
            _write(new, collection, tokenizer, on_bad_record)
            _publish(new, directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    store = _open(directory)
    assert store is not None  # it has just been written
    return store


@contextlib.contextmanager
def writing_to(cache: pathlib.Path) -> Iterator[None]:
    """Turn errors of writing the cache into a DataError.

    Raises:
        DataError: The cache cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache {cache} cannot be written ({error.strerror}): free space, or choose "
            "another place with --data.cache"
        ) from error


def _publish(new: pathlib.Path, directory: pathlib.Path) -> None:
    """Rename a complete store, unless another process was first."""
    try:
        new.rename(directory)
    except OSError:
        if _open(directory) is not None:
            return
        # The present store is damaged. It is renamed before it is deleted, so that the name never
        # refers to a partial store.
        damaged = new.with_suffix(".damaged")
        directory.rename(damaged)
        new.rename(directory)
        shutil.rmtree(damaged, ignore_errors=True)


def cache_key(*parts: Any) -> str:
    """Return the key of a request in the cache, in hexadecimal digits."""
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
    progress, tokens = Progress(), 0
    with (directory / "tokens.bin").open("wb") as stream:
        for ids, content_digest, size in _documents(collection, tokenizer, on_bad_record, skipped):
            stream.write(np.ascontiguousarray(ids, dtype).data)
            lengths.append(len(ids))
            digests.append(content_digest)
            sizes.append(size)
            tokens += len(ids)
            progress.at("reading data: {:,} documents, {:,} tokens", len(lengths), tokens)
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
        "warnings": collection.warnings(),
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "dtype": np.dtype(dtype).name,
    }
    (directory / "facts.json").write_text(json.dumps(facts))


def _documents(
    collection: Collection, tokenizer: Tokenizer, on_bad_record: BadRecords, skipped: list[str]
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield tokens, digest and bytes of each non-empty document."""
    waiting: list[_Text] = []
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
                waiting.append(_Text(text, digest(checked), len(checked)))
                characters += len(text)
            del record, checked, text  # a document may be large, and is encoded below
            if characters >= _BATCH_CHARACTERS or len(waiting) >= _BATCH_TEXTS:
                yield from _tokenized(waiting, tokenizer)
                waiting, characters = [], 0
        elif len(checked):
            yield from _tokenized(waiting, tokenizer)  # keeps the order of documents
            waiting, characters = [], 0
            yield checked, _digest_of_ids(checked), -1
    yield from _tokenized(waiting, tokenizer)


class _Text(NamedTuple):
    """A document that waits for the tokenizer."""

    text: str
    digest: int
    size: int
    """Bytes in UTF-8."""


def _tokenized(texts: list[_Text], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, int]]:
    if not texts:
        return
    encoded = tokenizer.encode_all([one.text for one in texts])
    encoded.reverse()
    for one in texts:
        ids = encoded.pop()  # freed before the next
        ends = np.array([tokenizer.separator], ids.dtype)
        ids = np.concatenate([ends, ids, ends])
        yield ids, one.digest, one.size


def _checked(record: Record, tokenizer: Tokenizer) -> bytes | np.ndarray | BadRecord:
    """Return UTF-8 text or token ids, or a BadRecord if the tokenizer cannot encode the text."""
    value, size = record.value, tokenizer.vocab_size
    where = record.where
    if isinstance(value, str):
        if not tokenizer.is_text:
            raise DataError(
                f"{where} holds text, and data.tokenizer:ids reads token ids only: choose "
                "data.tokenizer:bytes, :file or :trained"
            )
        content = value.encode()
        if isinstance(tokenizer, ByteTokenizer) and (at := content.find(0)) >= 0:
            return BadRecord(
                f"{where}: byte 0 at offset {at} of the text, which separates "
                "documents in data.tokenizer:bytes: remove it, or choose another tokenizer"
            )
        return content
    if isinstance(tokenizer, ByteTokenizer) and value.dtype.itemsize > 1:
        raise DataError(
            f"{where} holds token ids of type {value.dtype}, and data.tokenizer:bytes reads bytes "
            f"(uint8): {_TOKENIZER_OF_IDS}"
        )
    if len(value) and (value.min() < 0 or value.max() >= size):
        at = int(np.argmax((value < 0) | (value >= size)))
        raise DataError(
            f"{where}: token id {value[at]} at position {record.first + at} of the file is outside "
            f"the vocabulary of {size} (ids 0 to {size - 1}): {_TOKENIZER_OF_IDS}"
        )
    return value


def _digest_of_ids(ids: np.ndarray) -> int:
    """Return the digest of ids, the same for any integer type; computed in parts."""
    total = hashlib.sha256()
    for begin in range(0, len(ids), _BATCH_IDS):
        total.update(ids[begin : begin + _BATCH_IDS].astype("<i8").data)
    return int.from_bytes(total.digest()[:8], "big")


def _open(directory: pathlib.Path) -> Store | None:
    """Return the store in a directory, None if it is missing or damaged."""
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
