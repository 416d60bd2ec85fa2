# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests quantize and dequantize: every dtype and kind of scale, errors, corner cases, pytree.

To add a dtype: a row in ERRORS.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import QuantizedArray, quantized_matmul
from pallas_kernels import dequantize as unjitted_dequantize
from pallas_kernels import quantize as unjitted_quantize

DTYPES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "mxfp8")
# Most of the time goes into compiling: one program instead of one for each operation.
quantize = jax.jit(unjitted_quantize, static_argnames=("dtype", "axis", "block_size"))
dequantize = jax.jit(unjitted_dequantize, static_argnames="dtype")

LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344, "mxfp8": 448}

# Kinds of scales: axis and block size.
KINDS = {"tensor": (None, None), "channel": (-1, None), "block": (-1, 32), "rows": (-2, None)}
ALWAYS = (("int4", "block"), ("float8_e4m3fn", "channel"), ("mxfp8", "block"))
CASES = [
    pytest.param(dtype, kind, marks=() if (dtype, kind) in ALWAYS else pytest.mark.slow)
    for dtype in DTYPES
    for kind in KINDS
    if dtype != "mxfp8" or kind == "block"
]
# A few dtypes always, all of them with the slow tests.
FEW_DTYPES = [
    pytest.param(dtype, marks=() if dtype in ("int4", "mxfp8") else pytest.mark.slow)
    for dtype in DTYPES
]

# Relative error of a product [256 1024] @ [1024 512] of normal numbers, both factors quantised:
# the bound, beside what was measured when it was set.
ERRORS = {
    ("int8", "int8", None): 0.02,  # 0.0150
    ("int8", "int8", 1024): 0.02,  # 0.0111
    ("int8", "int8", 128): 0.02,  # 0.0091
    ("int8", "int4", 128): 0.15,  # 0.117
    ("int4", "int4", 128): 0.2,  # 0.166
    ("float8_e4m3fn", "float8_e4m3fn", 1024): 0.05,  # 0.0374
    ("float8_e5m2", "float8_e5m2", 1024): 0.09,  # 0.0744
    ("mxfp8", "mxfp8", 32): 0.05,  # 0.0374
}


def _quantize(x, dtype, kind, key=None):
    axis, block_size = KINDS[kind]
    return quantize(x, dtype, axis=axis, block_size=block_size, key=key)


def _steps(x: jax.Array, q: QuantizedArray) -> np.ndarray:
    """Return the distance of the neighbours of each value: the scale of integers, or of floats."""
    one = QuantizedArray(values=jnp.ones_like(q.values), scales=q.scales, axis=q.axis)
    scales = np.asarray(dequantize(one))
    if jnp.issubdtype(q.values.dtype, jnp.integer):
        return scales
    info = jnp.finfo(q.values.dtype)
    exponents = np.floor(np.log2(np.maximum(np.abs(x / scales), float(info.tiny))))
    return scales * 2.0 ** (exponents - info.nmant)


@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_nearest(dtype, kind, key):
    """Every value is within half a step, and the largest of each scale is exact."""
    x = jax.random.normal(key, (6, 64)) * jnp.array([1, 10, 1e-3, 1e3, 1, 1], jnp.float32)[:, None]
    q = _quantize(x, dtype, kind)
    axis, block_size = KINDS[kind]
    assert q.dtype_name == dtype
    assert (q.shape, q.axis, q.block_size) == (x.shape, axis, block_size)
    expected = {"tensor": (1, 1), "channel": (6, 1), "block": (6, 2), "rows": (1, 64)}[kind]
    assert q.scales.shape == expected
    error = np.abs(np.asarray(dequantize(q)) - np.asarray(x))
    # A rounded quotient and a rounded product come on top: one part in 2^22 of the number.
    assert np.all(error <= _steps(x, q) / 2 + np.abs(x) * 2.0**-22)
    largest = np.abs(np.asarray(q.values.astype(jnp.float32)))
    assert largest.max() <= LARGEST[dtype]
    if dtype != "mxfp8":  # whose scales are rounded up
        of_scale = (
            np.abs(np.asarray(x))
            == {
                "tensor": np.abs(x).max(),
                "channel": np.abs(x).max(axis=1, keepdims=True),
                "block": np.repeat(np.abs(x).reshape(6, 2, 32).max(axis=2), 32, axis=1),
                "rows": np.abs(x).max(axis=0, keepdims=True),
            }[kind]
        )
        assert np.all(largest[of_scale] == LARGEST[dtype])


@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_powers_of_two_change_scales_alone(dtype, kind, key):
    """Q(2^n x) = 2^n Q(x), and Q(-x) = -Q(x)."""
    x = jax.random.normal(key, (4, 64))
    q = _quantize(x, dtype, kind)
    for factor in (2.0**10, 2.0**-20):
        other = _quantize(x * factor, dtype, kind)
        np.testing.assert_array_equal(_bits(other.values), _bits(q.values))
        np.testing.assert_array_equal(
            other.scales.astype(jnp.float32), factor * q.scales.astype(jnp.float32)
        )
    negative = _quantize(-x, dtype, kind)
    np.testing.assert_array_equal(dequantize(negative), -dequantize(q))


@pytest.mark.slow
@pytest.mark.parametrize(("x_dtype", "w_dtype", "block"), ERRORS)
def test_error_of_products(x_dtype, w_dtype, block):
    """Errors are within the recorded bounds."""
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (256, 1024)), jax.random.normal(keys[1], (1024, 512))
    if block is None:
        factors = quantize(x, x_dtype, axis=None), quantize(w, w_dtype, axis=None)
    else:
        factors = (
            quantize(x, x_dtype, axis=-1, block_size=block),
            quantize(w, w_dtype, axis=-2, block_size=block),
        )
    error = jnp.linalg.norm(quantized_matmul(*factors) - x @ w) / jnp.linalg.norm(x @ w)
    bound = ERRORS[x_dtype, w_dtype, block]
    assert bound / 3 < error < bound


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_rounding_at_random(dtype, key, kind="block"):
    """Values round to one of two neighbours, with an exact mean.

    The mean is within four standard deviations of at most half a step for each value (one in 16000
    is further off: the key is fixed).
    """
    draws = 400
    x = jax.random.normal(key, (2, 32))
    keys = jax.random.split(key, draws)
    q = jax.jit(jax.vmap(lambda k: _quantize(x, dtype, kind, k)))(keys)
    numbers = np.asarray(jax.vmap(dequantize)(q), np.float64)
    # A rounded quotient and a rounded product come on top: one part in 2^22 of the number.
    steps, slack = _steps(x, jax.tree.map(lambda leaf: leaf[0], q)), np.abs(x) * 2.0**-22
    assert np.all(np.abs(numbers - np.asarray(x)) <= steps + slack)
    error = np.abs(numbers.mean(axis=0) - np.asarray(x))
    assert np.all(error < 4 * steps / 2 / draws**0.5 + slack)
    nearest = np.asarray(dequantize(_quantize(x, dtype, kind)))
    assert np.any(numbers != nearest), "nothing was rounded at random"


def test_the_same_key_rounds_alike(key):
    x = jax.random.normal(key, (4, 32))
    one, two = (_quantize(x, "int4", "channel", key) for _ in range(2))
    np.testing.assert_array_equal(one.values, two.values)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("is_random", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_zeros_extremes_and_nonfinite_values(dtype, is_random, key):
    """Blocks of zeros, smallest and largest values; NaN and infinity stay in their block.

    Casts do not saturate by themselves: 448 is the last value of e4m3fn before NaN.
    """
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    huge = 0.9 * float(np.finfo(np.float32).max)  # the very last is rounded to infinity in mxfp8
    blocks = [
        np.zeros(32),
        np.full(32, -0.0),
        np.full(32, tiny),
        np.full(32, -huge),
        np.array([1.0, np.nan, *[2.0] * 30]),
        np.array([np.inf, *[1.0] * 31]),
        np.array([1e-30, *[1e-38] * 31]),
    ]
    x = jnp.array(np.concatenate(blocks)[None], jnp.float32)
    q = quantize(x, dtype, axis=-1, block_size=32, key=key if is_random else None)
    numbers = np.asarray(dequantize(q)).reshape(len(blocks), 32)
    assert not np.any(np.isnan(np.asarray(q.values.astype(jnp.float32))))
    assert not np.any(numbers[:2])
    assert np.all(np.abs(numbers[2]) <= np.finfo(np.float32).tiny)
    np.testing.assert_allclose(numbers[3], -huge, rtol=0.07)  # mxfp8 keeps 4 bits
    assert np.all(np.isnan(numbers[4:6]))
    assert np.all(np.isfinite(numbers[[0, 1, 2, 3, 6]]))
    np.testing.assert_allclose(numbers[6, 0], 1e-30, rtol=0.125)  # one step of e4m3fn
    scales = np.asarray(q.scales.astype(jnp.float32))
    assert scales[0, 0] == 1.0
    assert np.all(scales[0, [0, 1, 2, 3, 6]] > 0.0)


@pytest.mark.parametrize("is_random", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ("float8_e4m3fn", "float8_e5m2", "mxfp8"))
def test_float8_saturates(dtype, is_random, key):
    """Quotients that rounding puts above the largest never become NaN."""
    scales = jnp.exp(jax.random.uniform(key, (512, 1), minval=-20.0, maxval=20.0))
    x = scales * jnp.ones((1, 32)) * jnp.where(jnp.arange(32) % 2 == 0, 1.0, -1.0)[None]
    q = quantize(x, dtype, axis=-1, key=key if is_random else None)
    values = np.asarray(q.values.astype(jnp.float32))
    assert np.all(np.isfinite(values))
    assert np.abs(values).max() <= LARGEST[dtype]


def test_scales_of_mxfp8():
    """Scales are powers of two, rounded up so that nothing is clipped."""
    x = jnp.array([448.0, 449.0, 447.0, 1.0])[:, None] * jnp.ones((1, 32))
    q = quantize(x, "mxfp8", axis=-1)
    assert q.scales.dtype == jnp.float8_e8m0fnu
    assert q.scales[:, 0].astype(jnp.float32).tolist() == [1.0, 2.0, 1.0, 2.0**-8]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_from_narrow_floats(dtype, key):
    x = jax.random.normal(key, (4, 32)).astype(dtype)
    q, expected = (_quantize(y, "int8", "channel") for y in (x, x.astype(jnp.float32)))
    np.testing.assert_array_equal(q.values, expected.values)
    assert q.scales.dtype == jnp.float32
    assert dequantize(q, dtype).dtype == dtype


def test_gradient_of_quantize_is_zero(key):
    """The gradient is 0, the derivative of a step."""
    x = jax.random.normal(key, (4, 32))

    def total(x):
        return jnp.sum(dequantize(quantize(jax.lax.stop_gradient(x), "int8", axis=-1)))

    def straight(x):
        q = dequantize(quantize(jax.lax.stop_gradient(x), "int8", axis=-1))
        return jnp.sum(x + jax.lax.stop_gradient(q - x))

    assert not np.any(jax.grad(total)(x))
    np.testing.assert_array_equal(jax.grad(straight)(x), jnp.ones_like(x))
    values = jax.jvp(lambda x: quantize(x, "int8", axis=None).scales, (x,), (x,))[1]
    assert np.all(np.isfinite(values))


@pytest.mark.parametrize(("dtype", "kind"), [("int4", "channel"), ("mxfp8", "block")])
class TestPytree:
    """Transformations that move arrays."""

    def test_scan_takes_layers_off(self, dtype, kind, key):
        x = jax.random.normal(key, (3, 4, 64))
        stack = _quantize(x, dtype, kind)
        _, layers = jax.lax.scan(lambda carry, one: (carry, dequantize(one)), 0, stack)
        np.testing.assert_array_equal(layers, dequantize(stack))

    def test_jit_and_vmap(self, dtype, kind, key):
        x = jax.random.normal(key, (3, 4, 64))
        mapped = jax.jit(jax.vmap(functools.partial(_quantize, dtype=dtype, kind=kind)))(x)
        whole = _quantize(x, dtype, kind)
        assert jax.tree.structure(mapped) == jax.tree.structure(whole)
        np.testing.assert_array_equal(_bits(mapped.values), _bits(whole.values))
        np.testing.assert_array_equal(dequantize(mapped), dequantize(whole))

    @pytest.mark.slow
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map(self, dtype, kind, check_vma, key):
        """With rows over devices, each dequantises its own."""
        x = jax.random.normal(key, (8, 64))
        q = _quantize(x, dtype, kind)
        mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
        spec = P("rows")
        apply = jax.shard_map(
            lambda one: dequantize(one).sum(axis=1),
            mesh=mesh,
            in_specs=(spec,),
            out_specs=spec,
            check_vma=check_vma,
        )
        with jax.set_mesh(mesh):
            out = jax.jit(apply)(jax.device_put(q, jax.NamedSharding(mesh, spec)))
        np.testing.assert_allclose(out, dequantize(q).sum(axis=1), rtol=1e-5, atol=1e-5)

    def test_saved_and_restored(self, dtype, kind, key, tmp_path):
        q = _quantize(jax.random.normal(key, (4, 64)), dtype, kind)
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / "q", {"w": q})
        with ocp.StandardCheckpointer() as saver:
            back = saver.restore(tmp_path / "q", jax.eval_shape(lambda: {"w": q}))["w"]
        assert (back.values.dtype, back.scales.dtype) == (q.values.dtype, q.scales.dtype)
        assert (back.axis, back.dtype_name) == (q.axis, dtype)
        np.testing.assert_array_equal(_bits(back.values), _bits(q.values))
        np.testing.assert_array_equal(dequantize(back), dequantize(q))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' must be one of int8, int4, float8_e4m3fn"),
        ({"block_size": 7}, r"block_size=7 must divide axis -1 of x \(4, 64\).* choose 4 or 8"),
        ({"axis": None, "block_size": 8}, "block_size=8 needs the axis that it cuts"),
        ({"axis": 2}, r"axis=2 is not one of the 2 of x \(4, 64\)"),
        ({"dtype": "mxfp8", "block_size": 64}, "mxfp8 has blocks of 32, not 64"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    arguments = {"dtype": "int8", "axis": -1, **arguments}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(unjitted_quantize)(jnp.ones((4, 64)), **arguments)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="quantize takes floating numbers, and x is int32"):
        inspect.unwrap(unjitted_quantize)(jnp.ones((4, 64), jnp.int32), "int8", axis=-1)


def _bits(x):
    """Return values that numpy compares; float8 in float32."""
    return np.asarray(x.astype(jnp.float32))
