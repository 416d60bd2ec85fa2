# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads rows of several fields: objects of JSON lines (.gz, .zst too), rows of Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.compressed import chunks
from jaxmoe.data.reading.formats import is_json_lines
from jaxmoe.data.reading.records import BadRecord, JsonValue, json_lines
from jaxmoe.optional import require

_LONGEST_LINE = 2**24
"""Bytes of a line of JSON above which it is refused."""
_ROWS = 256
"""Rows of a Parquet file in memory."""


def read_rows(
    path: epath.Path,
    columns: Sequence[Sequence[str]],
    *,
    on_no_checksum: Callable[[], object] = lambda: None,
) -> Iterator[JsonValue | BadRecord]:
    """Yield the rows of a file, in order.

    Args:
        path: Local file, or file in a bucket.
        columns: Sets of columns of a Parquet file, of which the first that is there is read.
        on_no_checksum: Function to call when compressed content has no checksum.

    Raises:
        DataError: The file as a whole cannot be used.
    """
    try:
        if is_json_lines(path):
            yield from json_lines(path, chunks(path, on_no_checksum), longest=_LONGEST_LINE)
        elif path.name.lower().endswith(".parquet"):
            yield from _parquet(path, columns)
        else:
            raise DataError(
                f"{path} must be a .jsonl, .ndjson (also .gz, .zst) or .parquet file: write one "
                "object per line, or name other files"
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _parquet(path: epath.Path, columns: Sequence[Sequence[str]]) -> Iterator[JsonValue | BadRecord]:
    arrow = require("pyarrow", "parquet")
    parquet = require("pyarrow.parquet", "parquet")
    number = 0
    try:
        with path.open("rb") as stream:
            table = parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            columns_read = next((c for c in columns if set(c) <= set(names)), None)
            if columns_read is None:
                rule = ", or ".join(" and ".join(map(repr, c)) for c in columns)
                raise DataError(
                    f"{path} has columns {', '.join(map(repr, names))}, not {rule}: rename them"
                )
            for batch in table.iter_batches(batch_size=_ROWS, columns=list(columns_read)):
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
        return JsonValue(where, batch.to_pylist()[0])
    except UnicodeDecodeError as error:  # Arrow does not validate UTF-8
        return BadRecord(f"{where} is not UTF-8: {error}. Convert it to UTF-8")
