# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses JSON of untrusted files with bounds on bytes, depth and number of values.

`json.loads` alone raises RecursionError for deep JSON, and code that walks the result may as well.
Files are opened without waiting, as a FIFO would make a reader do.

    read_json     one value; errors are for a caller that names the file
    read_record   an object or a list of a run directory; errors name the file
    read_lines    the objects of a file with one a line; lines that hold none are passed over
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxmoe.disk import kind_of_mode

MAX_JSON_BYTES = 1 << 24
MAX_JSON_VALUES = 1 << 19
"""Largest number of objects and lists in one file."""
MAX_JSON_DEPTH = 64
_BLOCK_BYTES = 1 << 20
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text"}
_KINDS |= {dict: "an object", list: "a list"}

# Possessive: linear in the length of the text, also for strings that do not end.
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class NotTextError(ValueError):
    """A file is not in UTF-8, so that it is no JSON."""


def read_json(
    path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES
) -> Any:
    """Return the content of a JSON file.

    Args:
        path: Plain file, in UTF-8.
        max_bytes: Largest size of the file.
        max_values: Largest number of objects and lists.

    Raises:
        ValueError: The file is too large or too deep, not JSON, or no plain file.
        OSError: It is missing or cannot be read.
    """
    return parse_json(read_text(path, max_bytes=max_bytes), max_values=max_values)


def read_text(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text of a plain file.

    Args:
        path: File, in UTF-8.
        max_bytes: Largest size of the file.

    Raises:
        NotTextError: It is not in UTF-8.
        ValueError: It is a directory, a FIFO or the like, or too large.
        OSError: It is missing or cannot be read.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1)
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"{size} bytes, at most {max_bytes} are allowed")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(f"not in UTF-8 ({error})") from error


def read_record(path: pathlib.Path, kind: type[dict] | type[list]) -> Any:
    """Return the object or the list in a file of a run directory.

    Args:
        path: File.
        kind: Type of the value.

    Raises:
        ValueError: It cannot be used; the message names the file.
        OSError: It is missing or cannot be read.
    """
    with name_file(path):
        text = read_text(path)
    return parse_record(text, kind, path)


def parse_record(
    text: str, kind: type[dict] | type[list], name: object, way_out: str = "restore or remove it"
) -> Any:
    """Return the object or the list in the text of a file.

    Args:
        text: JSON.
        kind: Type of the value.
        name: File, for messages.
        way_out: End of the messages.

    Raises:
        ValueError: The text cannot be used; the message names the file.
    """
    with name_file(name, way_out):
        value = parse_json(text)
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} holds {_KINDS[type(value)]}, and must hold {_KINDS[kind]}: {way_out}"
        )
    return value


@contextlib.contextmanager
def name_file(name: object, way_out: str = "restore or remove it") -> Iterator[None]:
    """Name the file in errors about its text.

    Args:
        name: File.
        way_out: End of the messages.

    Raises:
        ValueError: One was raised inside.
    """
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error}): {way_out}") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be used ({error}): {way_out}") from error


def read_lines(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with one a line, each with the byte position after its line.

    Args:
        path: File; lines that are cut, too long or no object are passed over.

    Raises:
        ValueError: It is no plain file; the message names it.
        OSError: It is missing or cannot be read.
    """
    for position, line in read_byte_lines(path):
        if (value := parse_line(line)) is not None:
            yield position, value


def read_byte_lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file, each with the byte position after it; see `read_lines`."""
    position = 0
    with name_file(path):
        file = _open(path)
    with file:
        while line := file.readline(MAX_JSON_BYTES):
            position += len(line)
            if line.endswith(b"\n"):
                yield position, line


def read_byte_lines_backwards(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file from the last on, each with the byte position after it.

    Args:
        path: File; lines that are cut are passed over.

    Raises:
        ValueError: It is no plain file; the message names it.
        OSError: It is missing or cannot be read.
    """
    with name_file(path):
        file = _open(path)
    with file:
        begin = file.seek(0, os.SEEK_END)
        size, rest = _BLOCK_BYTES, b""
        while begin:
            begin -= (length := min(begin, size))
            file.seek(begin)
            block = file.read(length) + rest
            # What stands before the first end of a line is read on in the next block.
            start = block.find(b"\n") + 1 if begin else 0
            if begin and not start:
                size, rest = 2 * size, block
                continue
            rest = block[:start]
            *lines, cut = block[start:].split(b"\n")
            end = begin + len(block) - len(cut)
            for line in reversed(lines):
                yield end, line + b"\n"
                end -= len(line) + 1


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None where there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _open(path: pathlib.Path) -> BinaryIO:
    """Open a plain file to be read; a FIFO is refused, and not waited for."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if (kind := kind_of_mode(os.fstat(opened).st_mode)) is not None:
        os.close(opened)
        raise ValueError(f"it is {kind}, and must be a plain file")
    return os.fdopen(opened, "rb")


def parse_json(text: str, *, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON.
        max_values: Largest number of objects and lists.

    Raises:
        ValueError: The text is too deep, has too many values, or is not JSON (JSONDecodeError).
    """
    depth = values = 0
    for match in _TOKENS.finditer(text):
        if match[0] in "[{":
            values = values + 1
            depth = depth + 1
            if depth > MAX_JSON_DEPTH or values > max_values:
                raise ValueError(
                    f"more than {max_values} objects and lists, or nested deeper than"
                    f" {MAX_JSON_DEPTH}"
                )
        elif match[0] in "]}":
            depth -= 1
    return json.loads(text)
