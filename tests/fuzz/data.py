# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws data files with odd content, damage and names: read exactly, or refused in one sentence.

An undamaged file gives the documents that were written. A damaged one gives records, bad records
or a DataError, and no other exception.

To add a format: a function in WRITERS of `tests/fuzz/data.py`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zstandard
from etils import epath

from jaxmoe.data import DataError, FilesConfig
from jaxmoe.data.reading.formats import read_records
from jaxmoe.data.reading.records import BadRecord
from jaxmoe.data.tokenizer import IdsConfig
from tests.fuzz.outcome import Outcome, is_likely, pick, sentence
from tests.support.damage import DAMAGE

ALPHABET = 'abc \t"\\{}[]\u00e9\u202e\u2028\x85\U0001f600\x00\x1b\ufeff'
NAMES = (
    "d",
    "a b",
    "-x",
    "a[1]",
    "a*",
    "~",
    "a\nb",
    "a\x1b[2Jb",
    "\udcff",
    "x" * 200,
    "a%20b",
    "'",
)
SECONDS = 60


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Write a file, damage it in half of the draws, and read it."""
    suffix = pick(rng, tuple(WRITERS))
    content, documents = WRITERS[suffix](rng)
    packed, ending = _compressed(rng, content) if suffix in (".jsonl", ".txt") else (content, "")
    path = place / f"{pick(rng, NAMES)}{suffix}{ending}"
    path.write_bytes(packed)
    is_damaged = is_likely(rng, 0.5) and len(packed) > 0
    if is_damaged:
        pick(rng, [kind for kind in DAMAGE if kind.__name__ != "delete"])(path, rng)
        is_damaged = path.read_bytes() != packed
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    with _time_limit():
        outcome = _build(path, suffix)
        try:
            records = list(
                read_records(
                    epath.Path(path), text_field="text", bin_dtype="uint16", separator=None
                )
            )
        except DataError as error:
            assert is_damaged, f"refused though it is whole: {error}"
            return Outcome("refused", sentence(error))
    bad = [sentence(record) for record in records if isinstance(record, BadRecord)]
    if is_damaged:
        return Outcome("read damaged", f"{len(records)} records, {len(bad)} bad")
    assert not bad, bad
    found = [record.value for record in records if not isinstance(record, BadRecord)]
    assert len(found) == len(documents), f"{len(found)} documents, written: {len(documents)}"
    for ours, written in zip(found, documents, strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(written)), (ours, written)
    return outcome


def _build(path: pathlib.Path, suffix: str) -> Outcome:
    """Build the source of a run from the file."""
    is_text = suffix in (".jsonl", ".txt")
    given = {} if is_text else {"tokenizer": IdsConfig(vocab_size=50_000)}
    try:
        FilesConfig(path=(str(path),), **given).build()
    except DataError as error:
        return Outcome("no source", sentence(error))
    return Outcome("read")


# Formats.


def _text(rng: np.random.Generator) -> str:
    return "".join(pick(rng, ALPHABET) for _ in range(rng.integers(1, 60)))


def write_json_lines(rng: np.random.Generator) -> tuple[bytes, list[str]]:
    """Return lines of JSON, with any of the line ends in use, and their texts."""
    end = pick(rng, ("\n", "\r\n", "\r"))
    documents = [_text(rng) for _ in range(rng.integers(1, 20))]
    lines = [json.dumps({"text": text}, ensure_ascii=is_likely(rng, 0.5)) for text in documents]
    if is_likely(rng, 0.3):
        lines.insert(int(rng.integers(len(lines))), "")
    mark = "\ufeff" if is_likely(rng, 0.2) else ""
    last = end if is_likely(rng, 0.7) else ""
    return (mark + end.join(lines) + last).encode(), documents


def write_text(rng: np.random.Generator) -> tuple[bytes, list[str]]:
    """Return one text."""
    text = _text(rng)
    return text.encode(), [text]


def write_ids(rng: np.random.Generator) -> tuple[bytes, list[np.ndarray]]:
    """Return a .npy file of token ids."""
    ids = rng.integers(100, size=pick(rng, ((30,), (3, 10)))).astype(
        pick(rng, ("uint8", "int16", "uint16", "int32", "int64", ">i4"))
    )
    stream = io.BytesIO()
    np.save(stream, ids)
    return stream.getvalue(), list(ids) if ids.ndim == 2 else [ids]


def write_plain_ids(rng: np.random.Generator) -> tuple[bytes, list[np.ndarray]]:
    """Return a .bin file of token ids."""
    ids = rng.integers(60_000, size=int(rng.integers(1, 50))).astype("uint16")
    return ids.tobytes(), [ids]


WRITERS = {
    ".jsonl": write_json_lines,
    ".txt": write_text,
    ".npy": write_ids,
    ".bin": write_plain_ids,
}


def _compressed(rng: np.random.Generator, content: bytes) -> tuple[bytes, str]:
    """Return the content, compressed in half of the draws, and the suffix."""
    kind = pick(rng, ("", "", ".gz", ".zst"))
    if kind == ".gz":
        return gzip.compress(content), kind
    if kind == ".zst":
        return zstandard.ZstdCompressor(write_checksum=True).compress(content), kind
    return content, kind


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in this thread after SECONDS."""

    def expired(number: int, frame: object) -> None:
        raise TimeoutError(f"reading did not end within {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
