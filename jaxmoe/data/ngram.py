# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes reference losses on bytes: of n-gram counts, and of the xz compressor.

An order-k model predicts a byte from the k before it. Counts are smoothed by interpolation with the
next shorter context, down to the uniform distribution over 256 bytes (Witten-Bell, method C):

    p_k(b | c) = (count(c b) + distinct(c) p_{k-1}(b | c')) / (count(c) + distinct(c))

with distinct(c) the number of different bytes seen after context c, and c' the context without its
oldest byte; a context that was never seen uses p_{k-1}. There are no constants. Witten and Bell,
"The zero-frequency problem" (IEEE Transactions on Information Theory 37(4), 1991).

Counts are of one split and scores of the other. Its first bytes use the contexts that they have.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence

import numpy as np

from jaxmoe.data.batch import DataError
from pallas_kernels.array_types import Shaped

_LONGEST_ORDER = 6
"""Longest context: with the next byte it must fit in a signed 64-bit key."""


def ngram_bits_per_byte(
    train: Shaped[np.ndarray, " train_length"],
    held_out: Shaped[np.ndarray, " length"],
    *,
    orders: Sequence[int] = (1, 2, 3),
) -> dict[int, float]:
    """Return the held-out bits per byte of n-gram models.

    Args:
        train: Bytes to count, uint8.
        held_out: Bytes to predict, uint8.
        orders: Lengths of context, each from 0 to 6.

    Returns:
        Mean bits per byte of `held_out` for each order.

    Raises:
        DataError: An order is out of range, or one of the texts is empty.
    """
    if not orders or min(orders) < 0 or max(orders) > _LONGEST_ORDER:
        raise DataError(f"orders={tuple(orders)} must each be between 0 and {_LONGEST_ORDER}")
    if not len(train) or not len(held_out):
        raise DataError(f"nothing to count: train has {len(train)} bytes, held_out {len(held_out)}")
    bits = {}
    probability = np.full(len(held_out), 1 / 256)
    for order in range(min(max(orders), len(train) - 1, len(held_out) - 1) + 1):
        grams, gram_counts = np.unique(_grams(train, order + 1), return_counts=True)
        contexts, first = np.unique(grams >> 8, return_index=True)
        context_counts = np.add.reduceat(gram_counts, first)
        distinct = np.diff(first, append=len(grams))

        wanted = _grams(held_out, order + 1)
        count = _look_up(grams, gram_counts, wanted)
        context_count = _look_up(contexts, context_counts, wanted >> 8)
        weight = _look_up(contexts, distinct, wanted >> 8)
        shorter = probability[order:]
        seen = context_count > 0
        probability[order:] = np.where(
            seen, (count + weight * shorter) / np.where(seen, context_count + weight, 1), shorter
        )
        bits[order] = float(-np.log2(probability).mean())
    # A text shorter than the context has the value of its longest order.
    return {order: bits[min(order, max(bits))] for order in orders}


def xz_bits_per_byte(text: Shaped[np.ndarray, " length"]) -> float:
    """Return the bits per byte of a text compressed by xz (LZMA2, preset 6), headers included.

    The compressor starts without any statistics: short texts compress far worse than long ones.
    """
    if not len(text):
        raise DataError("nothing to compress: 0 bytes")
    return 8 * len(lzma.compress(text.tobytes())) / len(text)


def _grams(text: np.ndarray, length: int) -> np.ndarray:
    """Return every run of `length` bytes as one number, the oldest byte first."""
    grams = np.zeros(len(text) - length + 1, np.int64)
    for offset in range(length):
        grams = (grams << 8) | text[offset : len(text) - length + 1 + offset]
    return grams


def _look_up(keys: np.ndarray, values: np.ndarray, grams: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 if it is absent; keys are sorted."""
    places = np.searchsorted(keys, grams).clip(max=len(keys) - 1)
    return np.where(keys[places] == grams, values[places], 0)
