# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines a record of a file, and reads JSON lines."""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from jaxmoe.data.batch import DataError
from pallas_kernels.array_types import Shaped


class BadRecord(DataError):
    """A record that cannot be used, in a file whose other records can."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LongText:
    """A text that is too long for memory."""

    parts: Callable[[], Iterator[str]]
    """Reads the text anew, and yields it in parts; raises a DataError if it has changed."""
    num_characters: int
    num_bytes: int
    """Bytes in UTF-8."""
    sha256: bytes
    """Digest of these bytes."""
    zero: int
    """Offset of the first byte 0; -1 if there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A document, and its location."""

    where: str
    value: str | LongText | Shaped[np.ndarray, " S"]
    first: int = 0
    """Position of the first token id in the file, for documents of ids."""
    weights: Shaped[np.ndarray, " S"] | None = None
    """Loss weight of each token id (uint8), for collections with weights."""
    digest: int | None = None
    """64 bits that equal documents share; of the text or the ids when None."""


@dataclasses.dataclass(frozen=True, slots=True)
class JsonValue:
    """A value in a file, and its location."""

    where: str
    value: Any


def json_lines(
    path: epath.Path, content: Iterator[bytes], *, longest: int | None = None
) -> Iterator[JsonValue | BadRecord]:
    """Yield the value of each line that is not blank.

    Args:
        path: File, for messages.
        content: Its bytes in pieces of any size.
        longest: Bytes of a line above which it is not read; None: no limit.
    """
    offset = 0
    for number, (line, size) in enumerate(_lines(content, longest), start=1):
        where = f"{path} line {number} (byte {offset})"
        start = offset
        offset = offset + size
        if number == 1 and line.startswith(codecs.BOM_UTF8):  # written by editors on Windows
            start = start + len(codecs.BOM_UTF8)
            line = line[len(codecs.BOM_UTF8) :]
        if longest is not None and size > longest:
            yield BadRecord(
                f"{where} has {size:,} bytes, which must be at most {longest:,}: write it as "
                "several lines"
            )
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            yield not_utf8(f"{path} line {number}", start + error.start, error.object, error.start)
        except json.JSONDecodeError as error:
            yield BadRecord(f"{where} is not JSON: {error.msg} (column {error.colno})")
        except (ValueError, RecursionError) as error:
            yield BadRecord(f"{where} is JSON that cannot be read: {error}")
        else:
            yield JsonValue(where, value)


class _RecordLine:
    """Parts of a line, joined once: a file may be one line.

    Args:
        longest: Bytes above which content is counted and dropped; None: no limit.
    """

    def __init__(self, longest: int | None):
        self._longest = longest
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """Append a part."""
        if self._longest is None or self._size <= self._longest:
            self._parts.append(part)
        else:
            self._parts[-1] = part  # the last is kept for its end
        self._size += len(part)

    def ends_with(self, end: bytes) -> bool:
        """Return whether the last part ends so."""
        return bool(self._parts) and self._parts[-1].endswith(end)

    def taken(self) -> tuple[bytes, int]:
        """Return content and size of the line, and begin the next one."""
        line = b"".join(self._parts), self._size
        self._parts = []
        self._size = 0
        return line


def _lines(content: Iterator[bytes], longest: int | None) -> Iterator[tuple[bytes, int]]:
    """Yield the lines, each with its end (a line feed, a carriage return, or both), and its size.

    Content of a line beyond `longest` may be missing.
    """
    begun = _RecordLine(longest)
    for chunk in filter(None, content):
        if begun.ends_with(b"\r"):  # the end may have been cut in two
            if chunk.startswith(b"\n"):
                begun.add(b"\n")
                chunk = chunk[1:]
            yield begun.taken()
        *lines, last = chunk.splitlines(keepends=True) or [b""]
        for line in lines:
            begun.add(line)
            yield begun.taken()
        if last:
            begun.add(last)
        if last.endswith(b"\n"):
            yield begun.taken()
    line, size = begun.taken()
    if size:
        yield line, size


def not_utf8(where: str, offset: int, content: bytes, at: int | None = None) -> BadRecord:
    """Return the record of content that is not UTF-8.

    Args:
        where: File, and line or row.
        offset: Place of the byte in the file.
        content: Bytes that were decoded.
        at: Place of the byte in them; `offset` when None.
    """
    byte = content[offset if at is None else at]
    return BadRecord(
        f"{where} is not UTF-8: byte {byte:#04x} at offset {offset}. Convert it to UTF-8"
    )
