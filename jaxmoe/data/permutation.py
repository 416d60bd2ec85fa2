# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A shuffled order with random access: item i of a permutation of n, without making the others.

A Feistel network permutes the integers of 2h bits: each round adds a keyed hash of one half to the
other, which can be undone, so no two inputs meet. With 4**h >= n, walking the network until it
lands below n restricts it to a permutation of n (less than four steps on average). Black and
Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), sections 3 and 5.

Why our own: the order of the data is part of what a checkpoint promises, so it must never change
with the version of another library, and a library user may have no data loader installed. For the
same reason only numpy's SeedSequence is used, whose output numpy guarantees.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.array_types import Int

_ROUNDS = 8


def permuted(
    indices: Int[np.ndarray, " rows"], *, size: int, seed: tuple[int, ...]
) -> Int[np.ndarray, " rows"]:
    """Where a seeded permutation of range(size) sends each index.

    Args:
        indices: Each in [0, size).
        size: Number of items that are permuted, from 1.
        seed: Non-negative integers that choose the permutation.

    Returns:
        For each index another in [0, size); distinct for distinct indices.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    values = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network over unsigned integers of twice `half_bits` bits."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_hash(right ^ key) & mask)
    return (left << shift) | right


def _hash(values: np.ndarray) -> np.ndarray:
    """A 64-bit mixing function (the finaliser of SplitMix64): every input bit moves every output.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), fig. 17.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
