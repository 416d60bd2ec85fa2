# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures: exact shares, whole epochs of each part, any number of hosts, and errors."""

import collections
import json
import re

import numpy as np
import pytest

from jaxmoe.data import (
    DataError,
    Loader,
    MarkovConfig,
    Mixture,
    MixtureConfig,
    Source,
    check_position,
)
from jaxmoe.data.tokenizer import TrainedConfig


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 130), ("b", 110), ("c", 120)):
        texts = [f"{name} {i} " + f"{name} " * 20 for i in range(count)]
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))


def _build(*mix, **fields):
    return MixtureConfig(mix=mix, **fields).build(0)


def _part_of(source, row):
    (letter,) = set(source.decode(row.tokens)) & set("abc")
    return letter


def test_mixture_rows_have_exact_shares():
    source = _build("a=0.7:a.jsonl", "b=0.2:b.jsonl", "c=0.1:c.jsonl")
    assert isinstance(source, Source)
    loader = Loader(source, batch_size=10, sequence_length=32, seed=0)
    for first in (0, 10_000_000):
        rows = [loader.row(first + number) for number in range(10)]
        assert collections.Counter(_part_of(source, row) for row in rows) == {
            "a": 7,
            "b": 2,
            "c": 1,
        }
    assert "mixture of a 70.0% (files: 130 documents" in source.describe(32)


def test_mixture_part_visits_all_rows_before_its_next_epoch():
    source = _build("a=1:a.jsonl", "b=1:b.jsonl")
    size = source._sources[0].num_rows("train", 64)
    rows = [source.row("train", number, 64) for number in range(4 * size)]
    mine = [row.tokens.tobytes() for row in rows if _part_of(source, row) == "a"]
    assert len(mine) == 2 * size
    assert len(set(mine[:size])) == len(set(mine[size:])) == size
    assert mine[:size] != mine[size:]


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_mixture_batch_is_independent_of_the_number_of_hosts(process_count):
    loaders = [
        Loader(_build("a=3:a.jsonl", "b=1:b.jsonl"), batch_size=8, sequence_length=32, seed=0)
        for _ in range(2)
    ]
    for step in (0, 3, 500):
        parts = [
            loaders[1].batch(step, process_index=i, process_count=process_count)
            for i in range(process_count)
        ]
        whole = loaders[0].batch(step).arrays()
        given = [part.arrays() for part in parts]
        assert all(part.keys() == whole.keys() for part in given)
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in given]), array)


def test_mixture_validation_rows_have_the_same_shares_without_repeats():
    source = _build("a=2:a.jsonl", "b=1:b.jsonl", validation_fraction=0.3)
    length = source.num_rows("validation", 64)
    rows = [source.row("validation", number, 64) for number in range(length)]
    counts = collections.Counter(_part_of(source, row) for row in rows)
    assert abs(counts["a"] - 2 * counts["b"]) <= 2
    assert len({row.tokens.tobytes() for row in rows}) == length


def test_mixture_parts_share_one_tokenizer():
    source = _build("a=1:a.jsonl", "b=1:b.jsonl", tokenizer=TrainedConfig(vocab_size=300))
    kinds = {part.tokenizer.fingerprint()["sha256"] for part in source._sources}
    assert len(kinds) == 1
    assert source.decode(source.encode("a b")) == "a b"
    ratios = [part.bytes_per_token for part in source._sources]
    assert source.bytes_per_token == pytest.approx(np.mean(ratios))


def test_mixture_weights_are_part_of_the_position():
    loaders = [
        Loader(
            _build(f"a={weight}:a.jsonl", "b=1:b.jsonl"), batch_size=4, sequence_length=32, seed=0
        )
        for weight in (2, 3)
    ]
    message = "source.parts.a.weight: 2 in the checkpoint, 3 now"
    with pytest.raises(DataError, match=re.escape(message)):
        check_position(loaders[0].position(1), loaders[1].position(1))


def test_a_weight_of_zero_leaves_a_part_out():
    source = _build("a=1:a.jsonl", "b=0:no-such-file")
    assert set(source.fingerprint()["parts"]) == {"a"}


def test_any_sources_can_be_mixed():
    parts = {str(n): (1.0, MarkovConfig(language_seed=n).build(0)) for n in range(2)}
    mixture = Mixture(parts, seed=0)
    assert mixture.num_rows("validation", 8) is None and mixture.bytes_per_token is None
    rows = [mixture.row("train", number, 8).tokens for number in range(4)]
    expected = [parts[str(n)][1].row("train", i, 8).tokens for i in range(2) for n in range(2)]
    np.testing.assert_array_equal(rows, expected)
    entropies = [source.entropy_bits_per_token(8) for _, source in parts.values()]
    assert mixture.entropy_bits_per_token(8) == pytest.approx(np.mean(entropies))
    parts["2"] = (1.0, MarkovConfig(vocab_size=9).build(0))
    with pytest.raises(DataError, match="must share one tokenizer: 0, 1, 2 have vocabularies of"):
        Mixture(parts, seed=0)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (("a=-0.5:x",), "data.mix: the weight of a is -0.5, which must be a number, 0 (absent) or"),
        (("a=nan:x",), "the weight of a is nan"),
        (("a=inf:x",), "the weight of a is inf"),
        (("a=much:x",), "the weight of a is much"),
        (("a:x",), "data.mix has 'a:x': write a part as NAME=WEIGHT:PATH"),
        (("a=1:x", "a=2:y"), "data.mix names a part twice: a, a"),
        (("a=0:x",), "data.mix: every weight is 0"),
    ],
)
def test_invalid_mixtures_are_refused(mix, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MixtureConfig(mix=mix)


def test_mixture_without_parts_or_with_negative_weights_is_refused():
    with pytest.raises(DataError, match="data.mix is empty: give parts as NAME=WEIGHT:PATH"):
        MixtureConfig().build()
    with pytest.raises(DataError, match="the weight of a is -1.0"):
        Mixture({"a": (-1.0, MarkovConfig().build(0))}, seed=0)
