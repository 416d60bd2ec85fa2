# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded corpus: splits, rows, text, and errors if it is missing."""

import dataclasses
import hashlib
import json
import re
import sysconfig

import numpy as np
import pytest

from jaxmoe.data import CorpusConfig, DataError
from jaxmoe.data import corpus as corpus_module


@pytest.fixture(scope="module")
def corpus():
    return CorpusConfig().build(0)


def _library(root, files):
    """A small standard library at root: {path: text}."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(corpus_module, "SMALLEST_USEFUL_BYTES", 10)
    return tmp_path


def test_corpus_sizes(corpus):
    train, validation = len(corpus.text("train")), len(corpus.text("validation"))
    assert train + validation > 5_000_000
    assert 0.01 < validation / (train + validation) < 0.12


def test_corpus_splits_are_disjoint_and_stable(corpus):
    def documents(split):
        return set(corpus.text(split).tobytes().split(b"\0"))

    train, validation = documents("train"), documents("validation")
    assert not train & validation
    assert len(train) > 100 and len(validation) > 5
    again = CorpusConfig().build(1)
    assert again.fingerprint() == corpus.fingerprint()


def test_corpus_fingerprint_is_the_hash_of_the_bytes(corpus):
    fingerprint = json.loads(json.dumps(corpus.fingerprint()))
    for split in ("train", "validation"):
        text = corpus.text(split).tobytes()
        assert fingerprint[split]["sha256"] == hashlib.sha256(text).hexdigest()
        assert fingerprint[split]["bytes"] == len(text)
        assert fingerprint[split]["documents"] == text.count(b"\0") + 1
    assert fingerprint["kind"] == "corpus"


@pytest.mark.parametrize("length", [2, 7, 128])
def test_corpus_rows_predict_every_byte_once(corpus, length):
    text = corpus.text("validation")[: 5000 * length]
    corpus = dataclasses.replace(corpus, joined={"validation": text})
    num_rows = corpus.num_rows("validation", length)
    rows = np.stack([corpus.row("validation", i, length).tokens for i in range(num_rows)])
    assert rows.dtype == np.int32 and rows.shape == (num_rows, length + 1)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), text[1 : num_rows * length + 1])
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    assert len(text) - 1 - num_rows * length < length


def test_corpus_text_round_trip(corpus):
    text = "def f(x):\n    return 'caf\u00e9'\n"
    assert corpus.decode(corpus.encode(text)) == text
    assert corpus.decode(np.array([0x66, 0xFF])) == "f\ufffd"
    assert corpus.decode(np.array([0x66, 511, 0x67])) == "fg"
    assert corpus.vocab_size == 256 and corpus.bytes_per_token == 1.0
    assert corpus.entropy_bits_per_token(8) is None


def test_corpus_reads_stdlib_modules_without_tests(small_library):
    _library(
        small_library,
        {
            "ast.py": "one",
            "json/decoder.py": "two",
            "json/tests/test_it.py": "no test",
            "test/test_ast.py": "no test",
            "idlelib/idle.py": "no editor",
            "site-packages/json/other.py": "not of the library",
            "_sysconfigdata__linux.py": "differs between machines",
            "sitecustomize.py": "added later",
            "json/empty.py": "",
            "json/data.txt": "no source",
            "zipfile.py": "three three",
        },
    )
    corpus = CorpusConfig().build(0)
    read = [part for text in corpus.joined.values() for part in text.tobytes().split(b"\0") if part]
    assert sorted(read) == [b"one", b"three three", b"two"]


def test_adding_a_corpus_file_moves_no_other(small_library):
    files = {f"json/part{i}.py": f"# file number {i}\n" for i in range(60)}
    _library(small_library, files)
    before = set(CorpusConfig().build(0).text("validation").tobytes().split(b"\0"))
    _library(small_library, {"ast.py": "# another file\n"})
    after = set(CorpusConfig().build(0).text("validation").tobytes().split(b"\0"))
    assert before and before <= after <= before | {b"# another file\n"}


def test_stripped_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "gone"))
    message = (
        f"the embedded corpus is the source of Python's standard library, and {tmp_path / 'gone'} "
        "holds only 0 bytes of it in 0 files (at least 2000000 are needed): this distribution "
        "strips it. Use a Python from python.org, uv, pyenv or conda, or train on a synthetic "
        "language (data:markov)"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        CorpusConfig().build(0)


def test_unreadable_corpus_file_is_named(small_library):
    _library(small_library, {"ast.py": "one", "zipfile.py": "three three"})
    (small_library / "json").mkdir()
    (small_library / "json" / "loop.py").symlink_to("loop.py")
    with pytest.raises(DataError, match=r"cannot read .*loop\.py \(.+\): make it readable, or"):
        CorpusConfig().build(0)


def test_missing_row_is_refused(corpus):
    num_rows = corpus.num_rows("validation", 128)
    for index in (-1, num_rows):
        with pytest.raises(
            DataError,
            match=f"row {index} is not in the validation split of the corpus, which has "
            f"{num_rows} rows of sequence_length=128",
        ):
            corpus.row("validation", index, 128)
