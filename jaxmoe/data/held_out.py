# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the documents to hold out, and yields the texts of the others.

A document is held out by its own sha256, so that equal documents stay together and adding one moves
no other. If fewer than five are expected, the fraction is counted off in the order of their sha256;
if less than one is expected, the end of every document is held out. Conversations are held out
whole, at least one: the end of an answer is no answer.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxmoe.data.reading.collection import Collection
from jaxmoe.data.reading.records import LongText, Record
from jaxmoe.data.tokenizer.cutting import pieces
from pallas_kernels.array_types import Shaped

_FEWEST_BY_DIGEST = 5
"""Expected number of held-out documents below which they are counted off instead."""


def held_out(
    digests: Shaped[np.ndarray, " documents"], fraction: float, *, is_whole: bool = False
) -> np.ndarray | None:
    """Return which documents are held out; None if the end of each document is held out instead.

    Args:
        digests: Digest of each document, 64 bits.
        fraction: Share of the documents to hold out.
        is_whole: Whether to hold out one document where less than one is expected.
    """
    expected = len(digests) * fraction
    if expected >= _FEWEST_BY_DIGEST:
        return digests < np.uint64(int(fraction * 2**64))
    if expected < 1 and not is_whole:
        return None
    return digests <= np.sort(digests)[max(1, round(expected)) - 1]


def train_texts(collection: Collection, fraction: float) -> Iterator[str]:
    """Yield the texts on which a vocabulary is trained: those that are not held out.

    At most one document is in memory; one that is too long for it is yielded in pieces.

    Args:
        collection: All documents.
        fraction: Share of the documents that is held out; 0: none.
    """
    if not fraction:
        for _, text in _texts(collection):
            yield from _strings(text)
        return
    first = itertools.islice(_texts(collection), math.ceil(_FEWEST_BY_DIGEST / fraction))
    digests = np.array([file for file, _ in first], np.uint64)
    mask = held_out(digests, fraction, is_whole=collection.has_weights)
    if mask is None:
        for _, text in _texts(collection):
            yield from _strings(text, 1 - fraction)
        return
    for number, (file, text) in enumerate(_texts(collection)):
        if number < len(mask):
            is_held_out = mask[number]
        else:  # enough documents that each one's digest decides
            is_held_out = file < int(fraction * 2**64)
        if not is_held_out:
            yield from _strings(text)


def digest(content: bytes) -> int:
    """Return the first 8 bytes of the sha256 as an integer."""
    return short_digest(hashlib.sha256(content).digest())


def short_digest(sha256: bytes) -> int:
    """Return the first 8 bytes of a sha256 as an integer."""
    return int.from_bytes(sha256[:8], "big")


def _texts(collection: Collection) -> Iterator[tuple[int, str | LongText]]:
    """Yield digest and text of each document."""
    for record in collection.records(None):
        if not isinstance(record, Record):
            continue
        known = record.digest
        if isinstance(record.value, LongText):
            yield short_digest(record.value.sha256) if known is None else known, record.value
        elif isinstance(record.value, str) and record.value:
            yield digest(record.value.encode()) if known is None else known, record.value


def _strings(text: str | LongText, share: float = 1.0) -> Iterator[str]:
    """Yield the begin of a text: as one string, or in pieces if it is long."""
    if isinstance(text, str):
        yield text[: int(len(text) * share)]
    else:
        yield from pieces(_begin(text.parts(), int(text.num_characters * share)))


def _begin(parts: Iterable[str], count: int) -> Iterator[str]:
    """Yield the first characters of a text that comes in parts."""
    for part in parts:
        yield part[:count]
        count -= min(count, len(part))
        if not count:
            return
