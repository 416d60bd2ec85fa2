# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the largest entries of a low-rank approximation of matrices, and adds to single entries."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_FURTHER = 8  # columns of the range finder beside the rank
_POWER_STEPS = 2


def low_rank_approximation(weight: Float[Array, "m n"], rank: int, key: Array) -> Array:
    """Return an approximation of rank `rank`, close to the best one; the matrix if that is small.

    A randomised range finder has `rank` + 8 columns and two power steps (arXiv 0909.4061, algorithm
    4.4); the eigenvectors of a small matrix give the part of the rank.

    Args:
        weight: Matrix.
        rank: Rank (q).
        key: PRNG key.
    """
    m, n = weight.shape
    if rank >= min(m, n):
        return weight
    weight = weight.astype(jnp.float32)
    test = jax.random.normal(key, (n, min(rank + _FURTHER, m, n)), jnp.float32)
    basis = jnp.linalg.qr(_product(weight, test))[0]
    for _ in range(_POWER_STEPS):
        basis = jnp.linalg.qr(_product(weight.T, basis))[0]
        basis = jnp.linalg.qr(_product(weight, basis))[0]
    small = _product(basis.T, weight)
    vectors = jnp.linalg.eigh(_product(small, small.T))[1][:, -rank:]
    return _product(_product(basis, vectors), _product(vectors.T, small))


def largest_places(
    weight: Float[Array, "m n"], rank: int, number: int, key: Array
) -> Int[Array, " k"]:
    """Return the indices, rows first, of the largest entries of the approximation, ascending.

    Args:
        weight: Matrix.
        rank: Rank of the approximation.
        number: Number of entries (k).
        key: PRNG key.
    """
    size = jnp.abs(low_rank_approximation(weight, rank, key)).reshape(-1)
    return jnp.sort(jax.lax.top_k(size, number)[1].astype(jnp.int32))


def dense(
    entries: Float[Array, "*G k"], places: Int[Array, "*G k"], shape: tuple[int, ...]
) -> Array:
    """Return matrices that are zero but for some entries.

    Args:
        entries: Values of the entries of each matrix.
        places: Index of each in its matrix, rows first.
        shape: Shape of the result, [*G *I *O].
    """
    number = math.prod(entries.shape[:-1])
    rows = jnp.arange(number, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((number, math.prod(shape) // number), entries.dtype)
    values = zeros.at[rows, places.reshape(number, -1)].add(entries.reshape(number, -1))
    return values.reshape(shape)


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision="highest")
