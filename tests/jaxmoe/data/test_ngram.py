# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference losses: n-gram models against a dictionary reference, and the xz compressor."""

import collections
import math

import numpy as np
import pytest

from jaxmoe.data import DataError, ngram_bits_per_byte, xz_bits_per_byte

TRAIN = b"the cat sat on the mat, and the rat sat on the cat; \xff\x00 then the cat ate the rat."
HELD_OUT = b"that rat and the cat sat on \xff the mat \x80!"


def _slow_bits(train, held_out, order):
    """Interpolated Witten-Bell from dictionaries, one byte at a time."""
    counts = collections.defaultdict(collections.Counter)
    for length in range(order + 1):
        for end in range(length, len(train)):
            counts[train[end - length : end]][train[end]] += 1

    def probability(context, byte):
        shorter = probability(context[1:], byte) if context else 1 / 256
        if not (seen := counts.get(context)):
            return shorter
        return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen))

    total = 0.0
    for end, byte in enumerate(held_out):
        total -= math.log2(probability(held_out[max(0, end - order) : end], byte))
    return total / len(held_out)


def _array(text):
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("order", range(7))
def test_ngram_bits_equal_dictionary_reference(order):
    bits = ngram_bits_per_byte(_array(TRAIN), _array(HELD_OUT), orders=(order,))
    np.testing.assert_allclose(bits[order], _slow_bits(TRAIN, HELD_OUT, order), rtol=1e-12)


def test_ngram_orders_are_independent():
    together = ngram_bits_per_byte(_array(TRAIN), _array(HELD_OUT), orders=(3, 1))
    assert list(together) == [3, 1]
    for order in (1, 3):
        alone = ngram_bits_per_byte(_array(TRAIN), _array(HELD_OUT), orders=(order,))
        assert alone[order] == together[order]


def test_probabilities_sum_to_one():
    # One held-out text for each possible last byte; the earlier bytes cost the same in all.
    start = b"the c"
    texts = [start + bytes([byte]) for byte in range(256)]
    bits = [len(t) * ngram_bits_per_byte(_array(TRAIN), _array(t))[3] for t in texts]
    earlier = len(start) * ngram_bits_per_byte(_array(TRAIN), _array(start))[3]
    np.testing.assert_allclose(sum(2 ** (earlier - b) for b in bits), 1, rtol=1e-12)


@pytest.mark.parametrize(("train", "held_out"), [(b"ab", b"abab"), (b"abab", b"a"), (b"a", b"b")])
def test_ngram_of_texts_shorter_than_the_context(train, held_out):
    bits = ngram_bits_per_byte(_array(train), _array(held_out), orders=(3,))
    np.testing.assert_allclose(bits[3], _slow_bits(train, held_out, 3), rtol=1e-12)


def test_xz_bits_per_byte():
    noise = np.random.RandomState(0).randint(0, 256, 20_000).astype(np.uint8)
    assert 8 < xz_bits_per_byte(noise) < 8.1
    assert xz_bits_per_byte(np.zeros(20_000, np.uint8)) < 0.1


def test_refusals():
    text = _array(TRAIN)
    for orders in ((), (-1,), (1, 7)):
        with pytest.raises(DataError, match="must each be between 0 and 6"):
            ngram_bits_per_byte(text, text, orders=orders)
    with pytest.raises(DataError, match="nothing to count: train has 0 bytes, held_out 80"):
        ngram_bits_per_byte(text[:0], text)
    with pytest.raises(DataError, match="nothing to compress: 0 bytes"):
        xz_bits_per_byte(text[:0])
