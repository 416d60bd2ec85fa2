# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile files and paths: each is read, or refused in one early sentence; none hangs."""

import logging
import os
import pathlib
import pickle
import struct

import numpy as np
import pytest
import zstandard

from jaxmoe.data import DataError, FilesConfig
from jaxmoe.data.tokenizer import FileConfig, IdsConfig

WORDS = "several words of text " * 200

pytestmark = pytest.mark.timeout(60)  # a read of a FIFO has no end


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    pathlib.Path("good.txt").write_text(WORDS)
    os.mkfifo("fifo.txt")
    os.symlink("self.txt", "self.txt")
    for name in ("pipes", "loop"):
        pathlib.Path(name).mkdir()
        (pathlib.Path(name) / "good.txt").write_text(WORDS)
    os.mkfifo("pipes/pipe.jsonl")
    for name in ("one", "two"):  # two of them: 2**40 paths before the system's limit of links
        os.symlink(".", f"loop/{name}")
    np.save("ids.npy", np.arange(400))
    pathlib.Path("ids.npy").rename("ids.bin")
    os.mkfifo("ids.idx")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("fifo.txt", r"data.path=fifo.txt is a FIFO \(named pipe\): expected a regular file, .*"),
        ("fifo*", r"data.path=fifo\*: fifo.txt is a FIFO .* Write its content to a file"),
        ("/dev/zero", r"data.path=/dev/zero is a character device: expected a regular file"),
        ("ids.bin", r"data.path=ids.bin: ids.idx is a FIFO \(named pipe\): expected a regular"),
        ("ids.idx", r"data.path=ids.idx: ids.idx is a FIFO \(named pipe\): expected a regular"),
        ("self.txt", r"data.path=self.txt is a symbolic link that leads back to itself: .*Point"),
        ("loop", r"data.path=loop: loop/\w+ leads back to loop, which contains it, .*remove the"),
        ("loop/**/*.txt", r"data.path=loop/\*\*/\*.txt: loop/\w+ leads back to loop/, .*remove"),
        ("**", r"data.path=\*\*: ./loop/\w+ leads back to ./loop, which contains it, .*remove"),
        ("http://h/x.txt", r"data.path=http://h/x.txt begins with http://, .*expected a local.*Do"),
        ("ftp://h/x.txt", r"data.path=ftp://h/x.txt begins with ftp://, .* gs://, s3://, az://"),
        ("file:///x.txt", r"data.path=file:///x.txt begins with file://, .*\(without file://\)"),
    ],
)
def test_hostile_path_is_refused_without_reading_it(path, message):
    with pytest.raises(DataError, match=message):
        FilesConfig(path=(path,)).build()


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "\udcff", "a\u202eb"])
def test_control_characters_of_names_are_escaped_in_messages(name):
    pathlib.Path(f"{name}.jsonl").write_text("{")
    with pytest.raises(DataError) as error:
        FilesConfig(path=(f"{name}.jsonl",)).build()
    assert str(error.value).isprintable() and ascii(name)[1:-1] in str(error.value)


def test_fifo_in_a_directory_is_left_out_with_a_warning(caplog):
    assert "files: 1 documents" in FilesConfig(path=("pipes",)).build().describe(16)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "jaxmoe.data.reading.paths"]
    assert "pipes: 1 of 2 files are left out because they are not regular" in warning
    assert warning.endswith("pipes/pipe.jsonl among them")


def test_fifo_as_a_tokenizer_is_refused():
    with pytest.raises(DataError, match=r"data.tokenizer.path=fifo.txt is a FIFO .*tokenizer.json"):
        FilesConfig(path=("good.txt",), tokenizer=FileConfig(path="fifo.txt")).build()


def _npy(header, version=(1, 0)):
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin1") + b"\1\0" * 100


def _header(shape, descr="'<u2'"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


def _saved(array):
    np.save("saved.npy", array)
    return pathlib.Path("saved.npy").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda: _saved(np.arange(9).astype("m8[s]")),
            r"holds timedelta64\[s\]: expected integers",
        ),
        (lambda: _saved(np.array([1, None])), r"holds pickled Python objects: expected integers"),
        (lambda: pickle.dumps([1, 2]), r"is not a .npy file.*the magic string .*with numpy.save"),
        (lambda: _npy(_header("(-5,)")), r"has shape \(-5,\): expected \[tokens\]"),
        (lambda: _npy(_header("(-2, -5)")), r"has shape \(-2, -5\): expected"),
        (lambda: _npy(_header("(True,)")), r"has shape \(True,\): expected"),
        (lambda: _npy(_header(f"({2**62 + 1}, 4)")), rf"its {2**64 + 4} ids of uint16 need"),
        (lambda: _npy(_header("(10,"))[:-1], r"is not a .npy file, or .*EOF in multi-line"),
        (
            lambda: _npy("{" * 5000),  # in the words of Python 3.11, and of 3.12 and later
            r"is not a .npy file, or .*(EOF in multi-line statement|too many nested parentheses)",
        ),
        (lambda: _npy("-" * 9000 + "1"), r"is not a .npy file, or truncated in its header: \w+"),
        (lambda: _npy(_header("(9,)"), (9, 9)), r"its version is \(9, 9\), expected \(1, 0\)"),
    ],
)
def test_malformed_npy_is_refused(content, message):
    pathlib.Path("bad.npy").write_bytes(content())
    with pytest.raises(DataError, match=f"bad.npy.* {message}"):
        FilesConfig(path=("bad.npy",), tokenizer=IdsConfig(vocab_size=1000)).build()


def test_ids_without_their_tokenizer_are_not_read_as_text():
    np.save("good.npy", np.arange(400) % 50)
    message = r"good.npy .*holds token ids of type int64, and data.tokenizer:bytes reads bytes"
    with pytest.raises(DataError, match=f"{message} .*data.tokenizer:ids --data.tokenizer.vocab"):
        FilesConfig(path=("good.npy",)).build()
    np.save("bytes.npy", (np.arange(400) % 50 + 1).astype(np.uint8))
    assert FilesConfig(path=("bytes.npy",)).build().vocab_size == 256


def _flipped(has_checksum):
    """A frame of incompressible text, one bit of which is flipped."""
    text = np.random.default_rng(0).integers(33, 120, 2000).astype(np.uint8).tobytes()
    frame = zstandard.ZstdCompressor(write_checksum=has_checksum).compress(text)
    half = len(frame) // 2
    return frame[:half] + bytes([frame[half] ^ 1]) + frame[half + 1 :]


def test_zstd_without_checksum_is_reported_once_per_run(caplog):
    for name in ("a", "b"):
        pathlib.Path(f"{name}.txt.zst").write_bytes(_flipped(has_checksum=False))
    config = FilesConfig(path=("a.txt.zst", "b.txt.zst", "good.txt"))
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        config.build()
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "2 of 3 files have zstd frames without a checksum, a.txt.zst among them" in warning
        assert warning.endswith("compress them with `zstd --check` to have it detected")
    caplog.clear()
    pathlib.Path("a.txt.zst").write_bytes(_flipped(has_checksum=True))
    with pytest.raises(DataError, match="a.txt.zst is damaged near byte 0"):
        FilesConfig(path=("a.txt.zst",)).build()
    assert not caplog.records


@pytest.mark.parametrize("cache", ["", " ", "gs://bucket/cache", "a\0b"])
def test_cache_that_is_no_local_directory_is_refused(cache):
    before = sorted(os.listdir())
    with pytest.raises(DataError, match=r"data.cache='.*' must be a local directory.*: name one"):
        FilesConfig(path=("good.txt",), cache=cache).build()
    assert sorted(os.listdir()) == before


def test_documents_that_are_all_equal_are_counted():
    pathlib.Path("equal.jsonl").write_bytes(b'{"text": "the same"}\r\n' * 30)
    message = r"the \w+ split .* no text .*train: \d+ documents of \d+ tokens.*validation: \d+ doc"
    with pytest.raises(DataError, match=f"{message}.*data.validation_fraction=0.05"):
        FilesConfig(path=("equal.jsonl",)).build()
