# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a file, and locates errors in it.

    .jsonl .ndjson           one object per line (ended by LF, CR LF or CR), the text in one field
    .json                    a list of objects, one object per line, or one object
    .csv .tsv                one record per row, the text in one column that the first line names
    .parquet                 one record per row, the text in one column (extra `parquet`)
    .npy                     token ids: [tokens], or [documents, tokens]
    .bin with .idx           token ids of Megatron-LM, with document borders
    .bin                     token ids without borders, of the config's integer type
    anything else            UTF-8 text, one document per file (`texts.py`); a list or lines of JSON
                             objects are records, one object of JSON is told of

The text may stand in a field of a field: `meta.text`. Text, JSON and CSV may be compressed (.gz,
.zst). Token ids without borders are cut after every
separator of the tokenizer. An error in one record (not UTF-8, not an object, no text) is yielded as
a `BadRecord`, so that reading can continue; an error in a file (truncated, damaged, of another
type) is raised.

To add a format: `jaxmoe/data/reading/formats.py` (a function that yields records, its suffix in
`read_records`), `tests/jaxmoe/data/test_formats.py` (a case).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
import tokenize
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.compressed import COMPRESSED, chunks
from jaxmoe.data.reading.records import BadRecord, JsonValue, Record, json_values, not_utf8
from jaxmoe.data.reading.rows import PARQUET, ROWS, has_rows, read_rows
from jaxmoe.data.reading.texts import read_text
from jaxmoe.json_bounds import parse_json
from jaxmoe.optional import require

_CHUNK = 2**20
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_SNIFFED = 2**16
_MOST_SNIFFED = 2**20
"""Characters of a text in which JSON is looked for: its first line, and the whole of short ones."""
DATA_SUFFIXES = (*ROWS, ".npy", ".bin", ".idx", *COMPRESSED)
"""Suffixes of files that are data even if their first bytes are not text."""
CONVERSATIONS = (
    ("messages",),
    ("conversations",),
    ("conversation",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Fields of records that are conversations: all of one of these sets, the first that is there."""
_LISTS_OF_TURNS = ("messages", "conversations", "conversation", "prompt", "completion")


def read_records(
    path: epath.Path,
    *,
    text_field: str,
    bin_dtype: str,
    separator: int | None,
    on_no_checksum: Callable[[], object] = lambda: None,
    on_records: Callable[[str], object] = lambda kind: None,
) -> Iterator[Record | BadRecord]:
    """Yield the records of a file, in order.

    Args:
        path: Local file, or file in a bucket.
        text_field: Field or column of the text.
        bin_dtype: Integer type (numpy name) of a .bin file without .idx.
        separator: Id that ends a document in files of ids without borders; None: one document.
        on_no_checksum: Function to call when compressed content has no checksum.
        on_records: Function to call with "JSON" when a file that is read as one text is that.

    Raises:
        DataError: The file as a whole cannot be used.
    """
    name = path.name.lower()
    try:
        if name.endswith(PARQUET):
            yield from _parquet(path, text_field)
        elif has_rows(path):
            columns = functools.partial(_text_column, path, text_field)
            rows = read_rows(path, columns, on_no_checksum=on_no_checksum)
            yield from _texts(rows, text_field)
        elif name.endswith(".npy"):
            yield from _numpy(path, separator)
        elif name.endswith(".bin") and index_file(path).exists():
            yield from _megatron(path)
        elif name.endswith(".bin"):
            yield from _plain_ids(path, np.dtype(bin_dtype), separator)
        else:
            text, begin = read_text(path, lambda: chunks(path, on_no_checksum), _MOST_SNIFFED + 2)
            kind = _kind_of_json(begin) if isinstance(text, Record) else None
            if kind == "records":
                yield from _texts(json_values(path, chunks(path, on_no_checksum)), text_field)
                return
            if kind is not None:
                on_records("JSON")
            yield text
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _texts(rows: Iterator[JsonValue | BadRecord], field: str) -> Iterator[Record | BadRecord]:
    for row in rows:
        yield row if isinstance(row, BadRecord) else _field_text(row.value, field, row.where)


def _text_column(path: epath.Path, field: str, names: Sequence[str]) -> Sequence[str]:
    """Return the column of the text of a table; raise a DataError if it has none."""
    if field not in names:
        listed = ", ".join(map(repr, names))
        way_out = way_to_text(names, "column")
        raise DataError(f"{path} has no column {field!r}; it has {listed}: {way_out}")
    return [field]


def _kind_of_json(text: str) -> Literal["records", "object"] | None:
    """Return what a text is by its begin: a list or lines of objects, another value, or no JSON.

    Args:
        text: Its begin; the whole, if that is shorter than what is looked at.
    """
    begin = text.lstrip("\ufeff \t\r\n")
    if not begin.startswith(("{", "[")):
        return None
    decoder = json.JSONDecoder()
    with contextlib.suppress(ValueError, RecursionError):
        if begin.startswith("["):
            item, _ = decoder.raw_decode(begin[1:].lstrip())
            if isinstance(item, dict):
                return "records"
        else:
            first, _, following = begin.partition("\n")
            if isinstance(parse_json(first), dict) and following.lstrip().startswith("{"):
                return "records"
    return "object" if _is_json(begin) else None


def _is_json(begin: str) -> bool:
    """Return whether a text, or its first line, is an object or a list of JSON."""
    for part in (begin.partition("\n")[0], begin):
        if len(part) <= _MOST_SNIFFED:
            with contextlib.suppress(ValueError):
                parse_json(part)
                return True
    return False


def index_file(path: epath.Path) -> epath.Path:
    """Return the file in which Megatron-LM stores the borders of a .bin file."""
    return path.with_suffix(".idx")


def _field_text(record: Any, field: str, where: str) -> Record | BadRecord:
    if not isinstance(record, dict):
        return BadRecord(
            f"{where}: expected an object with a text in field {field!r}, found a "
            f"{type(record).__name__}"
        )
    value = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            names = ", ".join(map(repr, record)) or "none"
            way_out = _way_to_records(record) or way_to_text(record, "field")
            return BadRecord(f"{where} has no field {field!r}; it has {names}: {way_out}")
        value = value[name]
    return text_record(value, field, where)


def _way_to_records(record: dict[str, Any]) -> str:
    """Return what to do with an object whose fields hold the records; empty for other objects."""
    lists = (
        name
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    )
    name = next(lists, None)
    if name is None or name in _LISTS_OF_TURNS:
        return ""
    return f"the list in {name!r} looks like the records: write that list alone into a file"


def way_to_text(names: Collection[str], noun: str) -> str:
    """Return what to do with records that lack the field of the text.

    Args:
        names: Fields or columns that they have.
        noun: What these are called.
    """
    way_out = f"name the {noun} of the text with --data.text_field"
    if not any(set(form) <= set(names) for form in CONVERSATIONS):
        return way_out
    return (
        "these are conversations, and data:chat trains on their answers by the chat template of the"
        f" model: choose data:chat --data.path FILES, or {way_out}"
    )


def text_record(value: Any, field: str, where: str) -> Record | BadRecord:
    """Return a record of text, or a BadRecord if the value is not text.

    Args:
        value: Value of the field.
        field: Name of the field.
        where: File and position in it.
    """
    if not isinstance(value, str):
        return BadRecord(
            f"{where}: field {field!r} must hold a text, found {type(value).__name__} "
            f"{repr(value)[:40]}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return BadRecord(
            f"{where}: field {field!r} has half a surrogate pair at character {error.start}"
        )
    return Record(where, value)


def _parquet(path: epath.Path, field: str) -> Iterator[Record | BadRecord]:
    arrow = require("pyarrow", "parquet")
    parquet = require("pyarrow.parquet", "parquet")
    number = 0
    try:
        with path.open("rb") as stream:
            table = parquet.ParquetFile(stream)
            schema = table.schema_arrow
            parts = [field] if field in schema.names else field.split(".")
            _text_column(path, parts[0] if parts[0] in schema.names else field, schema.names)
            if schema.names.count(parts[0]) > 1:
                raise DataError(f"{path} has two columns {parts[0]!r}: rename one of them")
            kind = schema.field(parts[0]).type
            for part in parts[1:]:
                if not arrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
                    raise DataError(f"{path}: column {parts[0]!r} is {kind}, without {field!r}")
                kind = kind.field(part).type
            is_dictionary = arrow.types.is_dictionary(kind)
            binary = _binary_type(arrow, kind.value_type if is_dictionary else kind)
            if binary is None:
                nested = ""
                if arrow.types.is_struct(kind):
                    nested = f" or a field of it, such as {field}.{kind.field(0).name},"
                raise DataError(
                    f"{path}: column {field!r} must hold text, found {kind}: name another column"
                    f"{nested} with --data.text_field"
                )
            for batch in table.iter_batches(columns=[".".join(parts)]):
                column = batch.column(0)
                if parts[1:]:
                    column = require("pyarrow.compute", "parquet").struct_field(column, parts[1:])
                column = column.dictionary_decode() if is_dictionary else column
                for value in column.cast(binary).to_pylist():
                    yield _parquet_text(value, field, f"{path} row {number}")
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged or not a Parquet file, found after row {number}: {error}"
        ) from error


def _binary_type(arrow: Any, kind: Any) -> Any:
    """Return the type of the bytes of a type of strings; None for other types.

    Arrow does not validate UTF-8: values are read as bytes, and decoded one by one.
    """
    if arrow.types.is_string(kind):
        return arrow.binary()
    if arrow.types.is_large_string(kind):
        return arrow.large_binary()
    return arrow.binary_view() if arrow.types.is_string_view(kind) else None


def _parquet_text(value: bytes | None, field: str, where: str) -> Record | BadRecord:
    try:
        return text_record(None if value is None else value.decode(), field, where)
    except UnicodeDecodeError as error:
        return not_utf8(where, error.start, error.object)


def _numpy(path: epath.Path, separator: int | None) -> Iterator[Record | BadRecord]:
    size = path.stat().length
    shape, is_fortran, dtype, start = _numpy_header(path)
    if len(shape) not in (1, 2) or is_fortran or any(n is True or n < 0 for n in shape):
        order = " in Fortran order" if is_fortran else ""
        raise DataError(
            f"{path} has shape {shape}{order}: expected [tokens] or [documents, tokens] "
            "in C order. Save the ids again with numpy.save"
        )
    ids = _map(path, dtype, math.prod(shape), start, size)
    if len(shape) == 1:
        yield from _cut(path, ids, separator)
        return
    for number, row in enumerate(ids.reshape(shape)):
        yield Record(f"{path} row {number}", row, number * shape[1])


def _numpy_header(path: epath.Path) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return the shape, the order, the dtype and the offset of the data of a .npy file."""
    with path.open("rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"its version is {version}, expected (1, 0), (2, 0) or (3, 0)")
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(stream)
        # A header is a Python literal: numpy's reader leaks the errors of Python's parser.
        except (ValueError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            reason = reason[:200].removesuffix(".")
            raise DataError(
                f"{path} is not a .npy file, or truncated in its header: {reason}. Save the "
                "ids again with numpy.save"
            ) from error
        return shape, is_fortran, dtype, stream.tell()


def _plain_ids(
    path: epath.Path, dtype: np.dtype, separator: int | None
) -> Iterator[Record | BadRecord]:
    size = path.stat().length
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of the {dtype.itemsize} of {dtype}: it is "
            "truncated, or of another type (--data.bin_dtype)"
        )
    yield from _cut(path, _map(path, dtype, size // dtype.itemsize, 0, size), separator)


def _megatron(path: epath.Path) -> Iterator[Record | BadRecord]:
    index = index_file(path)
    content = index.read_bytes()
    head = struct.calcsize("<9sQBQQ")
    if len(content) < head or not content.startswith(_MEGATRON_MAGIC):
        raise DataError(
            f"{index} is not a Megatron index: expected {head} bytes or more that begin with "
            f"{_MEGATRON_MAGIC!r}, found {len(content)} that begin with {content[:9]!r}"
        )
    _, version, code, num_sequences, num_borders = struct.unpack_from("<9sQBQQ", content)
    num_bytes = head + num_sequences * (4 + 8) + num_borders * 8
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise DataError(f"{index} has version {version} and type code {code}: expected 1, 1 to 8")
    if len(content) < num_bytes:
        raise DataError(
            f"{index} ends at byte {len(content)}: its {num_sequences} sequences and {num_borders} "
            f"borders need {num_bytes}"
        )
    lengths = np.frombuffer(content, "<i4", num_sequences, head).astype(np.int64)
    borders = np.frombuffer(content, "<i8", num_borders, head + num_sequences * 12)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    steps = np.diff(borders, prepend=0, append=len(lengths))
    if (lengths < 0).any() or (steps < 0).any():
        raise DataError(f"{index} is damaged: its lengths or borders are not in order")
    if not len(borders) or borders[0] != 0 or borders[-1] != len(lengths):
        place = f"from {borders[0]} to {borders[-1]}" if len(borders) else "absent"
        raise DataError(
            f"{index} has {len(lengths)} sequences, and the borders of its documents are {place}:"
            " the other sequences are of no document. Make the index again"
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code]).newbyteorder("<")
    ids = _map(path, dtype, int(starts[-1]), 0, path.stat().length)
    for number, (begin, end) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
        first = int(starts[begin])
        last = int(starts[end])
        yield Record(f"{path} document {number}", ids[first:last], first)


def _map(path: epath.Path, dtype: np.dtype, count: int, start: int, size: int) -> np.ndarray:
    """Return the token ids of a file, memory-mapped if the file is local."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":  # not timedelta64
        description = "pickled Python objects" if str(dtype) == "object" else dtype
        raise DataError(
            f"{path} holds {description}: expected integers, the ids of tokens. Convert them with "
            "ids.astype('int32')"
        )
    num_bytes = start + count * dtype.itemsize
    if size < num_bytes:
        raise DataError(
            f"{path} ends at byte {size}: its {count} ids of {dtype} need {num_bytes} bytes. It is "
            "truncated, copy it again"
        )
    if count == 0:
        return np.zeros(0, dtype)
    if "://" in str(path):
        return np.frombuffer(path.read_bytes(), dtype, count, start)
    return np.memmap(path, dtype, "r", start, (count,))


def _cut(path: epath.Path, ids: np.ndarray, separator: int | None) -> Iterator[Record]:
    """Yield documents that end with the separator; the whole file without a separator."""
    ends = [
        np.flatnonzero(ids[begin : begin + _CHUNK] == separator) + begin + 1
        for begin in range(0, len(ids) if separator is not None else 0, _CHUNK)
    ]
    borders = np.unique(np.concatenate([[0], *ends, [len(ids)]]))
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        yield Record(f"{path} from position {begin}", ids[begin:end], begin)
