# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotates arrays by Hadamard matrices: orthonormal, with entries +-1 / sqrt(n).

    out = x @ H / sqrt(n)        H H^T = n I

One large value becomes n values of 1 / sqrt(n) of it, so that a scale that must fit the largest
wastes fewer of its steps. With n = K 2^j, H is the Kronecker product of a matrix of order K and of
Sylvester's matrix of order 2^j; x is multiplied by factors of at most 128 one after the other:
about n log n operations, as small products for a matrix unit.

Orders: 1, 2, 4, 8, ... (Sylvester 1867), and K = q + 1 for primes q = 3 mod 4, K = 2 (q + 1) for
primes q = 1 mod 4 (Paley 1933): 12, 20, 24, 28, 36, 40, 44, 48, ..., each times any power of two.
Powers of primes (52, 100), and orders without such a rule (92, 116, 156, ...), are not built.

An axis of any width is rotated in blocks of the largest order that divides it: 30 is fifteen blocks
of 2; an odd width stays unchanged.

To add an order: a rule in `_paley_rule` and its matrix in `_paley`, both in
`pallas_kernels/halo/hadamard.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array, Float

_LARGEST_FACTOR = 128


def hadamard(
    x: Float[Array, "..."], axis: int = -1, *, block: int | None = None, is_inverse: bool = False
) -> Float[Array, "..."]:
    """Rotate an array along one axis.

    Args:
        x: Array that is whole along `axis` at least within blocks; sums are float32.
        axis: Axis to rotate.
        block: Values that are rotated together; None takes `rotated_together(width)`.
        is_inverse: Whether to rotate back, by the transposed matrix.

    Returns:
        The rotated array in the shape and dtype of x.

    Raises:
        ValueError: There is no such axis, or no such block along it.
    """
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"hadamard: axis={axis} is not one of the {x.ndim} of x {x.shape}.")
    axis %= x.ndim
    width = x.shape[axis]
    block = rotated_together(width) if block is None else block
    if block < 1 or width % block or _factors(block) is None:
        below = rotated_together(width, max(block, 1))
        raise ValueError(
            f"hadamard: block={block} must divide axis {axis} of x {x.shape} and be an order of"
            f" which there is a Hadamard matrix: choose {below} or {rotated_together(width)}."
        )
    if block == 1 or x.size == 0:
        return x
    sizes = _factors(block) or ()
    parts = x.reshape(*x.shape[:axis], width // block, *sizes, *x.shape[axis + 1 :])
    parts = parts.astype(x.dtype if x.dtype.itemsize >= 4 else jnp.float32)
    for place, size in enumerate(sizes, axis + 1):
        matrix = hadamard_matrix(size) / math.sqrt(size)
        matrix = jnp.asarray(matrix if is_inverse else matrix.T, parts.dtype)  # [to, from]
        turned = jnp.tensordot(parts, matrix, ((place,), (1,)), precision=jax.lax.Precision.HIGHEST)
        parts = jnp.moveaxis(turned, -1, place)
    return parts.reshape(x.shape).astype(x.dtype)


def rotated_together(width: int, most: int | None = None) -> int:
    """Return the largest order of a Hadamard matrix that divides a width.

    Args:
        width: Width of the axis.
        most: Upper limit; None for no limit.
    """
    if width < 1:
        return 1
    sizes = (size for size in _divisors(width) if most is None or size <= most)
    return max(size for size in sizes if _factors(size) is not None)


@functools.cache
def hadamard_matrix(order: int) -> np.ndarray:
    """Return a matrix [order order] of +-1 with orthogonal rows.

    Args:
        order: Order of the matrix.

    Raises:
        ValueError: No rule builds this order.
    """
    factors = _factors(order) if order > 0 else None
    if factors is None:
        raise ValueError(
            f"hadamard: no matrix of order {order} is known here: choose "
            f"{_nearest(order, -1)} or {_nearest(order, 1)}."
        )
    if len(factors) > 1:
        return functools.reduce(np.kron, map(hadamard_matrix, factors))
    base = _base(order)
    matrix = np.ones((1, 1), np.int8) if base == 1 else _paley(base)
    for _ in range((order // base).bit_length() - 1):
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.int8))
    return matrix


@functools.cache
def _factors(order: int) -> tuple[int, ...] | None:
    """Return small orders whose Kronecker product this is; None if there are none."""
    base = _base(order)
    if base == 0:
        return None
    twos = (order // base).bit_length() - 1
    sizes = []
    while twos or not sizes:
        first = 1 if sizes else base
        most = max(0, (_LARGEST_FACTOR // first).bit_length() - 1)
        sizes.append(first << min(twos, most))
        twos -= min(twos, most)
    return tuple(sizes)


def _base(order: int) -> int:
    """Return the smallest order of a rule that gives this one times a power of two; 0 if none."""
    odd = order // (order & -order)
    if odd == 1:
        return 1
    bases = (odd << j for j in range(2, (order // odd).bit_length()))
    return next(filter(_paley_rule, bases), 0)


def _paley_rule(order: int) -> int:
    """Return which of Paley's two constructions gives this order; 0 for neither."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        return 1
    return 2 if order % 2 == 0 and _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1 else 0


def _paley(order: int) -> np.ndarray:
    """Return Paley's matrix, made from the quadratic residues modulo a prime."""
    rule = _paley_rule(order)
    prime = order - 1 if rule == 1 else order // 2 - 1
    squares = {i * i % prime for i in range(1, prime)}
    character = np.array([0, *(1 if i in squares else -1 for i in range(1, prime))])
    differences = np.arange(prime)[:, None] - np.arange(prime)[None, :]
    core = np.zeros((prime + 1, prime + 1), np.int64)
    core[1:, 1:] = character[differences % prime]
    core[0, 1:], core[1:, 0] = 1, -1 if rule == 1 else 1
    identity = np.eye(prime + 1, dtype=np.int64)
    if rule == 1:
        return (core + identity).astype(np.int8)
    signs = np.array([[1, 1], [1, -1]])
    corner = np.array([[1, -1], [-1, -1]])
    return (np.kron(core, signs) + np.kron(identity, corner)).astype(np.int8)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def _divisors(size: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return [*small, *(size // d for d in small)]


def _nearest(order: int, step: int) -> int:
    order = max(order + step, 1)
    while _factors(order) is None:
        order += step
    return order
