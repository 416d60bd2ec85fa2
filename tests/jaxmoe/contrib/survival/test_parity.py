# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parity rebuilds the words of any one process bit for bit, on devices and in numpy; not of two."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.survival.parity import (
    Peers,
    TooManyLostError,
    cut,
    encode_reference,
    only_lost,
    pad_words,
)

PIECE = 20
"""Words per piece: few, so that several pieces and a partial one are common."""


def _words(processes, num_words, seed):
    rng, size = np.random.default_rng(seed), pad_words(num_words, processes)
    drawn = rng.integers(0, 2**32, (processes, size), np.uint32)
    drawn[:, num_words:] = 0
    return dict(enumerate(drawn))


def rebuild_reference(words: dict, parity: dict, processes: int):
    """Return the missing process, its words and its parity.

    Args:
        words: Words of the other processes.
        parity: Parity of the other processes.
        processes: Number of processes.

    Raises:
        TooManyLostError: More than one is missing.
    """
    lost = only_lost([process in words for process in range(processes)])
    if lost is None:
        raise ValueError("nothing is lost")
    others = [process for process in range(processes) if process != lost]
    blocks = [parity[j] - sum(cut(words[i], i, processes)[j] for i in others) for j in others]
    own = sum(cut(words[i], i, processes)[lost] for i in others)
    return lost, np.concatenate(blocks).astype(np.uint32), np.asarray(own, np.uint32)


@settings(max_examples=40)
@given(
    processes=st.integers(2, 5),
    num_words=st.integers(1, 40),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_one_process_is_rebuilt(processes, num_words, seed, data):
    lost = data.draw(st.integers(0, processes - 1))
    words = _words(processes, num_words, seed)
    peers = Peers(jax.devices()[:processes], piece=PIECE)
    parity, expected = peers.encode(words), encode_reference(words, processes)
    for process in range(processes):
        np.testing.assert_array_equal(parity[process], expected[process])
        assert parity[process].size * (processes - 1) == words[process].size

    left = {process: own for process, own in words.items() if process != lost}
    kept = {process: own for process, own in parity.items() if process != lost}
    which, own, block = rebuild_reference(left, kept, processes)
    assert which == lost
    np.testing.assert_array_equal(own, words[lost])
    np.testing.assert_array_equal(block, parity[lost])

    # What the lost process gives is not looked at.
    garbage, noise = np.full_like(words[lost], 7), np.full_like(parity[lost], 8)
    found = peers.rebuild(lost, left | {lost: garbage}, kept | {lost: noise})
    np.testing.assert_array_equal(found[0], words[lost])
    np.testing.assert_array_equal(found[1], parity[lost])


def test_two_processes_hold_copies():
    words = _words(2, 9, 0)
    parity = Peers(jax.devices()[:2]).encode(words)
    np.testing.assert_array_equal(parity[0], words[1])
    np.testing.assert_array_equal(parity[1], words[0])


def test_changed_bit_shows_in_the_rebuilt_words():
    words = _words(4, 12, 0)
    parity = encode_reference(words, 4)
    words[3][1] ^= 1  # in its block 0, of which process 1 needs the sum
    left = {process: words[process] for process in (0, 2, 3)}
    _, own, _ = rebuild_reference(left, parity, 4)
    assert (own != words[1]).sum() == 1


@pytest.mark.parametrize(
    ("has", "message"),
    [
        (
            (True, False, True, False),
            r"2 of 4 processes \(1, 3\) have lost their snapshots: parity",
        ),
        (
            (False, False),
            r"2 of 2 processes \(0, 1\) have lost .* parity restores one",
        ),
        ((False,), r"1 of 1 processes \(0\) have lost .* none without another process"),
    ],
)
def test_two_lost_processes_are_refused(has, message):
    with pytest.raises(TooManyLostError, match=message):
        only_lost(has)
    words = {process: own for process, own in _words(len(has), 3, 0).items() if has[process]}
    with pytest.raises(TooManyLostError, match=message):
        rebuild_reference(words, words, len(has))


def test_one_process_has_no_parity():
    assert only_lost([True]) is None
    assert Peers(jax.devices()[:1]).encode({0: np.arange(3, dtype=np.uint32)})[0].size == 0
