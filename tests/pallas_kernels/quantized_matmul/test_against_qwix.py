# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares quantize and the quantised products with qwix.

qwix scales integers to 127.5 and 7.5, so that the largest is clipped by half a step; jaxmoe to 127
and 7. Values are compared where the scales agree, products where both are given the same values.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from pallas_kernels import QuantizedArray, dequantize, grouped_matmul, quantize, quantized_matmul

pytestmark = pytest.mark.slow  # qwix takes seconds to import


@pytest.fixture(autouse=True)
def _as_qwix_expects():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


def _qwix(x: QuantizedArray, name: str):
    return qwix.QArray(x.values, x.scales.astype(jnp.float32), qtype=jnp.dtype(name))


@pytest.mark.parametrize("block_size", [None, 32])
@pytest.mark.parametrize("dtype", ("float8_e4m3fn", "float8_e5m2", "mxfp8"))
def test_values(dtype, block_size, key):
    """Scales and values of floats are the same."""
    if dtype == "mxfp8" and block_size is None:
        block_size = 32
    x = jax.random.normal(key, (16, 128))
    ours = quantize(x, dtype, axis=-1, block_size=block_size)
    tiles = {1: block_size or 128}
    theirs = qwix.quantize(x, dtype, channelwise_axes=(0,), tiled_axes=tiles)
    np.testing.assert_array_equal(ours.scales.astype(jnp.float32), theirs.scale)
    np.testing.assert_array_equal(
        ours.values.astype(jnp.float32), theirs.qvalue.astype(jnp.float32)
    )


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int4", 7)])
def test_error_of_integers(dtype, largest, key):
    """Scales differ by half a step of `largest`; errors agree to a tenth."""
    x = jax.random.normal(key, (64, 256))
    ours = quantize(x, dtype, axis=-1, block_size=128)
    theirs = qwix.quantize(x, dtype, channelwise_axes=(0,), tiled_axes={1: 128})
    np.testing.assert_allclose(ours.scales, theirs.scale * (largest + 0.5) / largest, rtol=1e-6)
    errors = [jnp.linalg.norm(y - x) for y in (dequantize(ours), qwix.dequantize(theirs))]
    assert 0.9 < errors[0] / errors[1] < 1.1


@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("int8", "int8"), ("int8", "int4"), ("float8_e4m3fn", "float8_e4m3fn")],
)
def test_product(x_dtype, w_dtype, block_size, key):
    keys = jax.random.split(key)
    x = quantize(jax.random.normal(keys[0], (32, 256)), x_dtype, axis=-1, block_size=block_size)
    w = quantize(jax.random.normal(keys[1], (256, 48)), w_dtype, axis=-2, block_size=block_size)
    # qwix gives a pair of int4 to XLA, which has none on the CPU: it gets them as int8.
    wide = QuantizedArray(values=w.values.astype(jnp.int8), scales=w.scales, axis=-2)
    theirs = qwix.dot(_qwix(x, x_dtype), _qwix(wide if w_dtype == "int4" else w, wide.dtype_name))
    ours = quantized_matmul(x, w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_grouped_product(key):
    """bfloat16 rows and int8 matrices, by channel.

    qwix has one scale per column for all groups, so all groups have the same.
    """
    keys = jax.random.split(key)
    rows = jax.random.normal(keys[0], (24, 64))
    weights = jax.random.normal(keys[1], (3, 64, 16))
    one = quantize(weights.reshape(-1, 16), "int8", axis=-2)
    values = one.values.reshape(weights.shape)
    w = QuantizedArray(
        values=values, scales=jnp.broadcast_to(one.scales[None], (3, 1, 16)), axis=-2
    )
    x = quantize(rows, "int8", axis=-1)
    sizes = jnp.array([7, 0, 17], jnp.int32)
    theirs = qwix.ragged_dot(
        _qwix(x, "int8"), qwix.QArray(values, one.scales[None], qtype=jnp.dtype("int8")), sizes
    )
    np.testing.assert_allclose(
        grouped_matmul(x, w, sizes), theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max())
    )
