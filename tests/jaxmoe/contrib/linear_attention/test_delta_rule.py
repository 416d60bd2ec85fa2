# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The delta rule in chunks against one token after the other: values, states and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.linear_attention.delta_rule import delta_rule
from tests.support.tolerances import assert_close

BATCH, LENGTH = 2, 21


def operands(per_row, heads=(4, 2), key_dim=5, scale=2.0):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    num_heads, key_heads = heads
    q, k = (normal(BATCH, LENGTH, key_heads, key_dim) for _ in range(2))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    decays = (BATCH, LENGTH, num_heads, *([key_dim] if per_row else []))
    return {
        "q": q,
        "k": k,
        "v": normal(BATCH, LENGTH, num_heads, 3),
        "g": -scale * jnp.abs(normal(*decays)),
        "beta": jax.nn.sigmoid(normal(BATCH, LENGTH, num_heads)),
        "initial": normal(BATCH, num_heads, key_dim, 3),
    }


def segments_of():
    """Three documents; and padding inside and behind one."""
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[0, 9:] = 2
    segments[0, 13:] = 3
    segments[1, 3:5] = 0
    segments[1, 17:] = 0
    return jnp.asarray(segments)


def value_and_gradient(arrays, **options):
    def number(arrays):
        y, state = delta_rule(**arrays, **options)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y * weights) + jnp.sum(jnp.sin(state)), (y, state)

    return jax.jit(jax.value_and_grad(number, has_aux=True))(arrays)


@pytest.mark.parametrize("per_row", [False, True], ids=["per_head", "per_row"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_equal_one_token_after_the_other(per_row, chunk):
    arrays = operands(per_row)
    segments = segments_of()
    actual = value_and_gradient(arrays, segment_ids=segments, chunk=chunk)
    desired = value_and_gradient(arrays, segment_ids=segments, form="reference")
    assert_close(actual, desired, "end_to_end")


@pytest.mark.parametrize("per_row", [False, True], ids=["per_head", "per_row"])
def test_decays_to_nothing_and_equal_keys_stay_exact(per_row):
    """Decays of exp(-100) a step overflow where exp(c) and exp(-c) are taken apart."""
    arrays = operands(per_row, scale=100.0)
    arrays["k"] = jnp.broadcast_to(arrays["k"][:1, :1], arrays["k"].shape)
    actual = value_and_gradient(arrays, chunk=8)
    desired = value_and_gradient(arrays, form="reference")
    assert_close(actual, desired, "end_to_end")


def test_equal_keys_without_decay_stay_exact_in_a_long_chunk():
    """The powers of A are large then, which a series for the inverse would sum."""
    arrays = operands(False, scale=0.0)
    arrays["k"] = jnp.broadcast_to(arrays["k"][:1, :1], arrays["k"].shape)
    actual = value_and_gradient(arrays, chunk=LENGTH)
    desired = value_and_gradient(arrays, form="reference")
    assert_close(actual, desired, "end_to_end")


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 heads of values must be a multiple of 3 heads of keys"):
        delta_rule(**operands(False, heads=(4, 3)))
