# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a file as one text, in memory that does not depend on its size.

A text of at most `_WINDOW` characters is one string. A longer one is read to its end for its size,
its sha256 and errors of UTF-8, and again, in parts, each time that its characters are needed. Its
ids are those of the whole: `jaxmoe/data/tokenizer/encoding.py` finds where it may be cut.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
from collections.abc import Callable, Iterator

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.records import BadRecord, LongText, Record, not_utf8

_WINDOW = 2**23
"""Characters up to which a text is one string."""


def read_text(
    path: epath.Path, content: Callable[[], Iterator[bytes]], most: int
) -> tuple[Record | BadRecord, str]:
    """Return the record of a text, and the begin of the text.

    Args:
        path: File, for messages.
        content: Returns the bytes of the file, in chunks.
        most: Characters of the begin.
    """
    sha256 = hashlib.sha256()
    kept: list[str] = []
    begin = ""
    num_characters = 0
    num_bytes = 0
    zero = -1
    decoder = _Utf8(path)
    try:
        for chunk in content():
            if zero < 0 and (at := chunk.find(0)) >= 0:
                zero = num_bytes + at
            sha256.update(chunk)
            num_bytes += len(chunk)
            text = decoder.decode(chunk)
            num_characters += len(text)
            begin += text[: most - len(begin)]
            if num_characters <= _WINDOW:
                kept.append(text)
            else:
                kept.clear()
        decoder.end()
    except BadRecord as error:
        return error, ""
    if num_characters <= _WINDOW:
        return Record(str(path), "".join(kept)), begin
    text = LongText(
        parts=functools.partial(_parts, path, content, num_bytes),
        num_characters=num_characters,
        num_bytes=num_bytes,
        sha256=sha256.digest(),
        zero=zero,
    )
    return Record(str(path), text), begin


class _Utf8:
    """Decodes UTF-8 in chunks.

    Args:
        path: File, for messages.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0

    def decode(self, chunk: bytes, *, is_last: bool = False) -> str:
        """Return the characters that a chunk ends; raise a BadRecord if they are not UTF-8."""
        before, _ = self._decoder.getstate()
        try:
            text = self._decoder.decode(chunk, is_last)
        except UnicodeDecodeError as error:
            offset = self._offset - len(before) + error.start
            raise not_utf8(str(self._path), offset, error.object, error.start) from error
        self._offset += len(chunk)
        return text

    def end(self) -> None:
        """Raise a BadRecord if the last character is not complete."""
        self.decode(b"", is_last=True)


def _parts(
    path: epath.Path, content: Callable[[], Iterator[bytes]], num_bytes: int
) -> Iterator[str]:
    """Yield a text in parts; raise a DataError unless it has the bytes that it had before."""
    decoder = _Utf8(path)
    count = 0
    try:
        for chunk in content():
            count += len(chunk)
            yield decoder.decode(chunk)
        decoder.end()
    except BadRecord as error:
        raise _change_error(path) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if count != num_bytes:
        raise _change_error(path)


def _change_error(path: epath.Path) -> DataError:
    return DataError(f"{path} changed while it was read: start again when nothing writes to it")
