# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Texts that are too long for memory: ids, digests and errors are those of the whole text."""

import gzip
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import zstandard

from jaxmoe.data import DataError, FilesConfig, packed
from jaxmoe.data.files import Files
from jaxmoe.data.held_out import train_texts
from jaxmoe.data.reading import compressed, texts
from jaxmoe.data.reading.records import LongText
from jaxmoe.data.store import open_store
from jaxmoe.data.tokenizer import BytesConfig, FileConfig, TrainedConfig, cutting

LINES = (
    "The cat sat on  the mat, and then\u2026 it's 12345 o'clock.\r\n",
    "   indented \t text \n\n\n  and more   \n",
    "\u4f60\u597d\u3002\u4e16\u754c\uff01 \u00e9\u0301 \U0001f600\u200d\U0001f680 "
    "na\u00efve\u00a0\u3000x \n",
    "x" * 300 + " " * 9 + "<|endoftext|> we'll\u2581see \n",
    "\ufffd \ufffd\n",
)
TEXT = "\ufeff" + "".join(LINES[number % 7 % len(LINES)] + f"{number} " for number in range(90))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text(TEXT, newline="")


def _library(splitter, decoder, **fields):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = splitter
    bpe.decoder = decoder
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<unk>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    for name, value in fields.items():
        setattr(bpe, name, value)
    bpe.save("tokenizer.json")
    return FileConfig(path="tokenizer.json")


def _metaspace(**fields):
    decoder = tokenizers.decoders.Metaspace()
    return _library(tokenizers.pre_tokenizers.Metaspace(), decoder, **fields)


def _prepended():
    steps = [
        tokenizers.normalizers.Prepend("\u2581"),
        tokenizers.normalizers.Replace(" ", "\u2581"),
    ]
    return _metaspace(normalizer=tokenizers.normalizers.Sequence(steps), pre_tokenizer=None)


def _gpt2(*, add_prefix_space=False):
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return _library(level, tokenizers.decoders.ByteLevel())


CONFIGS = {
    "bytes": (BytesConfig, None),
    "trained": (lambda: TrainedConfig(vocab_size=400), "byte_level"),
    "metaspace": (_metaspace, "verified"),
    "prepended": (_prepended, "prepended"),
    "gpt2": (_gpt2, "byte_level"),
    "prefix_space": (lambda: _gpt2(add_prefix_space=True), "verified"),
}


def _small_parts(monkeypatch):
    monkeypatch.setattr(texts, "_WINDOW", 500)
    monkeypatch.setattr(compressed, "_CHUNK", 37)
    monkeypatch.setattr(cutting, "_PIECE", 200)
    monkeypatch.setattr(packed, "_PART", 20)


def _built(path, tokenizer, cache, **fields):
    source = FilesConfig(path=(path,), tokenizer=tokenizer, cache=cache, **fields).build()
    (store,) = set(source._directories.values())
    arrays = {
        name: np.load(store / f"{name}.npy").tolist() for name in ("offsets", "digests", "sizes")
    }
    return {
        "tokens": (store / "tokens.bin").read_bytes(),
        **arrays,
        "fingerprint": source.fingerprint(),
        "bytes_per_token": source.bytes_per_token,
        **{
            split: source.documents[split].document(0).tolist() for split in ("train", "validation")
        },
    }


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_text_has_the_ids_of_the_whole(name, suffix, monkeypatch):
    make, kind = CONFIGS[name]
    config = make()
    content = TEXT.encode()
    packers = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path = f"text.txt{suffix}"
    pathlib.Path(path).write_bytes(packers[suffix](content))
    whole = _built(path, config, "whole")
    _small_parts(monkeypatch)
    (record,) = Files((path,), FilesConfig()).records(None)
    assert isinstance(record.value, LongText)
    assert "".join(record.value.parts()) == TEXT
    assert _built(path, config, "parts") == whole
    assert whole["sizes"] == [len(content)]
    assert getattr(config.build(lambda: [TEXT], pathlib.Path("bpe")), "_kind", None) == kind


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_a_tokenizer_is_trained_on_the_pieces_of_a_long_text(fraction, monkeypatch):
    files = Files(("text.txt",), FilesConfig())
    (whole,) = train_texts(files, fraction)
    assert len(whole) == int(len(TEXT) * (1 - fraction))
    monkeypatch.setattr(cutting, "_PIECE", 200)
    pieces = [*cutting.pieces([whole])]
    _small_parts(monkeypatch)
    parts = [*train_texts(files, fraction)]
    assert parts == pieces and len(parts) > 10


def test_pieces_do_not_depend_on_the_parts(monkeypatch):
    monkeypatch.setattr(cutting, "_PIECE", 50)
    for places in (cutting._ANYWHERE, cutting.BEFORE_SPACES, cutting.USUAL):
        expected = [*cutting.pieces([TEXT], places)]
        assert "".join(expected) == TEXT and len(expected) > 20
        for size in (1, 2, 3, 49, 50, 51, 1000):
            parts = [TEXT[begin : begin + size] for begin in range(0, len(TEXT), size)]
            assert [*cutting.pieces(parts, places)] == expected


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x80", b"\xe2\x28\xa1", b"\xf0\x9f\x98"])
@pytest.mark.parametrize("end", [b"", b" more" * 50])
def test_errors_in_a_long_text_are_those_of_the_whole(bad, end, monkeypatch):
    pathlib.Path("bad.txt").write_bytes(TEXT.encode() + bad + end)
    pathlib.Path("zero.txt").write_bytes(TEXT.encode() + b"\0 end")
    messages = []
    for _ in range(2):
        for name in ("bad.txt", "zero.txt"):
            with pytest.raises(DataError) as error:
                FilesConfig(path=(name,), cache="cache").build()
            messages.append(str(error.value))
        _small_parts(monkeypatch)
    assert messages[:2] == messages[2:]
    assert f"not UTF-8: byte {bad[0]:#04x} at offset {len(TEXT.encode())}" in messages[0]
    assert f"byte 0 at offset {len(TEXT.encode())} of the text" in messages[1]


def test_long_texts_keep_their_place_among_others(monkeypatch):
    pathlib.Path("a.txt").write_text("first " * 3)
    pathlib.Path("z.txt").write_text('{"a": "' + "x " * 400 + '"}')
    names = ("a.txt", "text.txt", "z.txt")
    expected = FilesConfig(path=names, cache="whole").build()
    _small_parts(monkeypatch)
    source = FilesConfig(path=names, cache="parts").build()
    assert source.fingerprint() == expected.fingerprint()
    assert source.text("train").tobytes() == expected.text("train").tobytes()
    messages = [store.facts["warnings"] for store in (_store(expected), _store(source))]
    assert messages[0] == messages[1] and "1 of 3 files are JSON" in messages[0][0]


def _store(source):
    return open_store(source._directories["train"])


def test_a_text_that_changes_between_readings_is_refused(monkeypatch):
    _small_parts(monkeypatch)
    (record,) = Files(("text.txt",), FilesConfig()).records(None)
    pathlib.Path("text.txt").write_text(TEXT + "more", newline="")
    with pytest.raises(DataError, match="text.txt changed while it was read"):
        list(record.value.parts())


MEASURE = """
import resource, sys
from jaxmoe.data import FilesConfig
from jaxmoe.data.tokenizer import BytesConfig, TrainedConfig

text, small, kind = sys.argv[1:]
tokenizer = BytesConfig() if kind == "bytes" else TrainedConfig(vocab_size=300)
def build(path):
    FilesConfig(path=(path,), tokenizer=tokenizer, cache="cache").build().bytes_per_token
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = build(small)
print(build(text) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_memory_does_not_grow_with_a_text(kind):
    with open("long.txt", "w") as stream:
        for number in range(1_000_000):
            stream.write(f"the cat sat on {number % 1000} mats, and then more of it.\n")
    size = pathlib.Path("long.txt").stat().st_size // 1024
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "long.txt", "text.txt", kind],
        capture_output=True,
        text=True,
        check=True,
    )
    assert size > 40_000 and int(done.stdout) < 120_000, "kB"
