# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans documents: reads and tokenises each one once, and caches tokens and offsets.

The records of a collection (files, a Hugging Face dataset) become a directory in the cache,
$XDG_CACHE_HOME/jaxmoe/data/<key>:

    tokens.bin     the tokens of all documents, end to end, in 1, 2 or 4 bytes each (memory-mapped)
    weights.bin    loss weight of each token, one byte; only where records have weights
    offsets.npy    start of each document, and the end of the last
    digests.npy    8 bytes of the sha256 of each document's text
    sizes.npy      bytes of text of each document; -1 where the record was already token ids
    facts.json     format, sizes and sha256 of what was read, and the number of skipped records
    slots-*.npy    the packing of a split into rows of one length (see `packing.py`)
    parts-*.npz    centroids of a partition, and the part of each document (see `subset.py`)

The key is a hash of the request: names, sizes and modification times of the files, tokenizer,
fields. The directory is written under a temporary name and renamed, so that it is always whole;
processes that write it at the same time write the same content. A directory of another format is
not read: its key differs, and so does the format in its facts.

A text that is too long for memory (`reading/texts.py`) is one document, whose tokens are written as
they are made.

To add a collection: `jaxmoe/data/reading/collection.py` (the interface to implement),
`jaxmoe/data/packed.py` (`build_sources`, which its config's `build` calls).
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import logging
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.held_out import digest, short_digest
from jaxmoe.data.reading.collection import Collection
from jaxmoe.data.reading.records import BadRecord, LongText, Record
from jaxmoe.data.store import FORMAT, WEIGHTS, Store, open_store
from jaxmoe.data.tokenizer import ByteTokenizer, Tokenizer
from jaxmoe.messages import Progress

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20
_BATCH_TEXTS = 4096
_BATCH_IDS = 2**20
_TOKENIZER_OF_IDS = (
    "give the tokenizer that made the file (data.tokenizer:file --data.tokenizer.path "
    "tokenizer.json), or the number of its ids (data.tokenizer:ids --data.tokenizer.vocab_size N)"
)

BadRecords = Literal["stop", "skip"]


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
    if (store := open_store(directory)) is None:
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
    store = open_store(directory)
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
        if open_store(directory) is not None:
            return
        # The present store is damaged. It is renamed before it is deleted, so that the name never
        # refers to a partial store.
        damaged = new.with_suffix(".damaged")
        directory.rename(damaged)
        new.rename(directory)
        shutil.rmtree(damaged, ignore_errors=True)


def cache_key(*parts: Any) -> str:
    """Return the key of a request in the cache, in hexadecimal digits."""
    content = json.dumps([FORMAT, *parts], sort_keys=True).encode()
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
    lengths = array.array("q")
    digests = array.array("Q")
    sizes = array.array("q")
    skipped: list[str] = []
    progress = Progress()
    tokens = 0
    with contextlib.ExitStack() as files:
        stream = files.enter_context((directory / "tokens.bin").open("wb"))
        weights = None
        if collection.has_weights:
            weights = _Weights(files.enter_context((directory / WEIGHTS).open("wb")))
        for document in _documents(collection, tokenizer, on_bad_record, skipped):
            if weights is not None and not weights.write(document):
                continue
            length = 0
            for ids in document.parts():
                stream.write(np.ascontiguousarray(ids, dtype).data)
                length += len(ids)
            lengths.append(length)
            digests.append(document.digest)
            sizes.append(document.size)
            tokens += length
            progress.at("reading data: {:,} documents, {:,} tokens", len(lengths), tokens)
    if not lengths:
        description = "only empty documents"
        if weights is not None and weights.untrained:
            description = f"{weights.untrained} records without a token to train on"
        if skipped:
            description = f"{len(skipped)} records that cannot be used, the first: {skipped[0]}"
        raise DataError(f"{collection} holds no text: found {description}")
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
        "format": FORMAT,
        **({} if weights is None else weights.facts()),
    }
    (directory / "facts.json").write_text(json.dumps(facts))


class _ReadDocument(NamedTuple):
    """A document to write."""

    ids: np.ndarray | Iterator[np.ndarray]
    """Token ids; those of a long text are made piece by piece."""
    digest: int
    size: int
    """Bytes of text in UTF-8; -1 where unknown."""
    weights: np.ndarray | None = None

    def parts(self) -> Iterator[np.ndarray]:
        """Return the ids in parts, which may be read once."""
        return iter([self.ids]) if isinstance(self.ids, np.ndarray) else self.ids


class _Weights:
    """Writes the loss weights of documents, and counts those that have none above 0.

    Args:
        stream: File of the weights.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.untrained = 0
        self._trained = 0

    def write(self, document: _ReadDocument) -> bool:
        """Write the weights of a document; return False, and count it, if no token is trained."""
        weights = document.weights
        shape = document.ids.shape if isinstance(document.ids, np.ndarray) else None
        if weights is None or weights.shape != shape or weights.dtype != np.uint8:
            raise ValueError("a record of a collection with weights needs one uint8 for each id")
        count = int(np.count_nonzero(weights[1:]))
        if not count:
            self.untrained += 1
            return False
        self._trained += count
        self._stream.write(np.ascontiguousarray(weights).data)
        return True

    def facts(self) -> dict[str, int]:
        """Return the trained tokens, and the documents left out because they have none."""
        return {"trained_tokens": self._trained, "untrained_documents": self.untrained}


def _documents(
    collection: Collection, tokenizer: Tokenizer, on_bad_record: BadRecords, skipped: list[str]
) -> Iterator[_ReadDocument]:
    """Yield the documents that are not empty."""
    waiting: list[_DocumentText] = []
    characters = 0
    for record in collection.records(tokenizer):
        checked = record if isinstance(record, BadRecord) else _check(record, tokenizer)
        if isinstance(checked, BadRecord):
            if on_bad_record == "stop":
                raise DataError(f"{checked} (--data.on_bad_record skip leaves such records out)")
            skipped.append(str(checked))
        elif isinstance(checked, bytes):
            text = record.value if isinstance(record, Record) else ""
            assert isinstance(text, str)
            if text:
                waiting.append(_DocumentText(text, digest(checked), len(checked)))
                characters += len(text)
            del record, checked, text  # a document may be large, and is encoded below
            if characters >= _BATCH_CHARACTERS or len(waiting) >= _BATCH_TEXTS:
                yield from _tokenize(waiting, tokenizer)
                waiting = []
                characters = 0
        elif isinstance(checked, LongText):
            yield from _tokenize(waiting, tokenizer)  # keeps the order of documents
            waiting = []
            characters = 0
            known = short_digest(checked.sha256)
            yield _ReadDocument(_ids_of_parts(checked, tokenizer), known, checked.num_bytes)
        elif len(checked):
            yield from _tokenize(waiting, tokenizer)  # keeps the order of documents
            waiting = []
            characters = 0
            assert isinstance(record, Record)  # a BadRecord stays one
            known = _digest_of_ids(checked) if record.digest is None else record.digest
            yield _ReadDocument(checked, known, -1, record.weights)
    yield from _tokenize(waiting, tokenizer)


class _DocumentText(NamedTuple):
    """A document that waits for the tokenizer."""

    text: str
    digest: int
    size: int
    """Bytes in UTF-8."""


def _tokenize(texts: list[_DocumentText], tokenizer: Tokenizer) -> Iterator[_ReadDocument]:
    if not texts:
        return
    encoded = tokenizer.encode_all([text.text for text in texts])
    encoded.reverse()
    for text in texts:
        ids = encoded.pop()  # freed before the next
        begin, end = (
            np.array([token], ids.dtype) for token in (tokenizer.begin, tokenizer.separator)
        )
        ids = np.concatenate([begin, ids, end])
        yield _ReadDocument(ids, text.digest, text.size)


def _ids_of_parts(text: LongText, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of a long text in order, and what begins and ends it."""
    yield np.array([tokenizer.begin])
    yield from tokenizer.encode_parts(text.parts())
    yield np.array([tokenizer.separator])


def _check(record: Record, tokenizer: Tokenizer) -> bytes | LongText | np.ndarray | BadRecord:
    """Return UTF-8 text or token ids, or a BadRecord if the tokenizer cannot encode the text."""
    value = record.value
    size = tokenizer.vocab_size
    where = record.where
    if isinstance(value, str | LongText):
        if not tokenizer.is_text:
            raise DataError(
                f"{where} holds text, and data.tokenizer:ids reads token ids only: choose "
                "data.tokenizer:bytes, :file or :trained"
            )
        content = value.encode() if isinstance(value, str) else value
        at = content.find(0) if isinstance(content, bytes) else content.zero
        if isinstance(tokenizer, ByteTokenizer) and at >= 0:
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
