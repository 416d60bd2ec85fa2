# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads rows of several fields.

    .jsonl .ndjson    one object per line
    .json             a list of objects, one object per line, or one object
    .csv .tsv         the names of the columns in the first line
    .parquet          one object per row (extra `parquet`)

All but Parquet may be compressed (.gz, .zst), and begin with a byte order mark.
"""

from __future__ import annotations

import codecs
import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.compressed import chunks, plain_name
from jaxmoe.data.reading.records import (
    BadRecord,
    JsonValue,
    json_lines,
    json_values,
    not_utf8,
    split_lines,
)
from jaxmoe.optional import require

JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
PARQUET = ".parquet"
ROWS = (*JSON_LINES, ".json", *TABLES, PARQUET)
"""Suffixes of files of rows; behind them that of a compression, except for Parquet."""
_LONGEST_FIELD = 2**31 - 1
"""Characters of a field of CSV above which the file is refused."""
_ROWS = 256
"""Rows of a Parquet file in memory."""

Columns = Callable[[Sequence[str]], Sequence[str]]
"""Returns which of the columns of a table to read, in order; raises a DataError for none."""


def has_rows(path: epath.Path) -> bool:
    """Return whether the name of a file is one of rows.

    Args:
        path: Any path.
    """
    return path.name.lower().endswith(PARQUET) or plain_name(path).endswith(ROWS[:-1])


def read_rows(
    path: epath.Path,
    columns: Columns,
    *,
    longest: int | None = None,
    on_no_checksum: Callable[[], object] = lambda: None,
) -> Iterator[JsonValue | BadRecord]:
    """Yield the rows of a file, in order.

    Args:
        path: Local file, or file in a bucket.
        columns: Which columns of a table to read; records of JSON come with all their fields.
        longest: Bytes of a record of JSON above which it is refused; None: no limit.
        on_no_checksum: Function to call when compressed content has no checksum.

    Raises:
        DataError: The file as a whole cannot be used.
    """
    name = plain_name(path)
    try:
        if name.endswith(JSON_LINES):
            yield from json_lines(path, chunks(path, on_no_checksum), longest=longest)
        elif name.endswith(".json"):
            yield from json_values(path, chunks(path, on_no_checksum), longest=longest)
        elif name.endswith(TABLES):
            yield from _table(path, chunks(path, on_no_checksum), columns)
        elif path.name.lower().endswith(PARQUET):
            yield from _parquet(path, columns)
        else:
            raise DataError(
                f"{path} must be a .jsonl, .ndjson, .json, .csv, .tsv (also .gz, .zst) or .parquet"
                " file: write one object per line, or name other files"
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _table(
    path: epath.Path, content: Iterator[bytes], columns: Columns
) -> Iterator[JsonValue | BadRecord]:
    """Yield the rows of a table whose first line names the columns."""
    lines = _decoded_lines(path, content)
    first = next((line for line in lines if line.strip()), "")
    marks = "\t" if plain_name(path).endswith(".tsv") else ",;\t"
    mark = max(marks, key=first.count)
    reader = csv.reader(itertools.chain([first], lines), delimiter=mark, strict=True)
    names = [name.strip() for name in _next_row(path, reader) or ()]
    if not any(names):
        raise DataError(f"{path} is empty: its first line names the columns")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} has two columns {repeated[0]!r}: rename one in its first line")
    chosen = columns(names)
    while (row := _next_row(path, reader)) is not None:
        where = f"{path} line {reader.line_num}"
        if len(row) == len(names):
            cells = dict(zip(names, row, strict=True))
            yield JsonValue(where, {name: cells[name] for name in chosen})
        elif row:
            yield BadRecord(
                f"{where} has {len(row)} columns, and the first line names {len(names)}: quote"
                f" cells that hold {mark!r} or line ends"
            )


def _decoded_lines(path: epath.Path, content: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines of a text, with their ends and without a byte order mark."""
    offset = 0
    for number, (line, size) in enumerate(split_lines(content, None), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            place = f"{path} line {number}"
            raise not_utf8(place, offset + error.start, error.object, error.start) from error
        yield text.removeprefix(codecs.BOM_UTF8.decode()) if number == 1 else text
        offset += size


def _next_row(path: epath.Path, reader: Any) -> list[str] | None:
    """Return the next row; None at the end. Cells may be longer than 131,072 characters."""
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        return next(reader, None)
    except csv.Error as error:
        raise DataError(
            f"{path} line {reader.line_num} is no row of a table: {error}. Quote cells that hold"
            " quotes or line ends, and write a quote in them twice"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: epath.Path, columns: Columns) -> Iterator[JsonValue | BadRecord]:
    arrow = require("pyarrow", "parquet")
    parquet = require("pyarrow.parquet", "parquet")
    number = 0
    try:
        with path.open("rb") as stream:
            table = parquet.ParquetFile(stream)
            chosen = list(columns(table.schema_arrow.names))
            for batch in table.iter_batches(batch_size=_ROWS, columns=chosen):
                for row in range(batch.num_rows):
                    yield _row(batch.slice(row, 1), f"{path} row {number}")
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged or not a Parquet file, found after row {number}: {error}"
        ) from error


def _row(batch: Any, where: str) -> JsonValue | BadRecord:
    """Return the value of a batch of one row."""
    try:
        return JsonValue(where, _without_nulls(batch.to_pylist()[0]))
    except UnicodeDecodeError as error:  # Arrow does not validate UTF-8
        return BadRecord(f"{where} is not UTF-8: {error}. Convert it to UTF-8")


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that Parquet adds to objects which lack them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
