# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Orders rows with random access: shuffles each epoch, and interleaves parts by weight.

The shuffle is Grain's (`MapDataset.shuffle`): a keyed permutation of the row numbers without a
table, about ten microseconds per item (of n rows below 2**16, about 15 ms / n). Grain adds seed and
epoch to get its key, so that epoch 1 of seed 0 would equal epoch 0 of seed 1; the key here is a
hash of both. Resuming depends on the order, which Grain does not guarantee across versions:
`order_digest`, a hash of a short order, is kept in every data position, and another value is an
error.

The interleaving is exact. (Grain's `mix` rounds every weight to a hundredth of the smallest: 0.7
and 0.3 become 233 and 100.) With integer weights a_1 ... a_n, A_i = a_i + ... + a_n, and k_1 = k of
the first k places,

    k_{i+1} = floor(k_i (A_i - a_i) / A_i),   part i has k_i - k_{i+1} of them,

which is a_i k / A up to rounding for every k, and exact where A divides k.
"""

from __future__ import annotations

import bisect
import fractions
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.optional import require

_MOST_ROWS = 2**32 - 1
"""Largest size of Grain's permutation."""


def shuffle_place(number: int, *, size: int, seed: int) -> tuple[int, int]:
    """Return epoch and row at a place of the endless sequence of epochs.

    Args:
        number: Place, from 0.
        size: Rows of an epoch, at least 1.
        seed: Seed of the orders.

    Raises:
        DataError: There are more rows than Grain can permute.
    """
    epoch, offset = divmod(number, size)
    return epoch, int(_epoch_order(size, seed, epoch)[offset])


@functools.lru_cache(maxsize=64)
def _epoch_order(size: int, seed: int, epoch: int) -> Any:
    """Return the rows of an epoch in their order, as a Grain data set."""
    if size > _MOST_ROWS:
        raise DataError(
            f"an epoch of {size} rows is longer than the shuffle can take ({_MOST_ROWS}): train on "
            "fewer files, or on longer rows"
        )
    key = int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint32)[0])
    return require("grain").MapDataset.range(size).shuffle(seed=key)


def frozen_generator(*key: int) -> np.random.RandomState:
    """Return a generator whose stream depends on the key alone, in any version of numpy.

    Args:
        key: Non-negative integers.
    """
    return np.random.RandomState(np.random.Philox(np.random.SeedSequence(key)))


@functools.cache
def order_digest() -> str:
    """Return eight hexadecimal digits that identify Grain's shuffle."""
    order = [shuffle_place(number, size=1000, seed=1)[1] for number in range(2000)]
    return hashlib.sha256(np.array(order, "<i8").tobytes()).hexdigest()[:8]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in the proportions of decimal weights: 0.7 and 0.3 become 7 and 3."""
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    return tuple(weight // math.gcd(*integers) for weight in integers)


def interleaved_counts(number: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first `number` places belong to each part."""
    counts = []
    remaining = number
    total = sum(weights)
    for weight in weights:
        following = remaining * (total - weight) // total
        counts.append(remaining - following)
        remaining = following
        total = total - weight
    return counts


def interleave(number: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the part of a place, and the number of earlier places of that part.

    Args:
        number: Place, from 0.
        weights: Positive integers.
    """
    before, after = (interleaved_counts(n, weights) for n in (number, number + 1))
    part = next(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
    return part, before[part]


def interleaved_length(sizes: Sequence[int], weights: Sequence[int]) -> int:
    """Return the largest number of places that needs no part more often than it has rows.

    Args:
        sizes: Rows of each part.
        weights: Positive integers.
    """

    def is_too_long(number: int) -> bool:
        counts = interleaved_counts(number, weights)
        return any(count > size for count, size in zip(counts, sizes, strict=True))

    return bisect.bisect_left(range(sum(sizes) + 1), True, key=is_too_long) - 1
