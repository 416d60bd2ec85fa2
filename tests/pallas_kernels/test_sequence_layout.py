# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests sequence_order: a permutation with equal tokens, equal work, and the order within a rank.

To add a layout: a row in LAYOUTS and, if it keeps the halves of zigzag, in HALVES.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallas_kernels import sequence_order
from pallas_kernels.sequence_layout import (
    SequenceLayout,
    lay_out,
    padded_length,
)
from tests.support.sequence_orders import inverse_order

LAYOUTS = typing.get_args(SequenceLayout)
HALVES = ("zigzag", "document_zigzag")


@st.composite
def packed(draw, whole=False):
    """Draw (ranks, segment ids).

    Documents have any length, some shorter than the number of ranks, or whole multiples of 2N; ids
    are in any order, contiguous or scattered.
    """
    ranks = draw(st.integers(1, 8))
    unit = 2 * ranks
    lengths = draw(st.lists(st.integers(1, 4 if whole else 40), min_size=1, max_size=6))
    if whole:
        lengths = [unit * length for length in lengths]
    lengths[-1] += -sum(lengths) % unit
    names = draw(st.permutations(range(-1, len(lengths) - 1)))
    ids = np.repeat(np.asarray(names, np.int32), lengths)
    if draw(st.booleans()):
        np.random.default_rng(sum(lengths)).shuffle(ids)
    return ranks, ids


def _work(order, ids, ranks):
    """Return the unmasked scores of every rank, from the mask itself."""
    token = np.arange(len(ids))
    sees = (token[:, None] >= token[None]) & (ids[:, None] == ids[None])
    return sees.sum(1)[order.reshape(ranks, -1)].sum(1)


@given(packed())
def test_document_zigzag_is_a_permutation_that_undoes(case):
    ranks, ids = case
    order = sequence_order(len(ids), ranks, "document_zigzag", ids)
    np.testing.assert_array_equal(np.sort(order, axis=-1) - np.arange(order.shape[-1]), 0)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(ids[order][inverse_order(order)], ids)


@given(packed())
def test_every_document_is_cut_alike_and_in_order(case):
    """Low pieces of rank 0, 1, ..., then high pieces of ..., 1, 0 give a document in order."""
    ranks, ids = case
    held = sequence_order(len(ids), ranks, "document_zigzag", ids).reshape(ranks, 2, -1)
    pieces = [*held[:, 0], *held[::-1, 1]]
    for name in set(ids.tolist()):
        own = [piece[ids[piece] == name] for piece in pieces]
        tokens = np.concatenate(own)
        assert (tokens[1:] > tokens[:-1]).all()
        sizes = [len(piece) for piece in own]
        assert max(sizes) - min(sizes) <= 1


@given(packed(whole=True))
def test_work_is_equal_where_documents_divide(case):
    ranks, ids = case
    work = _work(sequence_order(len(ids), ranks, "document_zigzag", ids), ids, ranks)
    assert (work == work[0]).all()


@given(packed())
def test_work_is_off_by_two_scores_a_token_at_most(case):
    ranks, ids = case
    work = _work(sequence_order(len(ids), ranks, "document_zigzag", ids), ids, ranks)
    assert np.abs(work - work.mean()).max() <= 2 * len(ids)


@pytest.mark.parametrize("ranks", [4, 8])
def test_work_of_real_documents_is_within_one_percent(ranks):
    """Lengths as in a crawl, log-normal with a median of 200; the last tokens are padding."""
    lengths = np.random.default_rng(0).lognormal(np.log(200), 1.0, 60).astype(int) + 1
    ids = np.repeat(np.arange(60, dtype=np.int32), lengths)[:4000]
    ids = np.concatenate([ids, np.full(96, -1, np.int32)])
    work = {
        layout: _work(sequence_order(4096, ranks, layout, ids), ids, ranks) for layout in LAYOUTS
    }
    imbalance = {layout: w.max() / w.mean() - 1 for layout, w in work.items()}
    assert imbalance["document_zigzag"] < 0.01
    assert imbalance["zigzag"] > 0.1  # so that the zigzag of the whole sequence does not pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_document(layout):
    for ranks in (1, 2, 3, 4, 8):
        _check_one_document(layout, ranks)


def _check_one_document(layout, ranks):
    order = sequence_order(48, ranks, layout)
    np.testing.assert_array_equal(np.sort(order, axis=-1) - np.arange(order.shape[-1]), 0)
    work = _work(order, np.zeros(48, np.int32), ranks)
    if layout in HALVES:
        assert (work == work[0]).all()
        np.testing.assert_array_equal(order, sequence_order(48, ranks, "zigzag"))
        one = np.full(48, 7, np.int32)
        np.testing.assert_array_equal(order, sequence_order(48, ranks, "document_zigzag", one))
    else:
        np.testing.assert_array_equal(order, np.arange(48))


@given(packed())
@settings(max_examples=10)
def test_traced_ids_give_the_same(case):
    ranks, ids = case
    assume(len(ids) <= 64)  # one compilation for all
    ranks = 2
    ids = np.concatenate([ids, np.full(64 - len(ids), 99, np.int32)])
    two = np.stack([ids, ids[::-1]])
    found = _traced(jnp.asarray(two))
    np.testing.assert_array_equal(found, sequence_order(64, ranks, "document_zigzag", two))
    one = sequence_order(64, ranks, "document_zigzag", ids)
    np.testing.assert_array_equal(found[0], one)


@jax.jit
def _traced(ids):
    return sequence_order(64, 2, "document_zigzag", ids)


def test_laying_out_and_back():
    ids = np.array([[0] * 5 + [1] * 11, [0] * 16], np.int32)
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3)
    for layout in LAYOUTS:
        order = sequence_order(16, 4, layout, ids)
        assert order.ndim == (2 if layout == "document_zigzag" else 1)
        there = lay_out(x, order)
        rows = np.broadcast_to(order, (2, 16))
        np.testing.assert_array_equal(there[1], x[1][rows[1]])
        np.testing.assert_array_equal(lay_out(there, inverse_order(order)), x)
        np.testing.assert_array_equal(
            jax.jit(lambda x, order: lay_out(x, inverse_order(order)))(there, order), x
        )


def test_bad_lengths_are_refused():
    with pytest.raises(ValueError, match=r"length=100 must be divisible by 8 .*: pad to 104"):
        sequence_order(100, 4, "zigzag")
    assert padded_length(100, 4, "zigzag") == 104
    assert padded_length(100, 4, "contiguous") == 100
    with pytest.raises(ValueError, match=r"segment_ids \(8,\) must have length=16"):
        sequence_order(16, 2, "document_zigzag", np.zeros(8, np.int32))
