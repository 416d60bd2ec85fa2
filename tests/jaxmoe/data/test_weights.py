# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loss weights of documents: through cache, held-out split and packing into batches."""

import dataclasses
import json
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxmoe.contrib.levels.rows import documents_of
from jaxmoe.data import DataError, FilesConfig, Loader
from jaxmoe.data.loader import _batch_of
from jaxmoe.data.packed import build_sources
from jaxmoe.data.packing import BestFit, Concatenated
from jaxmoe.data.reading.records import Record
from jaxmoe.data.store import DocumentSet
from jaxmoe.data.tokenizer import IdsConfig

WEIGHTS = st.lists(
    st.lists(st.integers(0, 1), min_size=2, max_size=40), min_size=1, max_size=12
).filter(lambda weights: any(any(one[1:]) for one in weights))


def _documents(weights):
    """Token t of document d is 100 d + t + 1: all differ, and none is padding."""
    tokens = [100 * d + 1 + np.arange(len(one)) for d, one in enumerate(weights)]
    counts = np.array([len(one) for one in weights])
    return DocumentSet(
        tokens=np.concatenate(tokens).astype(np.int32),
        starts=np.cumsum(counts) - counts,
        lengths=counts,
        sizes=np.full(len(counts), -1),
        weights=np.concatenate(weights).astype(np.uint8),
    )


def _trained(weights, kept=lambda place: True):
    return [
        100 * d + 1 + t
        for d, one in enumerate(weights)
        for t in range(1, len(one))
        if one[t] and kept(t - 1)
    ]


@hypothesis.given(WEIGHTS, st.integers(2, 12), st.integers(0, 3))
def test_every_trained_token_is_the_target_of_one_weight(weights, length, epoch):
    plan = BestFit(_documents(weights), sequence_length=length, seed=0, file=None)
    rows = [plan.row(index, epoch) for index in range(plan.num_rows)]
    batch = _batch_of(rows)
    assert sorted(batch.targets[batch.loss_weights > 0].tolist()) == _trained(weights)
    assert (batch.loss_weights.sum(axis=1) > 0).all()  # no row without a trained token
    by_level = [d for row in rows for d in documents_of(row)]
    assert sorted(t for d in by_level for t in d.tokens[1:][d.weights > 0]) == _trained(weights)


@hypothesis.given(WEIGHTS.filter(lambda w: any(any(one[1:3]) for one in w)), st.integers(2, 12))
def test_truncated_documents_keep_the_weights_of_their_first_piece(weights, length):
    documents = _documents(weights)
    plan = BestFit(documents, sequence_length=length, seed=0, file=None, long="truncate")
    batch = _batch_of([plan.row(index, 0) for index in range(plan.num_rows)])
    wanted = _trained(weights, lambda place: place < length)
    assert sorted(batch.targets[batch.loss_weights > 0].tolist()) == wanted


def test_long_documents_are_counted_and_left_out():
    weights = [[0, 1, 1], [0] * 9 + [1], [0] * 4 + [1] * 2]
    documents = _documents(weights)
    plans = {
        long: BestFit(documents, sequence_length=4, seed=0, file=None, long=long)
        for long in ("cut", "truncate", "leave_out")
    }
    # Pieces of 4 predictions: 1, 3 (the last trained) and 2 (both trained).
    assert {long: plan.num_left_out for long, plan in plans.items()} == {
        "cut": 2,
        "truncate": 4,
        "leave_out": 5,
    }
    assert {long: plan.num_unused for long, plan in plans.items()} == {
        "cut": 0,
        "truncate": 1,
        "leave_out": 2,
    }
    assert all(plan.is_long.tolist() == [False, True, True] for plan in plans.values())


def test_a_document_that_fills_a_row_is_not_long():
    """A row of 4 predictions holds 5 tokens."""
    documents = _documents([[1] * 5, [1] * 6])
    plan = BestFit(documents, sequence_length=4, seed=0, file=None, long="cut")
    assert plan.is_long.tolist() == [False, True]


def test_concatenation_of_weighted_documents_is_refused():
    with pytest.raises(DataError, match="data.packing=concatenate .* Choose best_fit or levels"):
        Concatenated(_documents([[0, 1]]), sequence_length=4, seed=0, separator=None)


class _Collection:
    """Documents with weights, which stand in for files."""

    has_weights = True

    def __init__(self, weights):
        self._weights, self.times_read = weights, 0

    def identity(self):
        return {"weights": self._weights}

    def content(self):
        return {"documents of": len(self._weights)}

    def records(self, tokenizer):
        del tokenizer
        self.times_read += 1
        documents = _documents(self._weights)
        for number in range(len(self._weights)):
            weights = documents.document_weights(number)
            yield Record(str(number), documents.document(number), weights=weights)

    def warnings(self):
        return []


@pytest.fixture
def build(tmp_path):
    config = FilesConfig(tokenizer=IdsConfig(vocab_size=100_000), cache=str(tmp_path / "cache"))

    def built(collection, **changes):
        changed = dataclasses.replace(config, **changes)
        return build_sources(changed, "weighted", {"": collection}, seed=0)[""]

    return built


def _many(count=60):
    draws = np.random.default_rng(0)
    return [[0, *(draws.integers(0, 2, n)).tolist(), 1] for n in draws.integers(1, 30, count)]


def test_batches_from_the_cache_are_bitwise_those_of_the_first_reading(build):
    first, again = _Collection(_many()), _Collection(_many())
    loaders = [
        Loader(build(collection), batch_size=4, sequence_length=16, seed=0)
        for collection in (first, again)
    ]
    assert (first.times_read, again.times_read) == (1, 0)
    for step in (0, 7, 60):  # and past the end of an epoch
        batches = [loader.batch(step).arrays() for loader in loaders]
        for name, array in batches[0].items():
            np.testing.assert_array_equal(array, batches[1][name])
        assert 0 < batches[0]["loss_weights"].sum() < (batches[0]["segment_ids"] > 0).sum()


def test_held_out_documents_keep_their_weights(build):
    weights = _many()
    source = build(_Collection(weights), validation_fraction=0.1)
    predicted = {}
    for split in ("train", "validation"):
        rows = [source.row(split, i, 16) for i in range(source.num_rows(split, 16))]
        batch = _batch_of(rows)
        predicted[split] = set(batch.targets[batch.loss_weights > 0].tolist())
    assert predicted["train"] | predicted["validation"] == set(_trained(weights))
    numbers = {split: {token // 100 for token in found} for split, found in predicted.items()}
    assert not numbers["train"] & numbers["validation"] and 3 <= len(numbers["validation"]) <= 10


def test_few_documents_with_weights_are_held_out_whole(build):
    source = build(_Collection(_many(3)))
    lengths = {split: len(source.documents[split].lengths) for split in source.documents}
    assert lengths == {"train": 2, "validation": 1}


def test_documents_without_a_trained_token_are_counted(build):
    source = build(_Collection([*_many(), [1, 0, 0], [0, 0]]))
    counts = source.weight_counts(16)
    assert counts is not None and counts.untrained == 2
    assert counts.trained == len(_trained(_many()))
    assert source.fingerprint()["train"]["untrained_documents"] == 2
    with pytest.raises(DataError, match="holds no text: found 1 records without a token to train"):
        build(_Collection([[1, 0, 0]]))


def _facts(path, **changes):
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: _facts(store / "facts.json", format=1),
        lambda store: _facts(store / "facts.json", format=None),
        lambda store: os.truncate(store / "weights.bin", 3),
        lambda store: (store / "weights.bin").unlink(),
    ],
)
def test_cache_of_an_older_format_or_without_weights_is_rebuilt(build, tmp_path, damage):
    build(_Collection(_many()))
    (store,) = (tmp_path / "cache").iterdir()
    before = (store / "weights.bin").read_bytes()
    damage(store)
    again = _Collection(_many())
    build(again)
    assert again.times_read == 1 and (store / "weights.bin").read_bytes() == before


def test_cache_of_documents_without_weights_has_no_file_of_them(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 100)
    FilesConfig(path=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache")).build()
    (store,) = (tmp_path / "cache").iterdir()
    assert "trained_tokens" not in json.loads((store / "facts.json").read_text())
    assert not (store / "weights.bin").exists()


def test_description_counts_what_is_trained_and_left_out(build):
    source = build(_Collection([*_many(), [0, 0], [0] * 40 + [1]]))
    text = source.describe(16)
    assert "62 documents" not in text and "61 documents" in text
    assert "1 documents without a trained token left out" in text
    assert "documents longer than 17 tokens cut (in no row: " in text and "of them trained" in text
