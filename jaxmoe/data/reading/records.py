# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines a record of a file, and reads JSON: lines, lists, and one value after the other."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from etils import epath

from jaxmoe.data.batch import DataError
from pallas_kernels.array_types import Shaped

_SPACE = " \t\r\n"
_TRIMMED = 2**20
"""Characters of values that were read from which on they are forgotten."""
_LONGEST_LITERAL = 16
"""Characters at the end of a text in which an error may mean that the text goes on."""


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
    for number, (line, size) in enumerate(split_lines(content, longest), start=1):
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


def json_values(
    path: epath.Path, content: Iterator[bytes], *, longest: int | None = None
) -> Iterator[JsonValue | BadRecord]:
    """Yield the values of a list, or of a file with one value after the other, such as lines.

    Args:
        path: File, for messages.
        content: Its bytes in pieces of any size.
        longest: Bytes of a value above which it is left out; None: no limit.

    Raises:
        DataError: The file is no JSON, or not UTF-8.
    """
    head = first = b""
    for chunk in content:
        head += chunk
        first = head.removeprefix(codecs.BOM_UTF8).lstrip()
        if first.startswith(b"[") or b"\n" in first or len(first) > _TRIMMED:
            break
    if not first.startswith(b"[") and _is_lines(first):
        yield from json_lines(path, itertools.chain([head], content), longest=longest)
    else:
        stream = _JsonStream(path, itertools.chain([head], content))
        yield from stream.values(is_list=first.startswith(b"["), longest=longest)


def _is_lines(head: bytes) -> bool:
    """Return whether the first line of a file is a value by itself."""
    line, end, _ = head.partition(b"\n")
    if not end:
        return True
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(line)
        return True
    return False


class _JsonStream:
    """Reads JSON values from a stream, in memory for one of them.

    Args:
        path: File, for messages.
        content: Its bytes in pieces of any size.
    """

    def __init__(self, path: epath.Path, content: Iterator[bytes]):
        self._path = path
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._num_bytes = 0
        self._text = ""
        self._at = 0
        self._line = 1
        self._is_ended = False

    def values(self, *, is_list: bool, longest: int | None) -> Iterator[JsonValue | BadRecord]:
        """Yield the items of a list, or the values that stand one behind the other."""
        if is_list:
            self._skip("[")
        for number in itertools.count(1):
            if self._next() in (("]",) if is_list else ("",)):
                break
            if is_list and number > 1:
                self._skip(",")
                self._next()
            start = self._at
            value, self._at = self._parse()
            where = f"{self._path} record {number}"
            if longest is not None and self._at - start > longest:
                yield BadRecord(
                    f"{where} has {self._at - start:,} characters, which must be at most"
                    f" {longest:,}: write it as several records"
                )
            else:
                yield JsonValue(where, value)
        if is_list:
            self._skip("]")
            if self._next():
                self._refuse("nothing may stand behind the list")

    def _next(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                if self._at > _TRIMMED:
                    self._line += self._text.count("\n", 0, self._at)
                    self._text = self._text[self._at :]
                    self._at = 0
                return self._text[self._at]
            if not self._read(1):
                return ""

    def _skip(self, character: str) -> None:
        """Pass a character; raise a DataError if another comes."""
        if self._next() != character:
            self._refuse(f"expected {character!r}")
        self._at += 1

    def _parse(self) -> tuple[Any, int]:
        """Return the value here, and the place behind it."""
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read(1):  # a number may go on
                    return value, end
            except json.JSONDecodeError as error:
                is_near = error.pos >= len(self._text) - _LONGEST_LITERAL
                may_go_on = is_near or error.msg.startswith("Unterminated")
                if not may_go_on or not self._read(len(self._text) - self._at):
                    self._refuse(error.msg, error.pos)
            except (ValueError, RecursionError) as error:
                self._refuse(str(error))

    def _read(self, count: int) -> bool:
        """Append at least so many characters, if there are; return whether any came."""
        parts = [self._text]
        size = 0
        while size < count and not self._is_ended:
            chunk = next(self._content, None)
            self._is_ended = chunk is None
            try:
                text = self._decoder.decode(chunk or b"", self._is_ended)
            except UnicodeDecodeError as error:
                before = len(error.object) - len(chunk or b"")
                offset = self._num_bytes - before + error.start
                raise not_utf8(str(self._path), offset, error.object, error.start) from error
            self._num_bytes += len(chunk or b"")
            parts.append(text)
            size += len(text)
        self._text = "".join(parts)
        return size > 0

    def _refuse(self, reason: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._line + self._text.count("\n", 0, at)
        column = at - self._text.rfind("\n", 0, at)
        raise DataError(
            f"{self._path} is not JSON: {reason} (line {line}, column {column}). Expected a list of"
            " objects, or one object per line"
        )


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


def split_lines(content: Iterator[bytes], longest: int | None) -> Iterator[tuple[bytes, int]]:
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
