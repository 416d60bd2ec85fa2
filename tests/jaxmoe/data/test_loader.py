# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loader: purity, hosts, epochs, position, prefetch, and errors."""

import dataclasses
import json
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe.data import (
    Batch,
    DataError,
    Loader,
    MarkovConfig,
    Row,
    Source,
    check_position,
    evaluation_batches,
)


@dataclasses.dataclass
class Counting:
    """Row i of S + 1 tokens starts with token i; the validation split has five rows."""

    rows: int = 10
    vocab_size: int = 1000
    bytes_per_token: float | None = None
    fail_at: int = -1

    def num_rows(self, split, sequence_length):
        return self.rows if split == "train" else 5

    def row(self, split, index, sequence_length, *, epoch=0):
        if index == self.fail_at:
            raise OSError("disk on fire")
        return Row(np.arange(index, index + sequence_length + 1, dtype=np.int32))

    def describe(self, sequence_length):
        return "counting"

    def text(self, split):
        return None

    def entropy_bits_per_token(self, sequence_length):
        return None

    def fingerprint(self):
        return {"kind": "counting", "train": {"rows": self.rows}}

    def encode(self, text):
        return np.zeros(0, np.int32)

    def decode(self, tokens):
        return ""


def _loader(source=None, **changes):
    fields: dict[str, Any] = {"batch_size": 4, "sequence_length": 3, "seed": 0}
    return Loader(source or Counting(), **(fields | changes))


def _assert_same(left: Batch, right: Batch):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_source_implements_the_protocol():
    assert isinstance(Counting(), Source)


def test_batch_fields_have_shape_and_dtype():
    batch = _loader().batch(0)
    np.testing.assert_array_equal(batch.targets, batch.tokens + np.int32(1))
    assert batch.positions is None and batch.segment_ids is None  # each row is one segment
    assert batch.tokens.shape == (4, 3)
    assert (batch.loss_weights == 1).all()
    kinds = {name: str(values.dtype) for name, values in batch.arrays().items()}
    assert kinds.pop("loss_weights") == "float32"
    assert set(kinds.values()) == {"int32"}


class Weighted(Counting):
    """Rows whose token of place p has loss weight p / 8; odd rows consist of two documents."""

    def row(self, split, index, sequence_length, *, epoch=0):
        tokens = super().row(split, index, sequence_length).tokens
        segments = np.where(np.arange(len(tokens)) < 2, 1, 2).astype(np.int32)
        weights = np.arange(len(tokens), dtype=np.float32) / np.float32(8)
        return Row(tokens, segments if index % 2 else None, weights)


def test_loss_weights_of_rows_weigh_their_targets_within_documents():
    loader = Loader(Weighted(), batch_size=2, sequence_length=3, seed=0, split="validation")
    batch = loader.batch(0)
    np.testing.assert_array_equal(batch.loss_weights, [[0.125, 0.25, 0.375], [0.125, 0, 0.375]])
    assert batch.loss_weights.dtype == np.float32


@pytest.mark.parametrize("source", [Counting(), MarkovConfig().build(0)])
def test_batch_is_a_function_of_seed_and_step(source):
    forward = [_loader(source).batch(step) for step in range(6)]
    for step in (5, 2, 0, 3):
        _assert_same(_loader(source).batch(step), forward[step])


def test_seed_changes_the_order():
    tokens = [_loader(seed=seed).batch(0).tokens for seed in range(8)]
    assert len({t.tobytes() for t in tokens}) > 4


@pytest.mark.parametrize("source", [Counting(), MarkovConfig().build(0)])
@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_parts_of_hosts_concatenate_to_the_batch(source, process_count):
    loader = _loader(source)
    for step in range(7):
        parts = [
            loader.batch(step, process_index=i, process_count=process_count)
            for i in range(process_count)
        ]
        assert all(len(part.tokens) == 4 // process_count for part in parts)
        whole = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        _assert_same(whole, loader.batch(step))


def test_epoch_visits_each_row_once_in_its_own_order():
    # 10 rows in batches of 4: every other epoch begins inside a batch.
    loader = _loader()
    firsts = np.concatenate([loader.batch(step).tokens[:, 0] for step in range(20)])
    epochs = firsts.reshape(8, 10)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(10), (8, 1)))
    assert len({epoch.tobytes() for epoch in epochs}) == 8


def test_unlimited_rows_are_never_repeated():
    loader = _loader(MarkovConfig().build(0), sequence_length=20)
    rows = np.concatenate([loader.batch(step).tokens for step in range(20)])
    assert len(np.unique(rows, axis=0)) == 80
    assert loader.num_batches is None


def test_validation_is_in_order_and_ends():
    for seed in (0, 1):
        loader = _loader(split="validation", batch_size=2, seed=seed)
        np.testing.assert_array_equal(loader.batch(1).tokens[:, 0], [2, 3])
    assert loader.num_batches == 2
    message = (
        "validation batch 2 does not exist: the split has 5 rows of sequence_length=3, 2 batches "
        "of 2. Ask for fewer batches or smaller ones"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        loader.batch(2)


def test_evaluation_batches_are_fixed():
    def firsts():
        batches = evaluation_batches(Counting(), batch_size=2, sequence_length=3, num_batches=2)
        return [batch.tokens[:, 0].tolist() for batch in batches]

    assert firsts() == firsts() == [[0, 1], [2, 3]]
    message = (
        "num_batches=3 of batch_size=2 and sequence_length=3 are more than the validation split "
        "holds (2): ask for at most 2"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        evaluation_batches(Counting(), batch_size=2, sequence_length=3, num_batches=3)
    with pytest.raises(DataError, match="num_batches=0 must be at least 1"):
        evaluation_batches(Counting(), batch_size=2, sequence_length=3, num_batches=0)


def test_position_survives_json_and_the_same_data():
    saved = json.loads(json.dumps(_loader().position(7)))
    check_position(saved, _loader().position(7))
    assert saved["step"] == 7 and saved["source"] == {"kind": "counting", "train": {"rows": 10}}


def test_other_data_is_refused_field_by_field():
    saved = _loader().position(7)
    current = _loader(Counting(rows=12), seed=3, batch_size=8).position(7)
    message = (
        "the checkpoint was trained on other data:\n"
        "  source.train.rows: 10 in the checkpoint, 12 now\n"
        "  seed: 0 in the checkpoint, 3 now\n"
        "  batch_size: 4 in the checkpoint, 8 now\n"
        "Give the same data, seed, batch size and length, or start a new run directory"
    )
    with pytest.raises(DataError) as error:
        check_position(saved, current)
    assert str(error.value) == message
    with pytest.raises(DataError, match="sequence_length: 3 in the checkpoint, 4 now"):
        check_position(saved, _loader(sequence_length=4).position(7))
    with pytest.raises(DataError, match="step: 7 in the checkpoint, 8 now"):
        check_position(saved, _loader().position(8))
    with pytest.raises(DataError, match=r"source\.vocab_size: absent in the checkpoint, 8 now"):
        check_position(saved, _loader(MarkovConfig().build(0)).position(7))


def _data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def _assert_threads_end():
    for thread in _data_threads():
        thread.join(timeout=10)  # it ends with the batch that it has in hand
    assert not _data_threads()


def test_prefetch_yields_steps_in_order():
    loader = _loader()
    batches = list(loader.iterate(3, 11, process_index=1, process_count=2))
    assert len(batches) == 8
    for step, batch in enumerate(batches, start=3):
        _assert_same(batch, loader.batch(step, process_index=1, process_count=2))
    assert list(loader.iterate(5, 5)) == []
    _assert_threads_end()


def test_prefetch_is_bounded_and_closes():
    before, steps = _data_threads(), []

    class Watched(Loader):
        def batch(self, step, **kwargs):
            steps.append(step)
            return super().batch(step, **kwargs)

    iterator = Watched(Counting(), batch_size=4, sequence_length=3, seed=0).iterate(0, 1000)
    next(iterator)
    next(iterator)
    assert len(set(_data_threads()) - set(before)) == 1
    iterator.close()
    _assert_threads_end()
    assert steps == list(range(len(steps))) and len(steps) <= 4


def test_prefetch_error_is_raised_at_its_step():
    # Two steps make one epoch of eight rows: find the one that reads row 6.
    first_rows = [_loader(Counting(rows=8)).batch(step).tokens[:, 0] for step in range(2)]
    step_of_error = [6 in rows for rows in first_rows].index(True)
    iterator = _loader(Counting(rows=8, fail_at=6)).iterate(0, 2)
    for _ in range(step_of_error):
        next(iterator)
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)
    _assert_threads_end()


def test_batch_without_loss_weights_is_refused():
    class Padded(Counting):
        def row(self, split, index, sequence_length, *, epoch=0):
            tokens = np.zeros(sequence_length + 1, np.int32)
            return Row(tokens, np.zeros(sequence_length + 1, np.int32))

    message = "train batch 2 has 12 predictions, and the loss weight of each is 0 (padding, or"
    with pytest.raises(DataError, match=re.escape(message)):
        _loader(Padded()).batch(2)


def test_resume_with_another_shuffle_is_refused(monkeypatch):
    saved = _loader().position(7)
    monkeypatch.setattr("jaxmoe.data.loader.order_digest", lambda: "00000000")
    with pytest.raises(DataError, match="order: 6c375f4b in the checkpoint, 00000000 now"):
        check_position(saved, _loader().position(7))


def test_unlimited_source_has_no_order():
    assert "order" not in _loader(MarkovConfig().build(0)).position(7)


def test_token_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(DataError, match="outside the vocabulary of 5"):
        _loader(Counting(vocab_size=5)).batch(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1 must be at least 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        (
            {"batch_size": 11},
            "the train split has 10 rows of sequence_length=3, and batch_size=11 must be at most "
            "that: lower one of them (--training.sequence_length, --training.batch_size), or bring "
            "more data",
        ),
    ],
)
def test_invalid_loaders_are_refused(changes, message):
    with pytest.raises(DataError, match=re.escape(message)):
        _loader(**changes)


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (
            0,
            {"process_count": 3},
            "batch_size=4 must be divisible by the number of hosts (3): choose a multiple of 3",
        ),
        (0, {"process_index": 2, "process_count": 2}, "process_index=2 must be in [0, 2)"),
        (-1, {}, "step=-1 must not be negative"),
    ],
)
def test_invalid_batch_requests_are_refused(step, changes, message):
    with pytest.raises(DataError, match=re.escape(message)):
        _loader().batch(step, **changes)
