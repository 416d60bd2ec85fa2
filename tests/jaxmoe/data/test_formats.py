# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""File formats are read back, and errors name their position."""

import gzip
import itertools
import json
import re
import struct
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from etils import epath

from jaxmoe.data import DataError, FilesConfig
from jaxmoe.data.reading.formats import read_records
from jaxmoe.data.reading.records import BadRecord, Record, json_lines
from jaxmoe.tracking import MissingPackageError

TEXTS = ["one", "two\nlines", "drei \u00e4"]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))


def _read(path, *, text_field="text", bin_dtype="uint16", separator=None):
    return list(
        read_records(
            epath.Path(path), text_field=text_field, bin_dtype=bin_dtype, separator=separator
        )
    )


def _texts(path, **fields):
    return [
        record.value if isinstance(record, Record) else record for record in _read(path, **fields)
    ]


def _ids(path, **fields):
    return [np.asarray(value).tolist() for value in _texts(path, **fields)]


def _zstd(content):
    return zstandard.ZstdCompressor().compress(content)


def _parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def _megatron(path, documents, *, code=8):
    lengths = [len(document) for document in documents]
    ids = np.concatenate([np.array(d, np.uint16) for d in documents])
    path.write_bytes(ids.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1)
    pointers = 2 * (np.cumsum(lengths) - lengths)
    path.with_suffix(".idx").write_bytes(
        head
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )
    return path


def test_text_files_are_one_document_each(tmp_path):
    (tmp_path / "a.txt").write_text("h\u00e9\n", encoding="utf-8")
    assert _texts(tmp_path / "a.txt") == ["h\u00e9\n"]
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(b"x = 1"))
    assert _texts(tmp_path / "a.py.gz") == ["x = 1"]
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(b"\1\0"))  # not ids of the compressed bytes
    assert _texts(tmp_path / "a.bin.gz") == ["\1\0"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_are_read(tmp_path, suffix):
    content = LINES.encode()
    if suffix == ".gz":
        content = gzip.compress(content[:20]) + gzip.compress(content[20:])  # two members
    if suffix == ".zst":
        content = _zstd(content[:20]) + _zstd(content[20:])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content)
    assert _texts(path) == TEXTS


def test_lines_across_chunks_and_without_newline(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmoe.data.reading.compressed._CHUNK", 7)
    (tmp_path / "a.jsonl").write_text(LINES.rstrip("\n").replace("\n", "\n\n"), encoding="utf-8")
    assert _texts(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_json_lines_from_windows_are_read(tmp_path, start):
    (tmp_path / "a.jsonl").write_bytes((start + LINES.replace("\n", "\r\n")).encode())
    assert _texts(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_json_lines_end_in_any_usual_way(tmp_path, monkeypatch, end, chunk):
    """Carriage returns alone are those of the classic Mac; ends may be cut by chunks."""
    monkeypatch.setattr("jaxmoe.data.reading.compressed._CHUNK", chunk)
    texts = ["a", "b\rc\n", "d\u2028"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for last in ("", end, end + end):
        (tmp_path / "a.jsonl").write_bytes((end.join(lines) + last).encode())
        assert _texts(tmp_path / "a.jsonl") == texts
    numbers = [re.search(r"line (\d)", record.where)[1] for record in _read(tmp_path / "a.jsonl")]
    assert numbers == ["1", "2", "3"]


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "dictionary", "large dictionary"]
)
def test_parquet_text_columns_of_any_type_are_read(tmp_path, kind):
    values = pyarrow.string() if kind == "dictionary" else pyarrow.large_string()
    if "dictionary" in kind:
        column = pyarrow.array([*TEXTS, *TEXTS], values).dictionary_encode()
    else:
        column = pyarrow.array([*TEXTS, *TEXTS], getattr(pyarrow, kind)())
    assert _texts(_parquet(tmp_path / "a.parquet", {"text": column})) == [*TEXTS, *TEXTS]


def test_parquet_is_read(tmp_path):
    path = _parquet(tmp_path / "a.parquet", {"body": TEXTS, "n": [1, 2, 3]})
    assert _texts(path, text_field="body") == TEXTS
    records = _read(_parquet(tmp_path / "b.parquet", {"text": ["x", None]}))
    assert isinstance(records[1], BadRecord)
    assert re.search(
        r"b.parquet row 1: field 'text' must hold a text, found NoneType", str(records[1])
    )


def test_two_columns_of_a_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(TEXTS)] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet has two columns 'text': rename one of them"):
        _read(tmp_path / "a.parquet")


def test_zero_bytes_behind_a_member_of_gzip_are_padding(tmp_path):
    padding = bytes(1000)
    content = gzip.compress(b"one ") + padding + gzip.compress(b"two") + padding
    (tmp_path / "a.txt.gz").write_bytes(content)
    assert _texts(tmp_path / "a.txt.gz") == [gzip.decompress(content).decode()] == ["one two"]
    (tmp_path / "a.txt.gz").write_bytes(content + b"more")
    with pytest.raises(DataError, match="a.txt.gz is damaged near byte 20"):
        _read(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("borders", [(1, 2, 3), (0, 2), (0, 1, 2), ()])
def test_an_index_that_leaves_sequences_out_is_refused(tmp_path, borders):
    path = _megatron(tmp_path / "a.bin", [[1, 2], [3], [4, 5, 6]])
    index = path.with_suffix(".idx")
    kept = index.read_bytes()[: -4 * 8]
    head = kept[:26] + struct.pack("<Q", len(borders)) + kept[34:]
    index.write_bytes(head + np.array(borders, np.int64).tobytes())
    with pytest.raises(DataError, match="a.idx has 3 sequences, and the borders of its documents"):
        _read(path)


def test_token_id_formats_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 0, 7, 0, 8], np.uint16))
    assert _ids(tmp_path / "a.npy", separator=0) == [[5, 6, 0], [7, 0], [8]]
    assert _ids(tmp_path / "a.npy") == [[5, 6, 0, 7, 0, 8]]
    np.save(tmp_path / "b.npy", np.arange(6).reshape(2, 3))
    assert _ids(tmp_path / "b.npy") == [[0, 1, 2], [3, 4, 5]]
    (tmp_path / "c.bin").write_bytes(np.array([1, 2, 70000], np.uint32).tobytes())
    assert _ids(tmp_path / "c.bin", bin_dtype="uint32") == [[1, 2, 70000]]
    assert _ids(_megatron(tmp_path / "d.bin", [[1, 2], [3], [4, 5, 6]])) == [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n[1]\n', r"line 2 \(byte 14\): expected an object .* found a list"),
        (
            b'{"text": "a"}\n{"body": 1, "id": 2}\n',
            r"line 2 \(byte 14\) has no field 'text'; it has 'body', 'id': .*--data.text_field",
        ),
        (b'{"text": 3}\n', r"line 1 \(byte 0\): field 'text' must hold a text, found int 3"),
        (b'{"text": "a"\n', r"line 1 \(byte 0\) is not JSON: .*column 13\)"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2 is not UTF-8: byte 0xff at offset 24"),
        (b'{"text": ' + b"[" * 100_000 + b"\n", r"line 1 \(byte 0\) is JSON that cannot be read"),
        (b'{"n": ' + b"1" * 5000 + b"}\n", r"line 1 \(byte 0\) is JSON that cannot be read"),
    ],
)
def test_bad_record_names_its_place_and_reading_continues(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content + b'{"text": "good"}\n')
    *_, bad, good = _read(path)
    assert isinstance(bad, BadRecord) and re.search(f"a.jsonl {message}", str(bad))
    assert isinstance(good, Record) and good.value == "good"


def test_invalid_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xc3( bad")
    (bad,) = _read(tmp_path / "a.txt")
    assert re.search(r"a.txt is not UTF-8: byte 0xc3 at offset 5\. Convert it", str(bad))


def test_parquet_with_invalid_utf8(tmp_path):
    texts = pyarrow.array([b"good", b"S\xfcd", b"good"], pyarrow.binary()).view(pyarrow.string())
    first, bad, last = _read(_parquet(tmp_path / "a.parquet", {"text": texts}))
    assert isinstance(first, Record) and isinstance(last, Record) and last.value == "good"
    assert isinstance(bad, BadRecord)
    assert re.search(r"a.parquet row 1 is not UTF-8: byte 0xfc at offset 1\.", str(bad))


def test_zstd_archives_with_a_large_window(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, strategy=1, hash_log=6)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(frame.compress(LINES.encode()) + frame.flush())
    assert _texts(tmp_path / "a.jsonl.zst") == TEXTS


def _damage(tmp_path, kind):
    """A truncated or damaged file of some kind."""
    path = tmp_path / kind
    if kind == "cut.jsonl.gz":
        path.write_bytes(gzip.compress(LINES.encode() * 50)[:-20])
    elif kind == "cut.jsonl.zst":
        path.write_bytes(_zstd(LINES.encode() * 50)[:-5])
    elif kind == "no.txt.gz":
        path.write_bytes(b"plain text")
    elif kind == "no.txt.zst":
        _zstd(b"")
        path.write_bytes(b"plain text")
    elif kind == "flipped.txt.gz":
        content = bytearray(gzip.compress(bytes(range(256)) * 8))
        content[40] ^= 0xFF
        path.write_bytes(content)
    elif kind == "cut.parquet":
        path.write_bytes(_parquet(tmp_path / "whole.parquet", {"text": TEXTS}).read_bytes()[:-9])
    elif kind == "column.parquet":
        _parquet(path, {"body": TEXTS, "n": [1, 2, 3]})
    elif kind == "number.parquet":
        _parquet(path, {"text": [1, 2, 3]})
    elif kind == "cut.npy":
        np.save(path, np.arange(50, dtype=np.int32))
        path.write_bytes(path.read_bytes()[:-9])
    elif kind == "head.npy":
        path.write_bytes(b"\x93NUM")
    elif kind == "float.npy":
        np.save(path, np.ones(4, np.float32))
    elif kind == "cube.npy":
        np.save(path, np.ones((2, 2, 2), np.int32))
    elif kind == "odd.bin":
        path.write_bytes(b"123")
    elif kind == "cut.bin":
        _megatron(path, [[1, 2], [3]])
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "index.bin":
        index = _megatron(path, [[1, 2], [3]]).with_suffix(".idx")
        index.write_bytes(index.read_bytes()[:-1])
    elif kind == "head.bin":
        _megatron(path, [[1, 2], [3]]).with_suffix(".idx").write_bytes(b"text")
    elif kind == "borders.bin":
        index = _megatron(path, [[1, 2], [3]]).with_suffix(".idx")
        index.write_bytes(index.read_bytes()[:-24] + np.array([-1, 1, 2], "<i8").tobytes())
    elif kind == "float.bin":
        _megatron(path, [[1, 2], [3]], code=7)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut.jsonl.gz", r"cut.jsonl.gz ends at byte \d+ in the middle of its compressed content"),
        (
            "cut.jsonl.zst",
            r"cut.jsonl.zst ends at byte \d+ in the middle of its compressed content",
        ),
        ("no.txt.gz", r"no.txt.gz is damaged near byte 0"),
        ("no.txt.zst", r"no.txt.zst is damaged near byte 0"),
        ("flipped.txt.gz", r"flipped.txt.gz is damaged near byte 0"),
        ("cut.parquet", r"cut.parquet is damaged or not a Parquet file, found after row 0"),
        ("column.parquet", r"has no column 'text'; it has 'body', 'n': name .*--data.text_field"),
        ("number.parquet", r"number.parquet: column 'text' must hold text, found int64"),
        (
            "cut.npy",
            r"cut.npy ends at byte 319: its 50 ids of int32 need 328 bytes. .* copy it again",
        ),
        ("head.npy", r"head.npy is not a .npy file, or trunc"),
        ("float.npy", r"float.npy holds float32: expected integers"),
        ("cube.npy", r"cube.npy has shape \(2, 2, 2\): expected \[tokens\] or"),
        ("odd.bin", r"odd.bin has 3 bytes, not a multiple of the 2 of uint16: .*--data.bin_dtype"),
        ("cut.bin", r"cut.bin ends at byte 5: its 3 ids of uint16 need 6 bytes"),
        ("index.bin", r"index.idx ends at byte 81: its 2 sequences and 3 borders need 82"),
        ("head.bin", r"head.idx is not a Megatron index: .* found 4 that begin with b'text'"),
        ("borders.bin", r"borders.idx is damaged: its lengths or borders are not in order"),
        ("float.bin", r"float.bin holds float32: expected integers"),
        ("absent.txt", r"absent.txt cannot be read: No such file"),
    ],
)
def test_damaged_file_is_refused_with_its_position(tmp_path, kind, message):
    path = _damage(tmp_path, kind)
    with pytest.raises(DataError, match=message):
        _read(path)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("a.txt.zst", "zstandard", "train")],
)
def test_missing_package_is_named(tmp_path, monkeypatch, name, package, extra):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{package} is not installed: pip install 'jaxmoe\[{extra}\]'"
    with pytest.raises(MissingPackageError, match=message):
        _read(tmp_path / name)


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["\n", "\r\n", "\r"])), max_size=8),
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(2, 9),
)
def test_long_lines_are_left_out_wherever_chunks_end(lines, sizes, longest):
    """A line is the number of its digits; line ends count."""
    texts = ["1" * number + end for number, end in lines]
    content = "".join(texts).encode()
    borders = np.cumsum(sizes * (len(content) // sum(sizes) + 1))
    starts = [0, *borders[borders < len(content)].tolist(), len(content)]
    chunks = (content[i:j] for i, j in itertools.pairwise(starts))
    found = list(json_lines(epath.Path("a.jsonl"), chunks, longest=longest))
    rest = [text for text in content.splitlines(keepends=True) if text.strip()]
    assert len(found) == len(rest)
    for item, text in zip(found, rest, strict=True):
        assert isinstance(item, BadRecord) == (len(text) > longest)
        assert isinstance(item, BadRecord) or item.value == int(text)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.jl", '{\n "text": "one"\n}', "JSON"),
        ("a.txt", "[a list] in words", None),
        ("a.c", "{ return 1; }", None),
        ("a.jsonl", '{"text": "one"}', None),
    ],
)
def test_an_object_of_json_that_is_trained_as_text_is_told_of(
    tmp_path, monkeypatch, caplog, name, text, kind
):
    """In words, when they are read and when they come from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "b.txt").write_text("two")
    given = {"validation_path": (str(tmp_path / "b.txt"),)}
    config = FilesConfig(path=(str(tmp_path / name),), **given)
    for _ in range(2):
        caplog.clear()
        config.build()
        told = {one.getMessage() for one in caplog.records}
        wanted = f"1 of 1 files are {kind}, {tmp_path / name} among them"
        assert [wanted in one for one in told] == [True] * (kind is not None)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": []},
        {"prompt": "1+1", "completion": "2"},
        {"conversations": []},
        {"instruction": "1+1", "output": "2"},
    ],
    ids=lambda record: next(iter(record)),
)
def test_conversations_that_are_read_as_text_are_refused_with_the_way_out(record, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record))
    (bad,) = _read(path)
    assert "choose data:chat --data.path FILES" in str(bad)
