# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Files: which paths match, what is read, cached and held out, and errors."""

import builtins
import collections
import io
import json
import os
import pathlib
import re
import types

import numpy as np
import pytest
from etils.epath import testing

from jaxmoe.data import (
    DataError,
    FilesConfig,
    Loader,
    MixtureConfig,
    Source,
    check_position,
    evaluation_batches,
)
from jaxmoe.data import documents as planning
from jaxmoe.data.files import Files
from jaxmoe.data.held_out import train_texts
from jaxmoe.data.tokenizer import FileConfig, IdsConfig, TrainedConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _jsonl(path, texts):
    lines = [json.dumps({"text": text}) for text in texts]
    pathlib.Path(path).write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def _texts(count, word="word"):
    return [f"document {i} " + f"{word} " * (i * 7 % 23) for i in range(count)]


def _names(*paths):
    return [path.name for path in Files(paths, FilesConfig()).files]


def _tree(root):
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.jsonl", ".hidden/e.txt", "sub/.f.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x"}')
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (root / "shard.bin").write_bytes(b"\0\1")
    (root / "shard.idx").write_bytes(b"\0\1")


def test_paths_match_files_globs_and_directories(tmp_path):
    root = tmp_path / "tree"
    _tree(root)
    assert _names(f"{root}/*.txt") == ["a.txt"]
    assert _names(f"{root}/**/*.{{txt,jsonl}}") == ["a.txt", "c.txt", "d.jsonl"]
    assert _names(f"{root}/b.md", f"{root}/*.{{md,txt}}") == ["a.txt", "b.md"]  # each once
    assert _names(str(root)) == ["a.txt", "b.md", "shard.bin", "c.txt", "d.jsonl"]
    assert Files((str(root),), FilesConfig()).warnings() == [
        f"{root}: 1 of 7 files are left out because they are not text, {root}/picture.png among "
        "them"
    ]
    assert _names("tree/shard.idx") == ["shard.bin"]
    assert _names("tree/a.txt", f"{root}/a.txt") == ["a.txt"]  # however it is spelled
    (root / "q{1}.txt").write_text("braces")
    assert _names(f"{root}/q{{1}}.txt") == ["q{1}.txt"]  # a file that is there
    with pytest.raises(DataError, match="data.path has an empty path: name files"):
        _names(f"{root}/*.txt", "")


def test_files_from_a_bucket(tmp_path):
    bucket = tmp_path / "bucket"
    bucket.mkdir()

    def local(path):
        return str(path).replace("gs://bucket", str(bucket))

    def stat(original, path):
        found = os.stat(local(path))
        return types.SimpleNamespace(length=found.st_size, mtime=int(found.st_mtime))

    _jsonl(bucket / "b.jsonl", _texts(30))
    _jsonl(bucket / "a.jsonl", _texts(30, "other"))
    np.save(bucket / "c.npy", np.arange(50, dtype=np.uint8))
    _jsonl("local.jsonl", _texts(5))
    with testing.mock_epath(
        exists=lambda _, path: os.path.exists(local(path)),
        isdir=lambda _, path: os.path.isdir(local(path)),
        glob=lambda _, path: [f"gs://bucket/{p.name}" for p in bucket.glob("*.jsonl")],
        listdir=lambda _, path: os.listdir(local(path)),
        open=lambda _, path, mode: open(local(path), mode),
        stat=stat,
    ):
        source = FilesConfig(path=("gs://bucket/*.jsonl", "local.jsonl", "gs://bucket/c.npy"))
        names = source.build().fingerprint()["train"]["files"]
        assert _names("gs://bucket") == ["a.jsonl", "b.jsonl", "c.npy"]
    assert sorted(name.rpartition("/")[2] for name in names) == [
        "a.jsonl",
        "b.jsonl",
        "c.npy",
        "local.jsonl",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing/*.txt", r"data.path=nothing/\*.txt matches no file \(from .*\): check it"),
        ("empty", r"data.path=empty holds no text \(from"),
        ("gs://bucket/x.txt", r"data.path=gs://bucket/x.txt cannot be listed: .*gcsfs"),
    ],
)
def test_paths_without_files_are_refused(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        FilesConfig(path=(path,)).build()


def test_files_source_returns_the_documents(tmp_path):
    texts = _texts(120)
    source = FilesConfig(path=(_jsonl(tmp_path / "a.jsonl", texts),)).build(0)
    assert isinstance(source, Source)
    parts = {split: source.text(split).tobytes() for split in ("train", "validation")}
    read = [text.decode() for part in parts.values() for text in part.split(b"\0")]
    assert sorted(read) == sorted(texts)
    assert 0 < parts["validation"].count(b"\0") < 20
    row = source.row("train", 0, 32)
    assert row.tokens.dtype == row.segment_ids.dtype == np.int32
    assert source.decode(source.encode("h\u00e9")) == "h\u00e9"
    assert "files: 120 documents" in source.describe(32) and "% full" in source.describe(32)


def test_held_out_documents_stay_held_out_when_files_are_added(tmp_path):
    def held_out(texts):
        source = FilesConfig(path=(_jsonl(tmp_path / "a.jsonl", texts),)).build()
        return set(source.text("validation").tobytes().split(b"\0"))

    before = held_out(_texts(200))
    after = held_out(_texts(200) + _texts(60, "other"))
    assert before <= after and len(after - before) < 20


def test_ends_of_few_documents_are_held_out(tmp_path):
    pathlib.Path("book.txt").write_text("".join(f"{i:03d} " for i in range(1000)))
    source = FilesConfig(path=("book.txt",), validation_fraction=0.1).build()
    train, held_out = (source.text(split).tobytes() for split in ("train", "validation"))
    assert train + held_out == pathlib.Path("book.txt").read_bytes()
    assert len(held_out) == pytest.approx(400, abs=2)
    # Its first byte is not predicted, its end is.
    assert source.bytes_per_token == pytest.approx((len(held_out) - 1) / len(held_out))


def test_whole_documents_are_held_out_of_several(tmp_path):
    texts = _texts(50)
    config = FilesConfig(path=(_jsonl("a.jsonl", texts),), tokenizer=TrainedConfig(vocab_size=400))
    source = config.build()
    held_out = set(source.text("validation").tobytes().decode().split("\0"))
    assert len(held_out) == 2 and held_out < set(texts)
    # The vocabulary was trained on the others alone.
    trained_on = train_texts(Files(("a.jsonl",), config), 0.05)
    assert sorted(trained_on) == sorted(set(texts) - held_out)


def test_tokenizer_training_excludes_held_out_documents(tmp_path):
    texts = _texts(150)
    config = FilesConfig(path=(_jsonl("a.jsonl", texts),))
    held_out = set(config.build().text("validation").tobytes().decode().split("\0"))
    trained_on = train_texts(Files(("a.jsonl",), config), 0.05)
    assert sorted(trained_on) == sorted(set(texts) - held_out)


def test_held_out_ends_too_short_to_measure_are_refused(tmp_path):
    path = _jsonl("a.jsonl", ["short"] * 3)
    with pytest.raises(DataError, match="no byte of the validation split is predicted: its docu"):
        FilesConfig(path=(path,), validation_fraction=0.2).build().describe(8)


def test_validation_path_is_held_out(tmp_path):
    train, held_out = _jsonl("a.jsonl", _texts(30)), _jsonl("b.jsonl", ["held out"])
    source = FilesConfig(path=(train,), validation_path=(held_out,)).build()
    assert source.text("validation").tobytes() == b"held out"
    assert source.text("train").tobytes() == "\0".join(_texts(30)).encode()
    assert set(source.fingerprint()["validation"]["files"]) == {"b.jsonl"}


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_bytes_per_token_are_those_of_the_held_out_predictions(tmp_path, packing):
    path, held_out = _jsonl("a.jsonl", _texts(200)), _jsonl("b.jsonl", ["h\u00e9", "held out"])
    config = FilesConfig(path=(path,), validation_path=(held_out,), packing=packing)
    # 3 and 8 bytes, each with its end: 13 predictions.
    assert config.build().bytes_per_token == pytest.approx(11 / 13)
    trained = FilesConfig(
        path=(path,),
        validation_path=(held_out,),
        packing=packing,
        tokenizer=TrainedConfig(vocab_size=300),
    ).build()
    tokens = sum(map(len, trained.tokenizer.encode_all(["h\u00e9", "held out"]))) + 2
    assert trained.bytes_per_token == pytest.approx(11 / tokens)


def test_every_held_out_byte_is_predicted(tmp_path):
    # The bits of one pass over the held-out split are those of all its bytes and ends.
    source = FilesConfig(path=(_jsonl("a.jsonl", _texts(200)),)).build()
    loader = Loader(source, batch_size=1, sequence_length=16, seed=0, split="validation")
    batches = [loader.batch(step) for step in range(loader.num_batches)]
    predictions = sum(float(batch.loss_weights.sum()) for batch in batches)
    text = source.text("validation")
    assert predictions == len(text) + 1  # the last end has no separator after it
    assert (text != 0).sum() / predictions == pytest.approx(source.bytes_per_token)


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_files_batch_is_independent_of_the_number_of_hosts(tmp_path, process_count):
    source = FilesConfig(path=(_jsonl("a.jsonl", _texts(200)),)).build(3)
    again = FilesConfig(path=("a.jsonl",)).build(3)
    whole = Loader(source, batch_size=8, sequence_length=32, seed=3)
    loader = Loader(again, batch_size=8, sequence_length=32, seed=3)
    for step in (0, 5, 100):  # and past the end of an epoch
        parts = [
            loader.batch(step, process_index=i, process_count=process_count)
            for i in range(process_count)
        ]
        expected = whole.batch(step).arrays()
        given = [part.arrays() for part in parts]
        assert all(part.keys() == expected.keys() for part in given)
        for name, array in expected.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in given]), array)
    check_position(whole.position(5), loader.position(5))  # their number is no part of it


def test_cache_is_reused_and_changed_files_are_read_again(tmp_path, monkeypatch):
    path = _jsonl("a.jsonl", _texts(50))
    first = FilesConfig(path=(path,)).build()
    with monkeypatch.context() as patch:
        patch.setattr(planning, "_write", None)  # nothing may be planned again
        second = FilesConfig(path=(path,)).build()
    np.testing.assert_array_equal(second.text("train"), first.text("train"))
    assert second.fingerprint() == first.fingerprint()
    texts = _texts(50)
    _jsonl("a.jsonl", [*texts[:49], "another".ljust(len(texts[49]))])  # of the same size
    third = FilesConfig(path=(path,)).build()
    assert b"another" in third.text("train").tobytes() + third.text("validation").tobytes()
    loaders = [Loader(s, batch_size=2, sequence_length=16, seed=0) for s in (first, third)]
    with pytest.raises(
        DataError, match=r"source.train.files.a.jsonl: \d+ bytes, sha256 \w+ in the"
    ):
        check_position(loaders[0].position(3), loaders[1].position(3))


def test_a_cached_directory_is_listed_once_and_no_file_is_opened(tmp_path, monkeypatch, caplog):
    for number in range(40):
        path = (
            tmp_path / "tree" / str(number % 5) / f"{number:02d}.{'png' if number < 3 else 'txt'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\0" if number < 3 else b"text %d" % number)
    message = "tree: 3 of 40 files are left out because they are not text, tree/0/00.png among them"
    first = FilesConfig(path=("tree",)).build()
    assert caplog.messages.count(message) == 1
    touched = collections.Counter()

    def count(module, name):
        real = getattr(module, name)

        def counted(path, *arguments, **options):
            touched[name] += str(path).startswith("tree/")
            return real(path, *arguments, **options)

        monkeypatch.setattr(module, name, counted)

    for module, name in ((os, "stat"), (os, "lstat"), (io, "open"), (builtins, "open")):
        count(module, name)
    caplog.clear()
    second = FilesConfig(path=("tree",)).build()
    monkeypatch.undo()
    assert caplog.messages.count(message) == 1  # a start that reads the cache warns as well
    assert second.fingerprint() == first.fingerprint()
    assert touched["open"] == 0 and touched["stat"] + touched["lstat"] < 10, touched


def test_directories_without_text_are_refused_whatever_the_cache_holds(tmp_path):
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/a.txt").write_text("text " * 100)
    (tmp_path / "tree/sub/b.png").write_bytes(b"\0")
    FilesConfig(path=("tree",)).build()
    for _ in range(2):
        with pytest.raises(DataError, match=r"data.path=tree/sub holds no text \(from .*check it"):
            FilesConfig(path=("tree", "tree/sub")).build()
    with pytest.raises(DataError, match=r"tree/sub/b.png: byte 0 at offset 0 of the text"):
        FilesConfig(path=("tree", "tree/sub/b.png")).build()  # named, so that it is read


def test_truncated_cache_is_rebuilt(tmp_path):
    path = _jsonl("a.jsonl", _texts(50))
    first = FilesConfig(path=(path,), cache=str(tmp_path / "elsewhere")).build()
    held_out = first.text("validation").tobytes()
    (tokens,) = (tmp_path / "elsewhere").glob("*/tokens.bin")
    os.truncate(tokens, 100)
    second = FilesConfig(path=(path,), cache=str(tmp_path / "elsewhere")).build()
    assert second.text("validation").tobytes() == held_out
    assert not list((tmp_path / "elsewhere").glob("*.*"))
    (digests,) = (tmp_path / "elsewhere").glob("*/digests.npy")
    digests.write_bytes(b"")
    third = FilesConfig(path=(path,), cache=str(tmp_path / "elsewhere")).build()
    assert third.text("validation").tobytes() == held_out


def test_concurrent_planning_keeps_the_first_store(tmp_path, monkeypatch):
    path, write, made = _jsonl("a.jsonl", _texts(50)), planning._write, []

    def overtaken(*arguments):
        write(*arguments)
        monkeypatch.setattr(planning, "_write", write)
        made.append(FilesConfig(path=(path,)).build()._directories["train"])
        made.append(os.stat(made[0]).st_ino)

    monkeypatch.setattr(planning, "_write", overtaken)
    source = FilesConfig(path=(path,)).build()
    assert [source._directories["train"], os.stat(made[0]).st_ino] == made
    assert [path.name for path in made[0].parent.iterdir()] == [made[0].name]


def test_same_names_in_another_folder_are_other_files(tmp_path, monkeypatch):
    held_out = []
    for name, word in (("one", "word"), ("two", "cord")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        os.utime(_jsonl("a.jsonl", _texts(50, word)), (0, 0))
        held_out.append(FilesConfig(path=("a.jsonl",)).build().text("validation").tobytes())
    assert held_out[0] != held_out[1]


def test_another_separator_plans_again(tmp_path):
    bpe = TrainedConfig(vocab_size=300).build(lambda: ["word word"], tmp_path)
    (path,) = tmp_path.glob("bpe-*.json")
    texts = _jsonl("a.jsonl", ["word " * 40] * 3)
    for separator in (None, "!"):
        tokenizer = FileConfig(path=str(path), separator=separator)
        source = FilesConfig(path=(texts,), tokenizer=tokenizer).build()
        first = source.documents["train"].document(0)[0]
        assert first == source.tokenizer.separator
    assert first != bpe.separator


def test_packing_without_a_writable_cache_is_repeated(tmp_path, monkeypatch, caplog):
    source = FilesConfig(path=(_jsonl("a.jsonl", _texts(50)),)).build()
    monkeypatch.setattr("jaxmoe.data.packing.os.replace", _full_disk)
    assert source.num_rows("train", 8) > 0
    assert "is not cached (No space left on device)" in caplog.text


def _full_disk(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"packing": "concatenate"}, "source.packing: best_fit in the checkpoint, concatenate now"),
        ({"tokenizer": TrainedConfig(vocab_size=300)}, "source.tokenizer.kind: bytes in the"),
        ({"validation_fraction": 0.2}, "source.validation_fraction: 0.05 in the checkpoint"),
    ],
)
def test_resume_with_other_reading_fields_is_refused(tmp_path, change, field):
    path = _jsonl("a.jsonl", _texts(80))
    loaders = [
        Loader(config.build(), batch_size=2, sequence_length=16, seed=0)
        for config in (FilesConfig(path=(path,)), FilesConfig(path=(path,), **change))
    ]
    with pytest.raises(DataError, match=re.escape(field)):
        check_position(loaders[0].position(3), loaders[1].position(3))


def test_data_may_move_and_many_files_have_one_hash(tmp_path):
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
        for number in range(20):
            (tmp_path / root / f"{number:02d}.txt").write_text(f"text {number} " * 20)
    prints = [FilesConfig(path=(root,)).build().fingerprint() for root in ("here", "there")]
    assert prints[0] == prints[1]
    assert prints[0]["train"]["num_files"] == 20 and len(prints[0]["train"]["sha256"]) == 64


def test_skipped_records_are_counted(tmp_path, caplog):
    path = _jsonl("a.jsonl", _texts(40))
    with open(path, "ab") as stream:
        stream.write(
            b'\n{"text": 3}\n{"text": "\xff"}\n{"text": "a\\u0000b"}\n{"text": "\\ud800"}\n'
        )
    message = r"a.jsonl line 41 .*field 'text' must hold a text.*--data.on_bad_record skip"
    with pytest.raises(DataError, match=message):
        FilesConfig(path=(path,)).build()
    trained = TrainedConfig(vocab_size=300)
    other = FilesConfig(path=(path,), tokenizer=trained, on_bad_record="skip").build()
    assert other.fingerprint()["train"]["skipped_records"] == 3  # byte 0 is a byte there
    source = FilesConfig(path=(path,), on_bad_record="skip").build()
    assert source.fingerprint()["train"]["skipped_records"] == 4
    assert "40 documents" in source.describe(8) and "(4 records left out)" in source.describe(8)
    assert "left out: a.jsonl line 41" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data.path=a.txt holds no text: found only empty documents"),
        (b"a\0b", r"a.txt: byte 0 at offset 1 of the text, .* choose another tokenizer"),
        (b"abc\xff", "a.txt is not UTF-8: byte 0xff at offset 3"),
    ],
)
def test_unusable_text_is_refused(tmp_path, content, message):
    pathlib.Path("a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        FilesConfig(path=("a.txt",)).build()


def test_data_without_good_records_is_refused(tmp_path):
    pathlib.Path("a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="found 1 records that cannot be used, the first: a.txt"):
        FilesConfig(path=("a.txt",), on_bad_record="skip").build()


@pytest.mark.parametrize(
    ("ids", "tokenizer", "message"),
    [
        ([1, 2, 300], IdsConfig(vocab_size=256), "token id 300 at position 2 of the file is out"),
        ([1, -2, 3], IdsConfig(vocab_size=256), "token id -2 at position 1 of the file"),
        ([1, 2, 9], IdsConfig(vocab_size=9), "vocabulary of 9 .ids 0 to 8.: give the tokenizer"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, ids, tokenizer, message):
    np.save("a.npy", np.array(ids, np.int64))
    with pytest.raises(DataError, match=f"a.npy from position 0: .*{message}"):
        FilesConfig(path=("a.npy",), tokenizer=tokenizer).build()
    np.save("b.npy", np.array([[1, 1, 1], ids], np.int64))
    with pytest.raises(DataError, match=r"b.npy row 1: token id -?\d+ at position [45]"):
        FilesConfig(path=("b.npy",), tokenizer=tokenizer).build()


def test_pretokenised_ids_are_read(tmp_path):
    np.save("a.npy", np.arange(1000, dtype=np.uint16).reshape(100, 10))
    config = FilesConfig(path=("a.npy",), tokenizer=IdsConfig(vocab_size=1000))
    source = config.build()
    assert source.bytes_per_token is None and source.text("train") is None
    rows = [source.row("train", i, 9) for i in range(source.num_rows("train", 9))]
    assert {row.tokens[0] % 10 for row in rows} == {0}  # whole documents, nothing added
    assert source.decode(source.encode("3 999")) == "3 999"
    with pytest.raises(DataError, match="'1000' is not a token id: write numbers from 0 to 999"):
        source.encode("3 1000")
    _jsonl("b.jsonl", ["text"])
    with pytest.raises(DataError, match=r"b.jsonl line 1 .*holds text, and data.tokenizer:ids"):
        FilesConfig(path=("b.jsonl",), tokenizer=IdsConfig(vocab_size=1000)).build()


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    source = FilesConfig(path=(_jsonl("a.jsonl", _texts(10)),)).build()
    with pytest.raises(DataError, match="the train split has .* rows of sequence_length=512, and"):
        Loader(source, batch_size=64, sequence_length=512, seed=0)
    with pytest.raises(DataError, match="more than the validation split holds"):
        evaluation_batches(source, batch_size=1, sequence_length=512, num_batches=99)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_fraction": 0.0}, "data.validation_fraction=0.0 must lie between 0 and 1"),
        ({"text_field": ""}, "data.text_field is empty"),
    ],
)
def test_invalid_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FilesConfig(**fields)


def test_empty_path_is_refused():
    with pytest.raises(DataError, match="data.path is empty: give files, globs or directories"):
        FilesConfig().build()


def test_full_disk_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the cache .*file.* cannot be written .*--data.cache"):
        FilesConfig(path=("a.txt",), cache=str(tmp_path / "file")).build()
    with pytest.raises(DataError, match=r"the cache .*file.* cannot be written .*--data.cache"):
        FilesConfig(
            path=("a.txt",), cache=str(tmp_path / "file"), tokenizer=TrainedConfig()
        ).build()


@pytest.mark.parametrize("count", [1, 20])
def test_message_names_empty_files_as_given(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(DataError, match=r"data.path=\*.txt holds no text: found only empty"):
        FilesConfig(path=("*.txt",)).build()


def test_message_names_the_field_of_a_path(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "lone.idx").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"data.validation_path=nowhere matches no file"):
        FilesConfig(path=("a.txt",), validation_path=("nowhere",)).build()
    with pytest.raises(DataError, match=r"data.mix=nowhere matches no file"):
        MixtureConfig(mix=("a=1:nowhere",)).build()
    (tmp_path / "broken.md").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"broken.md cannot be read: No such file"):
        FilesConfig(path=("*.md",)).build()
    with pytest.raises(DataError, match=r"lone.idx has no lone.bin beside it"):
        FilesConfig(path=("lone.idx",)).build()
