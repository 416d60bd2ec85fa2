# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: round trips, separators, and errors."""

import itertools
import json
import subprocess
import sys
import weakref
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from jaxmoe import messages
from jaxmoe.data import TOKENIZERS, DataError, FilesConfig
from jaxmoe.data.files import Files
from jaxmoe.data.held_out import train_texts
from jaxmoe.data.reading.records import Record
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig, IdsConfig, TrainedConfig, encoding
from jaxmoe.data.tokenizer import cutting as splitting

TEXTS = [
    "the cat sat on the mat",
    "the dog sat on the cat",
    "h\u00e9llo \U0001f600",
    "  two\n\nlines",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return TrainedConfig(vocab_size=280).build(lambda: TEXTS, tmp_path_factory.mktemp("bpe"))


def test_configs_are_hashable_and_named():
    for name, config in TOKENIZERS.items():
        assert config.name == name and hash(config()) == hash(config())


@hypothesis.given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_bytes_tokenizer_round_trip(text):
    (ids,) = ByteTokenizer().encode_all([text])
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids).decode() == text


def test_trained_tokenizer_round_trip(trained):
    assert trained.vocab_size <= 280 and trained.separator == 0
    # Bytes that no training text held, and the separator's own name, are text as well.
    texts = [*TEXTS, "\x7f\u4f60", "<|endoftext|>"]
    encoded = trained.encode_all(texts)
    assert all(0 not in ids for ids in encoded)
    assert [trained.decode(ids).decode() for ids in encoded] == texts
    assert len(encoded[0]) < len(TEXTS[0]) / 2
    spelled = [b"".join(trained.token_bytes(int(i)) for i in ids) for ids in encoded]
    assert spelled == [text.encode() for text in texts]
    assert trained.token_bytes(trained.separator) == b""


SPACES = " \n\t\r\x0b\x1c\x85\xa0\u3000"


@hypothesis.given(
    st.text(
        st.sampled_from(SPACES + "abc'st.,12_\u00e9\u4f60\u0301\u3002\uff0c\u2167\u00b2"),
        max_size=60,
    ),
    st.integers(1, 8),
)
def test_pieces_are_encoded_as_the_whole_text(trained, text, size):
    (whole,) = trained.encode_all([text])
    with mock.patch.object(splitting, "_PIECE", size):
        assert "".join(splitting.pieces([text])) == text
        (cut,) = trained.encode_all([text])
    assert cut.tolist() == whole.tolist()


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tokenizer(kind):
    """A small vocabulary with a published chain of normalizer, pre-tokenizer and model."""
    library, pre, norm = tokenizers, tokenizers.pre_tokenizers, tokenizers.normalizers
    bpe, special = library.Tokenizer(library.models.BPE(fuse_unk=True)), ["</s>"]
    alphabet = [*SPACES, *"abcdefghijklmnopqrstuvwxyz'.,12\u2581\u00e9\u4f60\u3002"]
    if kind == "llama_3":
        split = pre.Split(library.Regex(LLAMA_3), "isolated")
        bpe.pre_tokenizer = pre.Sequence(
            [split, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        bpe.normalizer, alphabet = norm.NFC(), pre.ByteLevel.alphabet()
    elif kind == "llama_2":
        bpe.normalizer = norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")])
    elif kind == "metaspace":
        bpe.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    elif kind == "words":
        bpe.normalizer, bpe.pre_tokenizer = norm.Lowercase(), pre.Whitespace()
    elif kind == "added":
        bpe.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        alphabet = pre.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    # SentencePiece cuts its training text at spaces.
    texts = [f"\u2581{w}" for t in TEXTS for w in t.split()] if kind == "llama_2" else TEXTS
    if kind == "llama_2":
        normalizer, bpe.normalizer = bpe.normalizer, None
        bpe.train_from_iterator(texts * 9, trainer)
        bpe.normalizer = normalizer
    else:
        bpe.train_from_iterator(texts * 9, trainer)
    if kind == "added":
        bpe.add_tokens(["a b", "  ", "the\n"])
    return bpe


KINDS = {
    "llama_3": "verified",
    "llama_2": "prepended",
    "metaspace": "verified",
    "words": "verified",
    "added": "verified",
    "none": "verified",
}


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    _tokenizer(request.param).save(str(path))
    return request.param, FileConfig(path=str(path)).build(list, path)


WORDS = ["the", " the", " cat", "a b", "  ", "\n", "the\n", " 's", "\u4f60\u3002", "e\u0301"]
WORDS += [".\n ", "1234", " x."]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(st.sampled_from(WORDS), min_size=2, max_size=90), st.integers(1, 30))
def test_every_tokenizer_encodes_pieces_as_the_whole_text(published, words, size):
    kind, tokenizer = published
    text = "".join(words)
    (whole,) = tokenizer._encode([text])
    assert encoding.kind_of(json.loads(tokenizer.content)) == KINDS[kind]
    with mock.patch.object(splitting, "_PIECE", size):
        cut, again = tokenizer.encode_all([text, "short"])
    assert cut.tolist() == whole.tolist()
    assert again.tolist() == tokenizer._encode(["short"])[0].tolist()


def test_long_texts_are_encoded_in_small_pieces(published, monkeypatch, caplog):
    """The library sees no more than two pieces at once, except where nothing splits a text."""
    kind, tokenizer = published
    lines = ("the cat sat on the mat, " * (1 + number % 5) + "12 more\n" for number in range(150))
    text = "".join(lines)
    seen = []
    for name in ("_encode", "_encodings"):
        method = getattr(tokenizer, name)
        monkeypatch.setattr(
            tokenizer, name, lambda texts, m=method: seen.extend(map(len, texts)) or m(texts)
        )
    monkeypatch.setattr(splitting, "_PIECE", 200)
    monkeypatch.setattr(encoding, "Progress", lambda: messages.Progress(0.0, 0.0))
    with caplog.at_level("INFO"):
        (ids,) = tokenizer.encode_all([text])
    assert len(ids) > 1000
    if kind == "none":
        assert max(seen) > len(text) / 2
    else:
        assert max(seen) < 600 and sum(seen) < 2 * len(text)
        assert any("tokenizing: 0.0 million characters" in text for text in caplog.messages)


MEASURE = """
import resource, sys
from jaxmoe.data import FilesConfig
from jaxmoe.data.tokenizer import FileConfig

text, small, tokenizer, cache = sys.argv[1:]
FilesConfig(path=(small,), cache=cache, validation_fraction=0.5).build()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
FilesConfig(path=(text,), tokenizer=FileConfig(path=tokenizer), cache=cache).build()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_one_large_document_is_read_in_bounded_memory(tmp_path):
    """At once it takes 0.8 GB: 140 bytes for each byte of the text."""
    _tokenizer("llama_3").save(str(tmp_path / "tokenizer.json"))
    text = "".join(f"the cat sat on {number} mats, and then more.\n" for number in range(150_000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "small.txt").write_text(text[:10_000])
    assert len(text) > 6_000_000
    names = ("text.txt", "small.txt", "tokenizer.json", "cache")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 300_000, "kB"


def test_training_on_pieces_gives_the_same_vocabulary(tmp_path, monkeypatch):
    text = " ".join(f"{word}ing the{' ' * (i % 3)}'s\n" for i, word in enumerate(TEXTS * 30))
    whole = TrainedConfig(vocab_size=300).build(lambda: [text], tmp_path / "whole")
    monkeypatch.setattr(splitting, "_PIECE", 20)
    parts = list(splitting.pieces([text]))
    assert len(parts) > 50 and max(map(len, parts)) < 40
    assert len(list(splitting.pieces(["\u4f60\u597d\u3002" * 50]))) > 5
    cut = TrainedConfig(vocab_size=300).build(lambda: [text], tmp_path / "cut")
    assert cut.content == whole.content


class _Documents(Files):
    """Documents that count how many of them are in memory."""

    most, alive = 0, 0

    def __init__(self, count):
        self._count = count

    def records(self, tokenizer):
        for number in range(self._count):
            text = _Text(f"document {number}")
            _Documents.alive += 1
            _Documents.most = max(_Documents.most, _Documents.alive)
            weakref.finalize(text, self._forget)
            yield Record(str(number), text)
            del text

    @staticmethod
    def _forget():
        _Documents.alive -= 1


class _Text(str):
    pass


@pytest.mark.parametrize("count", [4, 30, 300])
def test_training_reads_one_document_at_a_time(count):
    assert 0.8 * count <= sum(1 for _ in train_texts(_Documents(count), 0.05)) <= count
    assert _Documents.alive == 0 and _Documents.most <= 3


@pytest.mark.parametrize(
    ("change", "is_cut"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"pre_tokenizer": None}, False),
        ({"added_tokens": [{"content": "a b", "special": False}]}, False),
    ],
)
def test_texts_are_cut_for_byte_level_tokenizers_only(trained, change, is_cut):
    data = {**json.loads(trained.content), **change}
    assert splitting.cuts_at_spaces(data) == is_cut


def test_trained_tokenizer_is_cached(tmp_path):
    first = TrainedConfig(vocab_size=270).build(lambda: TEXTS, tmp_path)

    def never():
        raise AssertionError("trained again")

    assert TrainedConfig(vocab_size=270).build(never, tmp_path).fingerprint() == first.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["bpe-270.json"]


def test_tokenizer_is_trained_on_the_train_split_only(tmp_path):
    # The last tenth of the one document holds a word that training must not have seen.
    path = tmp_path / "book.txt"
    path.write_text("abc " * 900 + "xyzzy " * 50)
    source = FilesConfig(
        path=(str(path),),
        validation_fraction=0.1,
        tokenizer=TrainedConfig(vocab_size=300),
        cache=str(tmp_path / "cache"),
    ).build()
    assert len(source.tokenizer.encode_all(["abc"])[0]) == 1
    assert len(source.tokenizer.encode_all(["xyzzy"])[0]) == 5


def _save(path, special=("</s>",)):
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.add_special_tokens(list(special))
    bpe.save(str(path))
    return path


def test_tokenizer_from_a_file(tmp_path):
    path = _save(tmp_path / "tokenizer.json")
    for given in (path, tmp_path):
        tokenizer = FileConfig(path=str(given)).build(list, tmp_path)
        assert tokenizer.separator == 3 and tokenizer.vocab_size == 4
        assert tokenizer.encode_all(["a b c"])[0].tolist() == [0, 1, 2]
    named = FileConfig(path=str(path), separator="b").build(list, tmp_path)
    assert named.separator == 1
    assert named.fingerprint() == {**tokenizer.fingerprint(), "separator": 1}
    other = _save(tmp_path / "other.json", ("</s>", "<pad>"))
    assert FileConfig(path=str(other)).build(list, tmp_path).fingerprint() != named.fingerprint()


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (None, {}, "data.tokenizer.path=.*t.json cannot be read: .*No such file"),
        ("{", {}, "t.json is not JSON: Expecting"),
        ("[]", {}, "t.json is JSON, but not a tokenizer: expected an object with the key 'model'"),
        ('{"model": {}}', {}, "t.json is not a tokenizer that this version of `tokenizers` reads"),
        (
            '{"model":' + "[" * 100_000,
            {},
            r"t.json is JSON that is not read \(more than 16777216 objects and lists, or nested",
        ),
        (
            '{"model": {}, "n": ' + "1" * 5000 + "}",
            {},
            r"t.json is JSON that is not read \(Exceeds the limit",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            {},
            "t.json has 0 tokens and ids below 0: expected 1 to 2147483648 ids",
        ),
        (
            '{"model": {"type": "WordLevel", "vocab": {"</s>": 4294967295}, "unk_token": "</s>"}}',
            {},
            "t.json has 1 tokens and ids below 4294967296: .*because token ids are int32",
        ),
        ("saved", {"separator": "<x>"}, "has no token <x> to separate documents: name one"),
        ("saved without", {}, "has no token .* or </s> or .*: name one of its tokens with --data"),
    ],
)
def test_invalid_tokenizer_files_are_refused(tmp_path, content, fields, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    if content == "saved":
        _save(path)
    if content == "saved without":
        _save(path, ())
    with pytest.raises(DataError, match=message):
        FileConfig(path=str(path), **fields).build(list, tmp_path)


def test_invalid_configs_are_refused(tmp_path):
    with pytest.raises(DataError, match="data.tokenizer.path is empty"):
        FileConfig().build(list, tmp_path)
    with pytest.raises(ValueError, match="data.tokenizer.vocab_size=256 must be at least 257"):
        TrainedConfig(vocab_size=256)
    with pytest.raises(ValueError, match="data.tokenizer.vocab_size=1 must be at least 2"):
        IdsConfig(vocab_size=1)
    with pytest.raises(ValueError, match="data.tokenizer.vocab_size=4294967296 must be at most 21"):
        IdsConfig(vocab_size=2**32)
    with pytest.raises(ValueError, match="data.tokenizer.separator=9 must be an id below"):
        IdsConfig(vocab_size=9, separator=9)


def test_trained_tokenizer_file_is_json(trained, tmp_path):
    assert json.loads(json.dumps(trained.fingerprint())) == trained.fingerprint()
    assert np.asarray(trained.encode_all(["the"])[0]).dtype == np.int32


def test_training_a_tokenizer_reports_its_progress(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(messages.time, "monotonic", itertools.count(step=4.0).__next__)
    with caplog.at_level("INFO", logger="jaxmoe.messages"):
        TrainedConfig(vocab_size=300).build(lambda: ["abc " * 50_000] * 6, tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "training a tokenizer of 300 tokens ..."
    assert any(line.startswith("tokenizer: 1 million characters read") for line in lines[1:-1])
    assert lines[-1] == "tokenizer: 1 million characters read, merging ..."
    caplog.clear()
    TrainedConfig(vocab_size=300).build(lambda: [], tmp_path)  # kept: nothing is trained
    assert not caplog.records
