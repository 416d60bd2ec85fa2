# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packing: every token once, no mixed segments, and equality with a reference best fit."""

import collections
import dataclasses
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer, init_params
from jaxmoe.data.loader import Loader, _batch_of
from jaxmoe.data.order import frozen_generator
from jaxmoe.data.packing import BestFit, Concatenated, best_fit
from jaxmoe.data.pieces import cut
from jaxmoe.data.source import Row
from jaxmoe.data.store import DocumentSet
from tests.support.models import TINY

DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=25)
LENGTHS = st.integers(2, 12)


def _documents(lengths):
    """Token t of document d is 100 d + t + 1: all differ, and none is padding."""
    tokens = np.concatenate([100 * d + 1 + np.arange(n) for d, n in enumerate(lengths)])
    counts = np.array(lengths)
    return DocumentSet(
        tokens=tokens.astype(np.int32),
        starts=np.cumsum(counts) - counts,
        lengths=counts,
        sizes=counts,
    )


def _predicted(rows):
    """(token, target) of every prediction with a loss weight, over some rows."""
    batch = _batch_of(rows)
    counted = batch.loss_weights > 0
    return list(zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist(), strict=True))


def _wanted(lengths):
    return [(100 * d + t, 100 * d + t + 1) for d, n in enumerate(lengths) for t in range(1, n)]


@hypothesis.given(DOCUMENTS, LENGTHS, st.integers(0, 3))
def test_every_token_but_the_first_is_predicted_once(lengths, sequence_length, epoch):
    plan = BestFit(_documents(lengths), sequence_length=sequence_length, seed=0, file=None)
    rows = [plan.row(index, epoch) for index in range(plan.num_rows)]
    assert all(len(row.tokens) == sequence_length + 1 for row in rows)
    wanted = _wanted(lengths)
    if rows:
        assert sorted(_predicted(rows)) == wanted
        assert plan.efficiency() == pytest.approx(len(wanted) / (len(rows) * sequence_length))
    else:
        assert not wanted


@hypothesis.given(DOCUMENTS, LENGTHS)
def test_segments_are_contiguous_within_one_document(lengths, sequence_length):
    plan = BestFit(_documents(lengths), sequence_length=sequence_length, seed=1, file=None)
    for index in range(plan.num_rows):
        row = plan.row(index, 0)
        for segment in range(1, int(row.segment_ids.max()) + 1):
            tokens = row.tokens[row.segment_ids == segment]
            assert len(tokens) >= 2  # something to predict
            np.testing.assert_array_equal(np.diff(tokens), np.ones(len(tokens) - 1, np.int32))
            assert len(set((tokens // 100).tolist())) == 1
        assert (row.tokens[row.segment_ids == 0] == 0).all()
        assert (np.diff((row.segment_ids == 0).astype(int)) >= 0).all()  # padding comes last


def _slow_best_fit(lengths, capacity):
    """Rows as lists of lengths: each piece goes into the fullest row with enough space."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@hypothesis.given(st.lists(st.integers(2, 17), max_size=60), st.integers(17, 30))
def test_best_fit_equals_the_reference(lengths, capacity):
    ordered = np.array(sorted(lengths, reverse=True), np.int64)
    rows = collections.defaultdict(list)
    for length, row in zip(ordered.tolist(), best_fit(ordered, capacity).tolist(), strict=True):
        rows[row].append(length)
    assert sorted(rows) == list(range(len(rows)))
    wanted = _slow_best_fit(lengths, capacity)  # of equally full rows, either may be taken
    assert sorted(map(sum, rows.values())) == sorted(map(sum, wanted))


def test_pieces_overlap_by_one():
    owner, piece, length = cut(np.array([1, 2, 9, 10, 0]), 4)
    assert owner.tolist() == [1, 2, 2, 3, 3, 3]
    assert piece.tolist() == [0, 0, 1, 0, 1, 2]
    assert length.tolist() == [2, 5, 5, 5, 5, 2]


def _rows_of_all_pieces(documents, length, seed, epoch):
    """Tokens of all rows, from arrays of all pieces: sorted, packed, drawn."""
    owner, piece, sizes = cut(documents.lengths, length)
    slots = best_fit(-np.sort(-sizes), length + 1)
    numbers = np.arange(len(sizes))
    if seed is not None:
        numbers = frozen_generator(seed, epoch).permutation(len(sizes))
    filled = numbers[np.argsort(-sizes[numbers], kind="stable")]
    rows = []
    for row in range(slots.max(initial=-1) + 1):
        tokens = [
            documents.document(owner[number])[piece[number] * length :][: sizes[number]]
            for number in filled[slots == row]
        ]
        joined = np.concatenate(tokens)
        rows.append(np.pad(joined, (0, length + 1 - len(joined))))
    if seed is None:
        rows = [rows[number] for number in frozen_generator(0).permutation(len(rows))]
    return rows


@hypothesis.given(DOCUMENTS, LENGTHS, st.sampled_from([None, 0, 3]), st.integers(0, 2))
def test_rows_are_those_of_a_table_of_all_pieces(lengths, sequence_length, seed, epoch):
    documents = _documents(lengths)
    plan = BestFit(documents, sequence_length=sequence_length, seed=seed, file=None)
    expected = _rows_of_all_pieces(documents, sequence_length, seed, 0 if seed is None else epoch)
    rows = [plan.row(index, epoch).tokens.tolist() for index in range(plan.num_rows)]
    assert rows == [row.tolist() for row in expected]


@pytest.mark.parametrize("seed", [None, 0])
def test_a_long_document_takes_few_bytes_for_each_row(seed):
    def peak(num_rows):
        size = 8 * num_rows + 1
        documents = DocumentSet(
            tokens=np.broadcast_to(np.int32(1), (size,)),  # takes no memory
            starts=np.zeros(1, np.int64),
            lengths=np.array([size]),
            sizes=np.array([size]),
        )
        tracemalloc.start()
        plan = BestFit(documents, sequence_length=8, seed=seed, file=None)
        assert plan.num_rows == num_rows
        plan.row(5, 0)
        return tracemalloc.get_traced_memory()[1], tracemalloc.stop()

    small, large = peak(20_000)[0], peak(100_000)[0]
    # Numbers of pieces in int32, twice while they are drawn, and marks of one byte; a held-out
    # split has the order of its rows too. A table of all pieces takes 100 bytes for each.
    assert (large - small) / 80_000 < (12 if seed is not None else 24)


def test_epochs_differ_and_have_equal_length():
    # 60 documents of 5 lengths: equal ones change places.
    plan = BestFit(_documents([2, 3, 4, 5, 6] * 12), sequence_length=10, seed=0, file=None)
    epochs = [
        {plan.row(index, epoch).tokens.tobytes() for index in range(plan.num_rows)}
        for epoch in (0, 1, 0)
    ]
    assert epochs[0] == epochs[2] != epochs[1]
    assert len(epochs[0]) == len(epochs[1]) == plan.num_rows


def test_validation_rows_are_the_same_in_every_epoch():
    documents = _documents([2, 3, 4, 5, 6] * 12)
    plans = [BestFit(documents, sequence_length=10, seed=None, file=None) for _ in range(2)]
    for index in range(plans[0].num_rows):
        first, second = (plan.row(index, 0).tokens for plan in plans)
        np.testing.assert_array_equal(first, second)


def test_packing_is_cached_and_repacked_if_damaged(tmp_path, monkeypatch):
    file = tmp_path / "slots.npy"
    documents = _documents([5, 9, 3, 3, 7])

    def rows():
        plan = BestFit(documents, sequence_length=8, seed=0, file=file)
        return [plan.row(index, 0).tokens.tolist() for index in range(plan.num_rows)]

    first = rows()
    monkeypatch.setattr("jaxmoe.data.packing.best_fit", None)  # must not be needed again
    assert rows() == first
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:-9])
    assert rows() == first


@hypothesis.given(DOCUMENTS, LENGTHS, st.sampled_from([None, 0]))
def test_concatenation_cuts_one_stream(lengths, sequence_length, seed):
    plan = Concatenated(
        _documents(lengths), sequence_length=sequence_length, seed=seed, separator=None
    )
    total = sum(lengths)
    assert plan.num_rows == max(0, (total - 1) // sequence_length)
    rows = {int(plan._rows[i]): plan.row(i, 2) for i in range(plan.num_rows)}
    stream = [rows[i].tokens.tolist() for i in range(plan.num_rows)]
    assert all(row.segment_ids is None for row in rows.values())
    for before, after in zip(stream, stream[1:], strict=False):
        assert before[-1] == after[0]
    seen = [token for row in stream for token in row[1:]] + [row[0] for row in stream[:1]]
    assert len(set(seen)) == len(seen)  # none twice
    assert total - len(seen) < max(sequence_length, 1) or not stream  # only the tail is left out


def test_adjacent_separators_become_one():
    tokens = np.array([0, 5, 6, 0, 0, 7, 0, 0, 8, 9, 0], np.int32)
    documents = DocumentSet(
        tokens=tokens,
        starts=np.array([0, 4, 7]),
        lengths=np.array([4, 3, 4]),
        sizes=np.array([2, 1, 2]),
    )
    plan = Concatenated(documents, sequence_length=7, seed=None, separator=0)
    assert plan.num_rows == 1
    assert plan.row(0, 0).tokens.tolist() == [5, 6, 0, 7, 0, 8, 9, 0]


def test_packed_batch_equals_hand_computed_arrays():
    row = Row(
        np.array([11, 12, 13, 21, 22, 0, 0], np.int32), np.array([1, 1, 1, 2, 2, 0, 0], np.int32)
    )
    batch = _batch_of([row])
    assert batch.tokens.tolist() == [[11, 12, 13, 21, 22, 0]]
    assert batch.targets.tolist() == [[12, 13, 21, 22, 0, 0]]
    assert batch.loss_weights.tolist() == [[1, 1, 0, 1, 0, 0]]
    assert batch.segment_ids is not None and batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert batch.positions is not None and batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert {batch.segment_ids.dtype, batch.positions.dtype} == {np.dtype(np.int32)}


def test_documents_of_a_packed_row_are_independent(key):
    model = dataclasses.replace(TINY, num_layers=1)  # more layers cannot hide a leak of the first
    params = init_params(model, key)
    plan = BestFit(_documents([6, 5, 4]), sequence_length=15, seed=0, file=None)
    row = plan.row(0, 0)
    batch = _batch_of([row])
    is_second = batch.segment_ids == 2

    @jax.jit
    def logits(tokens):
        about = {
            "positions": jnp.asarray(batch.positions),
            "segment_ids": jnp.asarray(batch.segment_ids),
        }
        return Transformer(model).apply({"params": params}, tokens, **about).logits

    tokens = batch.tokens % model.vocab_size
    changed = np.where(is_second, (tokens + 7) % model.vocab_size, tokens).astype(np.int32)
    before, after = np.asarray(logits(tokens)), np.asarray(logits(changed))
    np.testing.assert_array_equal(before[~is_second], after[~is_second])
    assert (before[is_second] != after[is_second]).any()


def test_loader_passes_epochs_to_packed_rows():
    class Packed:
        vocab_size = 2000
        bytes_per_token = None
        plan = BestFit(_documents([2, 3, 4, 5] * 4), sequence_length=6, seed=0, file=None)

        def num_rows(self, split, sequence_length):
            return self.plan.num_rows

        def row(self, split, index, sequence_length, *, epoch=0):
            return self.plan.row(index, epoch)

        def entropy_bits_per_token(self, sequence_length):
            return None

        def fingerprint(self):
            return {}

        def describe(self, sequence_length):
            return ""

        def text(self, split):
            return None

        def encode(self, text):
            return np.zeros(0, np.int32)

        def decode(self, tokens):
            return ""

    loader = Loader(Packed(), batch_size=2, sequence_length=6, seed=0)
    size = loader.source.num_rows("train", 6)
    rows = [loader.row(number) for number in range(2 * size)]
    for epoch in (rows[:size], rows[size:]):
        assert sorted(_predicted(epoch)) == _wanted([2, 3, 4, 5] * 4)
