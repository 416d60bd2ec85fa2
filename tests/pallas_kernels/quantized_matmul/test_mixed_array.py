# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests quantize_mixed: with outliers in activations, few 8-bit blocks save the product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, quantize, quantize_mixed
from pallas_kernels import quantized_matmul as unjitted
from pallas_kernels.quantized_matmul.mixed_array import (
    MixedArray,
    dequantize_mixed,
    round_activations,
)

K, N, BLOCK = 1024, 64, 128

quantized_matmul = jax.jit(unjitted, static_argnames="implementation")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _problem(key, num_outliers=8, rows=192):
    """Return weights and rows, `num_outliers` channels of which are 30 times as large."""
    keys = jax.random.split(key, 3)
    weights = jax.random.normal(keys[0], (K, N))
    channels = jax.random.permutation(keys[1], K)[:num_outliers]
    spread = jnp.ones((1, K)).at[:, channels].set(30.0)
    return weights, jax.random.normal(keys[2], (rows, K)) * spread


def _error(actual, expected):
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@functools.partial(jax.jit, static_argnums=2)
def _uniform(x, weights, dtype):
    """Return W4A8 or W4A4 in blocks, in the original order of channels."""
    rows = quantize(x, dtype, axis=-1, block_size=BLOCK)
    return quantized_matmul(rows, quantize(weights, "int4", axis=-2, block_size=BLOCK))


def test_planted_outliers(key):
    """The error on other rows than the sample is small with few wide blocks."""
    weights, x = _problem(key)
    sample, x = jnp.split(x, [128])
    mixed = quantize_mixed(weights, sample)
    exact = x @ weights
    error = _error(quantized_matmul(x, mixed), exact)
    of_eight, of_four = (_error(_uniform(x, weights, dtype), exact) for dtype in ("int8", "int4"))
    assert error <= 1.1 * of_eight
    assert error <= 0.55 * of_four
    assert 1 <= mixed.num_wide <= 0.25 * mixed.num_blocks
    narrow = quantize_mixed(weights, sample, num_wide=0)
    assert _error(quantized_matmul(x, narrow), exact) > 1.1 * of_eight, "the wide block is needed"


@pytest.mark.slow
def test_channels_have_no_order(key):
    """A permutation of channels gives the same product."""
    weights, x = _problem(key)
    turn = jax.random.permutation(jax.random.key(1), K)
    first = quantized_matmul(x, quantize_mixed(weights, x, num_wide=1))
    second = quantized_matmul(x[:, turn], quantize_mixed(weights[turn], x[:, turn], num_wide=1))
    # Sums of float32 over 8 blocks, in the same order: equal but for ties of channels.
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5 * float(jnp.abs(first).max()))


@pytest.mark.slow
def test_permutation_without_rounding_changes_nothing(key):
    weights, x = _problem(key)
    mixed = quantize_mixed(weights, x, num_wide=2)
    assert sorted(mixed.order.tolist()) == list(range(K))
    largest = jnp.abs(x).max(axis=0)[mixed.order]
    assert bool(jnp.all(largest[:-1] >= largest[1:]))
    # In blocks: half a step of the largest of each block and column.
    np.testing.assert_array_less(
        jnp.abs(dequantize_mixed(mixed) - weights), float(jnp.abs(weights).max()) / 14 * 1.001
    )


@pytest.mark.slow
def test_bits_of_activations(key):
    weights, x = _problem(key)
    mixed = quantize_mixed(weights, x, num_wide=2)
    rounded = round_activations(x, mixed)
    largest = jnp.abs(rounded.values.astype(jnp.int32)).reshape(len(x), -1, BLOCK).max(axis=(0, 2))
    assert largest.tolist() == [127, 127, *[7] * (mixed.num_blocks - 2)]


@pytest.mark.parametrize(
    ("implementation", "num_wide"),
    [
        ("xla", 3),
        pytest.param("reference", 3, marks=pytest.mark.slow),
        pytest.param("xla", 0, marks=pytest.mark.slow),
        pytest.param("xla", K // BLOCK, marks=pytest.mark.slow),
    ],
)
def test_product(implementation, num_wide, key):
    """Compare with float64 factors; the gradient ignores the rounding of x."""
    weights, x = _problem(key, rows=8)
    mixed = quantize_mixed(weights, x, num_wide=num_wide)
    rounded = round_activations(x, mixed)
    scales = np.repeat(np.asarray(rounded.scales, np.float64), BLOCK, axis=1)
    numbers = np.asarray(rounded.values.astype(jnp.int32)) * scales
    expected = numbers[:, np.argsort(mixed.order)] @ np.asarray(dequantize_mixed(mixed), np.float64)

    @jax.jit
    def run(x, mixed):
        function = functools.partial(unjitted, w=mixed, implementation=implementation)
        out, pull = jax.vjp(lambda x: function(x), x)
        return out, *pull(jnp.ones_like(out))

    out, d_x = run(x, mixed)
    peak = np.abs(expected).max()
    assert np.abs(out - expected).max() <= 1e-5 * peak  # sums in float32
    turned = np.asarray(dequantize_mixed(mixed)).sum(axis=1)
    assert np.abs(d_x - turned[None]).max() <= 1e-5 * np.abs(turned).max()


@pytest.mark.slow
def test_without_outliers_most_blocks_stay_wide(key):
    """Where all channels are alike, most blocks stay wide."""
    weights, x = _problem(key, num_outliers=0)
    assert quantize_mixed(weights, x).num_wide > K // BLOCK // 2
    assert quantize_mixed(weights, x, tolerance=3.0).num_wide == 0


@pytest.mark.slow
def test_mixed_array_is_a_pytree(key):
    """Stacks of matrices are mapped over, and the structure keeps what is static."""
    weights, x = _problem(key, rows=8)
    stack = jnp.stack([weights, 2 * weights])
    mixed = jax.vmap(lambda w: quantize_mixed(w, x, num_wide=1))(stack)
    out = jax.vmap(quantized_matmul, in_axes=(None, 0))(x, mixed)
    np.testing.assert_allclose(out[1], 2 * out[0], rtol=1e-6)
    assert isinstance(jax.tree.map(lambda leaf: leaf, mixed), MixedArray)


def test_groups_equal_single_products(key):
    """Each row in the order of its group's matrix; rows past the last group give 0."""
    weights, x = _problem(key, rows=9)
    sizes, turn = jnp.asarray([4, 0, 3]), jax.random.permutation(jax.random.key(1), K)
    parts = [
        quantize_mixed(weights, x[:, order], num_wide=1) for order in (turn, turn, jnp.arange(K))
    ]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    out = jax.jit(grouped_matmul)(x.at[7:].set(jnp.nan), stack, sizes)
    wanted = jnp.concatenate(
        [quantized_matmul(x[:4], parts[0]), quantized_matmul(x[4:7], parts[2])]
    )
    np.testing.assert_allclose(out[:7], wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))
    assert (out[7:] == 0.0).all()
    with pytest.raises(ValueError, match="a MixedArray rounds the rows itself, .* not quantised"):
        grouped_matmul(quantize(x, "int8", axis=-1), stack, sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 100}, r"block_size=100 must divide .* choose 64 or 128"),
        ({"num_wide": 9}, "num_wide=9 must be between 0 and the 8 blocks of 128 in 1024"),
        ({"tolerance": 0.5}, "tolerance=0.5 must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, key):
    weights, x = _problem(key)
    with pytest.raises(ValueError, match=message):
        quantize_mixed(weights, x, **arguments)


def test_bad_products_are_refused(key):
    weights, x = _problem(key)
    mixed = quantize_mixed(weights, x, num_wide=1)
    with pytest.raises(ValueError, match="a MixedArray rounds x itself, .* not quantised"):
        unjitted(quantize(x, "int8", axis=-1), mixed)
    with pytest.raises(ValueError, match=r"takes x \[m k\] and w \[k n\], not \(192, 512\)"):
        unjitted(x[:, :512], mixed)
    with pytest.raises(ValueError, match="call it outside jax.jit, or give num_wide"):
        jax.jit(quantize_mixed)(weights, x)
