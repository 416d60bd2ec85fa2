# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests Hadamard rotations: orthogonal, equal to those of scipy, and invertible."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from pallas_kernels import hadamard
from pallas_kernels.halo.hadamard import hadamard_matrix, rotated_together
from tests.support.tolerances import assert_close

# Sylvester's, Paley's two, and both times a power of two; those of powers of primes are missing.
ORDERS = (
    1,
    2,
    4,
    8,
    12,
    20,
    24,
    28,
    36,
    40,
    44,
    60,
    76,
    96,
    104,
    108,
    140,
    144,
    148,
    256,
    320,
    384,
)
UNKNOWN = (3, 6, 10, 52, 92, 100, 116, 172)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_rows_are_exactly_orthogonal():
    for order in ORDERS:
        matrix = hadamard_matrix(order).astype(np.int64)
        assert set(np.unique(matrix)) <= {-1, 1}
        np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.int64))


@pytest.mark.parametrize("order", [2, 64, 512])
def test_powers_of_two_are_those_of_scipy(order):
    x = normal(3, order)
    wanted = x @ scipy.linalg.hadamard(order) / np.sqrt(order)
    assert_close(hadamard(jnp.asarray(x)), wanted, "matmul")


@pytest.mark.parametrize("width", [1, 8, 12, 30, 33, 40, 384])
def test_rotation_is_the_matrix_by_block_and_inverts(width):
    x, block = normal(2, width, 3), rotated_together(width)
    matrix = np.kron(np.eye(width // block), hadamard_matrix(block) / np.sqrt(block))
    rotated = hadamard(jnp.asarray(x), 1)
    assert_close(rotated, np.einsum("awb,wv->avb", x, matrix), "matmul")
    assert_close(hadamard(rotated, -2, is_inverse=True), x, "matmul")


def test_any_width_has_blocks():
    assert [rotated_together(width) for width in (1, 33, 30, 52, 92, 1536)] == [1, 1, 2, 4, 4, 1536]
    assert rotated_together(1536, 128) == 128
    assert rotated_together(0) == 1


def test_the_dtype_stays_and_sums_are_wide():
    x = jnp.full((4, 256), 1.0, jnp.bfloat16)
    rotated = hadamard(x)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(rotated[:, 0], np.float32), 16.0)  # 256 / sqrt(256)
    assert hadamard(jnp.zeros((0, 8))).shape == (0, 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"axis": 2}, "axis=2 is not one of the 2 of x"),
        ({"block": 5}, "block=5 must divide axis 1 of x .* choose 4 or 12"),
        ({"block": 6}, "block=6 must divide .* choose 4 or 12"),
        ({"block": 0}, "block=0 must divide"),
    ],
)
def test_wrong_platform_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        hadamard(jnp.zeros((2, 12)), **given)


def test_orders_without_a_rule_are_refused_with_their_neighbours():
    for order in UNKNOWN:
        with pytest.raises(ValueError, match=f"no matrix of order {order} is known here: choose"):
            hadamard_matrix(order)
