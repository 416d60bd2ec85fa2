# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares every implementation of quantized_matmul with numpy in float64 and int64.

TPU kernels run their cases in test_quantized_matmul_for_tpu.py.

To add an implementation: a name in IMPLEMENTATIONS. To add a pair of factors:
`tests/support/conformance.py`.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, QuantizedArray, quantize, quantized_matmul
from tests.support import conformance
from tests.support.conformance import PAIRS, numbers
from tests.support.tolerances import assert_close

IMPLEMENTATIONS = ("reference", "xla")  # and those for TPUs and GPUs, in files of their own
INTEGERS = [name for name, pair in PAIRS.items() if all(factor.is_integer for factor in pair)]
ALWAYS = ("w8a8_channel", "w4a16_block", "mxfp8")


def _cases(pairs, always):
    """Return pairs and implementations: the fast ones, then all."""
    cases = [(pair, name) for pair in pairs for name in IMPLEMENTATIONS]
    is_fast = [name == "xla" and pair in always for pair, name in cases]
    return [
        pytest.param(*case, marks=() if fast else pytest.mark.slow)
        for case, fast in zip(cases, is_fast, strict=True)
    ]


def _door(implementation):
    return functools.partial(quantized_matmul, implementation=implementation)


def test_every_implementation_is_in_the_table():
    assert set(OPERATIONS["quantized_matmul"].implementations) == {
        *IMPLEMENTATIONS,
        "pallas_tpu",
        "pallas_gpu",
    }


@pytest.mark.parametrize(("pair", "implementation"), _cases(PAIRS, ALWAYS))
def test_conformance(implementation, pair):
    conformance.check_product(_door(implementation), PAIRS[pair])


@pytest.mark.parametrize(("pair", "implementation"), _cases(INTEGERS, ("w8a8_mixed",)))
def test_integers_are_exact(implementation, pair):
    conformance.check_exact_product(_door(implementation), PAIRS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_odd_scales(implementation, scale, key):
    """NaN, infinite and zero scales affect only the values that they scale."""
    keys = jax.random.split(key)
    x = quantize(jax.random.normal(keys[0], (8, 64)), "int8", axis=-1, block_size=32)
    w = quantize(jax.random.normal(keys[1], (64, 16)), "int4", axis=-2, block_size=32)
    plain = quantized_matmul(x, w, implementation=implementation)
    odd = dataclasses.replace(x, scales=x.scales.at[2, 1].set(scale))
    out = np.asarray(quantized_matmul(odd, w, implementation=implementation))
    others = np.arange(8) != 2
    np.testing.assert_array_equal(out[others], np.asarray(plain)[others])
    if scale == 0.0:
        first = [dataclasses.replace(x, values=x.values.at[2, 32:].set(0)), w]
        np.testing.assert_allclose(out[2], numbers(first[0])[2] @ numbers(w), rtol=1e-4, atol=1e-5)
    else:
        assert not np.any(np.isfinite(out[2]))


def test_a_scale_of_all_blocks_is_caught(key):
    """Using the scales of the first block for all fails."""

    def wrong(x, w, *, out_dtype):
        scales = jnp.broadcast_to(w.scales[:1], w.scales.shape)
        return quantized_matmul(x, dataclasses.replace(w, scales=scales), out_dtype=out_dtype)

    with pytest.raises(AssertionError):
        conformance.check_exact_product(wrong, PAIRS["w8a8_block"])


def test_sums_that_wrap_are_caught():
    """Summing in int16 fails."""

    def wrong(x, w, *, out_dtype):
        sums = jnp.matmul(x.values, w.values, preferred_element_type=jnp.int16)
        return sums.astype(out_dtype) * x.scales * w.scales

    with pytest.raises(AssertionError):
        conformance.check_exact_product(wrong, PAIRS["w8a8_channel"])


@pytest.mark.slow
def test_blocks_of_any_two_sizes(key):
    """Blocks of 24 and of 36 share blocks of 12."""
    keys = jax.random.split(key)
    x = quantize(jax.random.normal(keys[0], (5, 72)), "int8", axis=-1, block_size=24)
    w = quantize(jax.random.normal(keys[1], (72, 7)), "int8", axis=-2, block_size=36)
    out = quantized_matmul(x, w, implementation="xla")
    np.testing.assert_allclose(out, numbers(x) @ numbers(w), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_factors(implementation):
    for m, k, n in ((0, 8, 4), (3, 0, 4), (3, 8, 0)):
        x = quantize(jnp.ones((m, k)), "int8", axis=-1)
        w = quantize(jnp.ones((k, n)), "int8", axis=-2)
        out = quantized_matmul(x, w, implementation=implementation)
        assert out.shape == (m, n)
        assert not np.any(out)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma, key):
    """Columns over devices, rows everywhere: as on one device, with a whole gradient."""
    keys = jax.random.split(key)
    x = jax.random.normal(keys[0], (6, 64))
    w = quantize(jax.random.normal(keys[1], (64, 16)), "int8", axis=-2, block_size=32)
    mesh = jax.make_mesh((4,), ("columns",), axis_types=(AxisType.Auto,))
    spec = P(None, "columns")
    apply = jax.shard_map(
        quantized_matmul, mesh=mesh, in_specs=(P(), spec), out_specs=spec, check_vma=check_vma
    )

    def loss(x, w, multiply):
        return jnp.sum(jnp.square(multiply(x, w)))

    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, jax.NamedSharding(mesh, spec))
        actual = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, apply)))(x, sharded)
    expected = jax.value_and_grad(loss)(x, w, quantized_matmul)
    assert_close(actual, expected, "matmul")


def _ones(shape, dtype="int8", axis=None):
    return quantize(jnp.ones(shape), dtype, axis=axis)


REFUSED = {
    "shapes": (
        lambda: (_ones((4, 8)), _ones((6, 3))),
        r"takes x \[m k\] and w \[k n\], not \(4, 8\), \(6, 3\)",
    ),
    "axis_of_w": (
        lambda: (_ones((4, 8)), _ones((8, 3), axis=-1)),
        "w has scales along axis -1, .* axis=-2",
    ),
    "axis_of_x": (
        lambda: (_ones((4, 8), axis=-2), _ones((8, 3))),
        "x has scales along axis -2, .* axis=-1",
    ),
    "one_quantised": (
        lambda: (_ones((4, 8)), jnp.ones((8, 3))),
        r"x \(quantised int8\) and w \(float32\) must both be quantised",
    ),
    "two_kinds": (
        lambda: (_ones((4, 8)), _ones((8, 3), "float8_e4m3fn")),
        r"w \(quantised float8_e4m3fn\) must both be .*, and both be integers or both float8",
    ),
    "two_floats": (
        lambda: (jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3))),
        r"x \(bfloat16\) and w \(float32\) must have the same floating dtype",
    ),
    "no_format": (
        lambda: (_ones((4, 8)), _made(jnp.int16, (1, 1), None)),
        "of int16 with scales of float32 is none of int8, int4",
    ),
    "number_of_scales": (
        lambda: (_ones((4, 8)), _made(jnp.int8, (3, 3), -2)),
        r"w is int8 \(8, 3\) along axis -2, and its scales are \(3, 3\)",
    ),
    "scales_of_one": (
        lambda: (_ones((4, 8)), _made(jnp.int8, (8, 1), None)),
        r"w is int8 \(8, 3\) along axis None, and its scales are \(8, 1\)",
    ),
}


def _made(dtype, scales, axis):
    return QuantizedArray(values=jnp.ones((8, 3), dtype), scales=jnp.ones(scales), axis=axis)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(quantized_matmul)(*make())


@pytest.mark.slow
def test_sums_that_may_overflow_are_refused():
    """They are refused; in two blocks that just fit they are exact."""
    with pytest.raises(ValueError, match="133145 products of integers share a scale, and only"):
        jax.eval_shape(quantized_matmul, *(_ones(shape) for shape in ((1, 133145), (133145, 1))))
    x = quantize(jnp.ones((1, 266288)), "int8", axis=-1, block_size=133144)
    out = quantized_matmul(x, quantize(jnp.ones((266288, 1)), "int8", axis=-2))
    assert float(out[0, 0]) == pytest.approx(266288, rel=1e-6)
