# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Batches packed by level: every prediction once, documents within groups, hosts, purity."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmoe.contrib.levels import (
    BucketsConfig,
    LevelCost,
    LevelPacking,
    MilpConfig,
    Room,
    ZonesConfig,
)
from jaxmoe.contrib.levels.rows import documents_of
from jaxmoe.data import Loader
from jaxmoe.data.loader import _batch_of
from jaxmoe.data.source import Row

TOKENS, DEGREES = 6, (1, 2, 4)
LENGTH = TOKENS * DEGREES[-1]
COST = LevelCost(pair=1e-3, other=0.01, rings=(0.0, 0.002, 0.01), near_level=1)
ASSIGNERS = (BucketsConfig(), MilpConfig(), ZonesConfig())


class Documents:
    """Rows of documents of many lengths, whose tokens all differ."""

    vocab_size = 10**6
    bytes_per_token = None

    def num_rows(self, split, sequence_length):
        return 20

    def row(self, split, index, sequence_length, *, epoch=0):
        rng = np.random.default_rng(index)
        lengths = rng.lognormal(1.5, 0.8, size=20).astype(int).clip(1, sequence_length + 1)
        lengths = lengths[np.cumsum(lengths) <= sequence_length + 1]
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids = np.pad(ids, (0, sequence_length + 1 - len(ids))).astype(np.int32)
        tokens = 100 * index + 1 + np.arange(sequence_length + 1, dtype=np.int32)
        weights = (tokens % 3 != 0).astype(np.float32)
        return Row(np.where(ids == 0, 0, tokens).astype(np.int32), ids, weights)

    def fingerprint(self):
        return {"kind": "documents"}

    def entropy_bits_per_token(self, sequence_length):
        return None

    def describe(self, sequence_length):
        return "documents"

    def text(self, split):
        return None

    def encode(self, text):
        return np.zeros(0, np.int32)

    def decode(self, tokens):
        return ""


def loader_of(assigner, **given):
    """Four rows a step, in two micro-batches of two rows."""
    packing = LevelPacking(
        assigner=assigner,
        room=Room(tokens=TOKENS, degrees=DEGREES, rows=2),
        cost=COST,
        accumulation=2,
    )
    source = Documents()
    sizes = {"batch_size": 4, "sequence_length": LENGTH, "seed": 3} | given
    return Loader(source, repacking=packing, **sizes)


@functools.cache
def batch_of(assigner, step):
    return loader_of(assigner).batch(step)


def predictions(batch):
    """(token, target, weight, position) of every place that is not padding or unpredicted."""
    is_counted = batch.loss_weights > 0
    names = ("tokens", "targets", "loss_weights", "positions")
    return sorted(zip(*(getattr(batch, name)[is_counted].tolist() for name in names), strict=True))


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda a: a.name)
def test_predictions_of_a_step_are_those_of_its_rows(assigner):
    """The same tokens, targets, weights and positions as in rows packed by best fit."""
    loader = loader_of(assigner)
    for step in range(6):
        plain = dataclasses.replace(loader, repacking=None).batch(step)
        assert predictions(batch_of(assigner, step)) == predictions(plain)
        assert predictions(plain) == predictions(_batch_of(loader.step_rows(step)))


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda a: a.name)
def test_documents_lie_within_the_groups_of_their_level(assigner):
    micro_batches, levels = loader_of(assigner).repacking.micro_batches, set()
    for step in range(6):
        batch = batch_of(assigner, step)
        assert batch.tokens.shape == (2 * micro_batches, LENGTH)
        by_micro_batch = batch.level.reshape(-1, micro_batches)
        assert (by_micro_batch == by_micro_batch[0]).all()
        used = int((by_micro_batch[0] >= 0).sum())
        assert (by_micro_batch[0, used:] == -1).all() and not batch.segment_ids[:, None].reshape(
            2, micro_batches, LENGTH
        )[:, used:].any()
        for level, segments in zip(batch.level.tolist(), batch.segment_ids, strict=True):
            levels.add(level)
            groups = np.arange(LENGTH) // (TOKENS * 2 ** max(level, 0))
            for segment in np.unique(segments[segments > 0]):
                places = np.flatnonzero(segments == segment)
                assert (np.diff(places) == 1).all() and len(set(groups[places].tolist())) == 1
    # The lowest levels would take longer than these rows as they are.
    assert levels >= ({-1, 2} if assigner.name == "buckets" else {-1, 0})


def test_parts_of_hosts_make_the_batch_and_steps_repeat():
    assigner = MilpConfig()
    loader, whole = loader_of(assigner), batch_of(assigner, 2)
    parts = [loader.batch(2, process_index=i, process_count=2) for i in range(2)]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    again = loader_of(assigner).batch(2)
    for found in (joined, again):
        jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_data_position_does_not_depend_on_the_assigner():
    positions = [loader_of(assigner).position(4) for assigner in ASSIGNERS]
    assert positions[0] == positions[1] == positions[2]


def test_documents_of_a_row_end_before_padding():
    ids = np.array([1, 1, 1, 2, 3, 3, 0, 0], np.int32)
    documents = documents_of(Row(np.arange(8, dtype=np.int32), ids))
    assert [document.tokens.tolist() for document in documents] == [[0, 1, 2], [4, 5]]
    (whole,) = documents_of(Row(np.arange(4, dtype=np.int32)))
    assert whole.tokens.tolist() == [0, 1, 2, 3] and whole.length == 3


def test_the_forecast_of_rows_is_that_of_their_documents():
    loader = loader_of(BucketsConfig())
    rows = list(loader.step_rows(0))
    lengths = [[document.length for document in documents_of(row)] for row in rows]
    assert loader.repacking.forecast_of(rows) == loader.repacking.forecast(lengths)


UNEVEN = [[24], [12, 6, 6], [13, 11], [12, 12]]
"""Rows of which a level each would take a micro-batch of its own, most of it empty."""


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda a: a.name)
def test_rows_stay_as_they_are_where_levels_would_take_longer(assigner):
    packing = loader_of(assigner).repacking
    flat = [length for row in UNEVEN for length in row]
    by_level = assigner.assign(flat, packing.room, packing.cost)
    forecast = packing.forecast(UNEVEN)
    assert forecast.seconds <= forecast.static
    if assigner.name == "buckets":  # the case is one of them
        assert by_level.seconds(flat, packing.room, packing.cost) > 1.2 * forecast.static
        assert forecast.shares == {1: 0.0, 2: 0.0, 4: 1.0} and "1x of static" in forecast.text
    rng, rows = np.random.default_rng(0), []
    for lengths in UNEVEN:
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids = np.pad(ids, (0, LENGTH + 1 - len(ids))).astype(np.int32)
        rows.append(Row(rng.integers(1, 99, LENGTH + 1).astype(np.int32), ids))
    documents, plan = packing.plan(rows)
    found = [i for groups in plan.groups.values() for group in groups for i in group]
    assert sorted(found) == list(range(len(documents)))
    batch = packing.batch(rows, process_index=0, process_count=1)
    assert (batch.segment_ids > 0).sum() == sum(document.length for document in documents)


def test_forecast_of_short_documents_is_faster_than_static():
    packing = loader_of(BucketsConfig()).repacking
    short = packing.forecast([[TOKENS] * DEGREES[-1]] * 4)
    assert short.shares == {1: 1.0, 2: 0.0, 4: 0.0}
    attention = 1e-3 * TOKENS * (TOKENS + 1) / 2
    assert short.seconds == pytest.approx(2 * (0.01 + attention))
    assert short.static == pytest.approx(2 * (0.01 + max(attention, 0.01)))
    ratio = short.static / short.seconds
    assert short.text == f"1: 100%, 2: 0%, 4: 0% of tokens; {ratio:.2g}x of static"
    long = packing.forecast([[LENGTH]] * 4)
    assert long.seconds == pytest.approx(long.static)
