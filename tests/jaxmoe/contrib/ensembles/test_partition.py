# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions: parts are disjoint and together everything, held-out data whole, errors in words."""

import dataclasses
import json

import numpy as np
import pytest

from jaxmoe.contrib.ensembles import partition as partitions
from jaxmoe.contrib.ensembles.partition import ClusterPartConfig, PartRows, parse_part
from jaxmoe.data import (
    DataError,
    FilesConfig,
    LanguageMixtureConfig,
    Loader,
    MixtureConfig,
)
from jaxmoe.data.corpus import CorpusConfig

WORDS = ("alpha beta gamma delta", "one two three four", "noir vert bleu jaune")


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(partitions, "_FITTED_ROWS", 128)
    random = np.random.default_rng(0)
    lines = [
        json.dumps({"text": f"{n} " + " ".join(random.choice(WORDS[n % 3].split(), 20))})
        for n in range(120)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))


def files(**fields):
    return FilesConfig(path=("a.jsonl",), **fields).build(0)


def texts(source, split):
    documents = source.documents[split]
    return [
        source.decode(documents.document(number).astype(np.int32))
        for number in range(len(documents.lengths))
    ]


def languages_of(text):
    """Languages of the words in a text; a row may cut a word."""
    words = set(text.replace("\0", " ").split())
    return {number for number, known in enumerate(WORDS) if words & set(known.split())}


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_parts_of_files_are_disjoint_and_together_everything(packing):
    whole = files(packing=packing)
    subsets = [ClusterPartConfig(part=f"{part}/3") for part in (1, 2, 3)]
    parts = [files(packing=packing, partition=partition) for partition in subsets]
    found = [text for part in parts for text in texts(part, "train")]
    assert sorted(found) == sorted(texts(whole, "train"))
    for part in parts:
        assert texts(part, "validation") == texts(whole, "validation")
        languages = {n for text in texts(part, "train") for n in languages_of(text)}
        assert len(languages) == 1
        rows = [part.row("train", index, 128) for index in range(part.num_rows("train", 128))]
        seen = {n for row in rows for n in languages_of(part.decode(row.tokens))}
        assert seen == languages
    held_out = whole.row("validation", 0, 32).tokens
    np.testing.assert_array_equal(parts[2].row("validation", 0, 32).tokens, held_out)


def test_a_partition_is_computed_once_and_packings_of_parts_are_apart(monkeypatch):
    first = [files(partition=ClusterPartConfig(part=f"{part}/3")) for part in (1, 2, 3)]
    rows = [source.num_rows("train", 64) for source in first]

    def fail(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(partitions, "fit_documents", fail)
    again = [files(partition=ClusterPartConfig(part=f"{part}/3")) for part in (1, 2, 3)]
    assert [source.num_rows("train", 64) for source in again] == rows
    assert [texts(source, "train") for source in again] == [
        texts(source, "train") for source in first
    ]
    (damaged,) = (path for path in store_directory(first[0]).glob("parts-*-3.npz"))
    damaged.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="computed again"):
        files(partition=ClusterPartConfig(part="1/3"))


def store_directory(source):
    return source._directories["train"]


def test_the_data_position_names_part_and_centroids():
    position = Loader(files(), batch_size=2, sequence_length=32, seed=0).position(0)
    assert "partition" not in position["source"]
    digests = set()
    for part in ("1/3", "2/3", "1/2"):
        source = files(partition=ClusterPartConfig(part=part))
        found = source.fingerprint()["partition"]
        assert found["part"] == part
        digests.add(found["centroids"])
        described = f", part {part[0]} of {part[2]}, best_fit rows"
        assert described in source.describe(32)
    assert len(digests) == 2


def test_parts_of_a_language_mixture_are_its_languages():
    config = LanguageMixtureConfig(num_languages=3)
    whole = config.build(5)
    seen = []
    for part in ("1/3", "2/3", "3/3"):
        source = dataclasses.replace(config, partition=ClusterPartConfig(part=part)).build(5)
        rows = [source.row("train", index, 32).tokens for index in range(40)]
        assert len({int(language) for row in rows for language in source.language_of(row)}) == 1
        seen += [row.tobytes() for row in rows]
        held_out = source.row("validation", 3, 32).tokens
        np.testing.assert_array_equal(held_out, whole.row("validation", 3, 32).tokens)
        assert source.entropy_bits_per_token(32) == whole.entropy_bits_per_token(32)
    assert len(set(seen)) == len(seen)
    first = {whole.row("train", index, 32).tokens.tobytes() for index in range(60)}
    assert first <= set(seen)
    without = {key: value for key, value in source.fingerprint().items() if key != "partition"}
    assert without == whole.fingerprint()


def test_the_partition_does_not_depend_on_the_training_seed():
    config = LanguageMixtureConfig(partition=ClusterPartConfig(part="1/2"))
    digests = {config.build(seed).fingerprint()["partition"]["centroids"] for seed in (0, 7)}
    assert len(digests) == 1


def test_rows_of_a_part_are_the_same_in_any_order():
    source = LanguageMixtureConfig(partition=ClusterPartConfig(part="2/4")).build(0)
    late = source.row("train", 70, 16).tokens
    again = LanguageMixtureConfig(partition=ClusterPartConfig(part="2/4")).build(0)
    in_order = [again.row("train", index, 16).tokens for index in range(71)]
    np.testing.assert_array_equal(in_order[-1], late)


def test_a_part_without_rows_is_an_error(monkeypatch):
    source = LanguageMixtureConfig(num_languages=2, partition=ClusterPartConfig(part="1/2")).build(
        0
    )
    other = int(source.row("train", 0, 16).tokens[0]) // 8 ^ 1
    monkeypatch.setattr(partitions, "_MOST_MISSES", 100)
    assert source.partition is not None
    rows = PartRows(source.partition, lambda number, length: np.full(length + 1, other * 8))
    with pytest.raises(DataError) as refused:
        rows.number(0, 16)
    assert str(refused.value) == (
        "data.partition.part=1/2: none of 100 rows of sequence_length=16 belongs to this part: ask"
        " for fewer parts, or longer rows"
    )


@pytest.mark.slow
def test_parts_of_the_corpus_are_together_its_files():
    whole = CorpusConfig().build()
    parts = [CorpusConfig(partition=ClusterPartConfig(part=f"{part}/2")).build() for part in (1, 2)]
    counts = [part.num_documents["train"] for part in parts]
    assert min(counts) > 0 and sum(counts) == whole.num_documents["train"]
    sizes = [len(part.text("train")) for part in parts]
    assert sum(sizes) + 1 == len(whole.text("train"))  # a separator less
    assert all(part.sha256["validation"] == whole.sha256["validation"] for part in parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "3/2",
            "data.partition.part=3/2: there is no part 3 of 2: choose from 1/2 to 2/2",
        ),
        (
            "0/2",
            "data.partition.part=0/2: there is no part 0 of 2: choose from 1/2 to 2/2",
        ),
        ("0/0", "data.partition.part=0/0 has no parts: 3/8 is the third of eight parts"),
        (
            "3",
            "data.partition.part='3' must be PART/PARTS: 3/8 is the third of eight parts",
        ),
    ],
)
def test_parts_that_do_not_exist_are_refused(text, message):
    for config in (FilesConfig, LanguageMixtureConfig, CorpusConfig):
        with pytest.raises(ValueError) as refused:
            config(partition=ClusterPartConfig(part=text))
        assert str(refused.value) == message


def test_parts_are_counted_from_one():
    assert parse_part("3/8") == (2, 8)


def test_mixtures_are_not_partitioned():
    with pytest.raises(ValueError) as refused:
        MixtureConfig(mix=("a=1:a.jsonl",), partition=ClusterPartConfig(part="1/2"))
    assert str(refused.value) == (
        "data:mixture divides its rows by weight, and data.partition:clusters by content: give all"
        " files to one data.path, as data:files, or leave data.partition out"
    )


def test_more_parts_than_documents_are_refused():
    count = len(files().documents["train"].lengths)
    message = f"asks for 500 parts, and the training data have {count} documents"
    with pytest.raises(DataError, match=message):
        files(partition=ClusterPartConfig(part="1/500"))
