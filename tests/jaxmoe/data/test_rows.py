# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Files of rows: JSON in a list, in lines and in one object, tables of CSV, fields of fields."""

import csv
import gzip
import itertools
import json
import re
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from etils import epath

from jaxmoe.data import DataError
from jaxmoe.data.reading import compressed
from jaxmoe.data.reading.formats import read_records
from jaxmoe.data.reading.records import json_values


def read(path, text_field="text"):
    """The records of a file."""
    return list(read_records(path, text_field=text_field, bin_dtype="uint16", separator=None))


PAIRS = [{"text": "one, \u00e9", "n": 1}, {"text": 'two\n"2"', "n": 2}]
LINES = "\n".join(map(json.dumps, PAIRS))
TABLE = 'text{0}n\n"one, \u00e9"{0}1\r\n"two\n""2"""{0}2\n'
BOM = "\ufeff"


@pytest.mark.parametrize("start", ["", BOM], ids=["", "BOM"])
@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(PAIRS)),
        ("a.json", json.dumps(PAIRS, indent=1, ensure_ascii=False) + "\n"),
        ("a.json", LINES),
        ("a.json", "\n".join(json.dumps(pair, indent=2) for pair in PAIRS)),
        ("a.JSON.gz", json.dumps(PAIRS)),
        ("a.csv", TABLE.format(",")),
        ("a.csv", TABLE.format(";")),
        ("A.TSV", TABLE.format("\t")),
        ("a.csv.gz", TABLE.format(",")),
        ("a.txt", LINES),
        ("a", json.dumps(PAIRS)),
    ],
)
def test_records_of_json_and_csv_are_texts(tmp_path, monkeypatch, name, text, chunk, start):
    monkeypatch.setattr(compressed, "_CHUNK", chunk)
    content = (start + text).encode()
    path = epath.Path(tmp_path / name)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [record.value for record in read(path)] == [pair["text"] for pair in PAIRS]


def test_a_field_of_a_field_is_read(tmp_path):
    rows = [{"meta": {"text": "one", "n": 1}}, {"meta": {"text": "two", "n": 2}}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.json", "a.parquet"):
        found = read(epath.Path(tmp_path / name), text_field="meta.text")
        assert [record.value for record in found] == ["one", "two"]
    with pytest.raises(
        DataError, match="found struct<.*: name another column or a field of it, such as meta.text,"
    ):
        read(epath.Path(tmp_path / "a.parquet"), text_field="meta")
    with pytest.raises(DataError, match="column 'meta' is struct<.*>, without 'meta.words'"):
        read(epath.Path(tmp_path / "a.parquet"), text_field="meta.words")
    (bad, _) = read(epath.Path(tmp_path / "a.json"), text_field="meta.words")
    assert "has no field 'meta.words'; it has 'meta'" in str(bad)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "no JSON at all", "a.json line 1 .byte 0. is not JSON: Expecting value"),
        (
            "a.json",
            '[{"text": "a"}, {"text": "b"',
            r"not JSON: Expecting ',' .* \(line 1, column 29",
        ),
        (
            "a.json",
            '[{"text": "a"}\n {"text": "b"}]',
            r"expected ',' \(line 2, column 2\). Expected a",
        ),
        (
            "a.json",
            '[{"text": "a"}] more',
            r"nothing may stand behind the list \(line 1, column 17",
        ),
        ("a.json", '[{"text": "a', "not JSON: Unterminated string"),
        ("a.json", '["one", "two"]', "record 1: expected an object with a text in field 'text'"),
        ("a.json", "[" * 100_000, "is not JSON: maximum recursion depth"),
        ("a.json", '{\n "data": [{"text": "a"}]}', "the list in 'data' looks like the records"),
        ("a.json", '{\n "name": "x"}', "has no field 'text'; it has 'name': name the field of"),
        ("a.json", b'[{"text": "\xff"}]', "a.json is not UTF-8: byte 0xff at offset 11"),
        ("a.csv", b"text\n\xff\n", "a.csv line 2 is not UTF-8: byte 0xff at offset 5"),
        ("a.csv", "word,n\none,1\n", "a.csv has no column 'text'; it has 'word', 'n': name the"),
        ("a.csv", "text,text\n", "has two columns 'text': rename one in its first line"),
        ("a.csv", "text,n\none\n", "a.csv line 2 has 1 columns, and the first line names 2"),
        ("a.csv", 'text\n"one" two\n', "a.csv line 2 is no row of a table: ',' expected after"),
        ("a.csv", 'text\n"one\n', "is no row of a table: unexpected end of data"),
        ("a.csv", "", "a.csv is empty: its first line names the columns"),
        ("a.csv", "prompt,completion\na,b\n", "these are conversations, and data:chat trains"),
    ],
)
def test_records_that_are_none_are_refused_in_words(tmp_path, name, content, message):
    path = epath.Path(tmp_path / name)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        (found,) = [record for record in read(path) if isinstance(record, DataError)][:1]
    except DataError as error:
        found = error
    assert re.search(message, str(found))


def test_a_cell_of_a_table_may_be_long_and_the_limit_of_others_stays(tmp_path):
    text = "word " * 100_000
    (tmp_path / "a.csv").write_text(f"text\n{text}\n")
    limit = csv.field_size_limit()
    assert [record.value for record in read(epath.Path(tmp_path / "a.csv"))] == [text]
    assert csv.field_size_limit() == limit


def test_a_list_is_read_in_memory_for_a_record(tmp_path):
    """16 times as many records need no more memory; nor does a record without an end."""

    def peak(count):
        content = (b'%s{"text": "%s"}' % (b"," if n else b"[", b"x" * 2**14) for n in range(count))
        tracemalloc.start()
        for _ in json_values(epath.Path("a.json"), itertools.chain(content, [b"]"])):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(3200) < 1.5 * peak(200)
