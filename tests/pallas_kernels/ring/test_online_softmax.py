# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that softmax states form a commutative monoid equal to attention over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import flash_attention
from pallas_kernels.ring.online_softmax import SoftmaxState, merge

# One merge rounds a few times; states are of order 1.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

_numbers = st.floats(-50, 50, width=32)


@st.composite
def states(draw):
    """Draw outputs [1 3 2 2], some queries of which have seen no key."""
    lse = draw(hnp.arrays(np.float32, (1, 2, 3), elements=_numbers | st.just(-np.inf)))
    out = draw(hnp.arrays(np.float32, (1, 3, 2, 2), elements=st.floats(-1, 1, width=32)))
    out = np.where(np.isfinite(lse).swapaxes(1, 2)[..., None], out, np.float32(0))
    return SoftmaxState(jnp.asarray(out), jnp.asarray(lse))


_merge = jax.jit(merge)


def _assert_close(a, b):
    np.testing.assert_allclose(a.out, b.out, **TOLERANCE)
    np.testing.assert_allclose(a.lse, b.lse, **TOLERANCE)


@settings(max_examples=30)
@given(states(), states(), states())
def test_commutative_monoid(a, b, c):
    _assert_close(_merge(a, b), _merge(b, a))
    _assert_close(_merge(_merge(a, b), c), _merge(a, _merge(b, c)))
    empty = SoftmaxState(jnp.zeros_like(a.out), jnp.full_like(a.lse, -jnp.inf))
    _assert_close(_merge(a, empty), a)
    _assert_close(_merge(empty, a), a)


@settings(max_examples=20)
@given(states(), states())
def test_gradients_are_finite(a, b):
    for gradient in jax.tree.leaves(_gradients(a, b)):
        assert np.all(np.isfinite(gradient))


@jax.jit
def _gradients(a, b):
    def total(a, b):
        out, lse = merge(a, b)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    return jax.grad(total, argnums=(0, 1))(a, b)


def test_merged_parts_are_attention_over_all_keys():
    """Value and gradients through every part; some queries see only one part."""
    q, k, v, d_out = jax.random.normal(jax.random.key(3), (4, 2, 12, 2, 8))

    def whole(q, k, v):
        return flash_attention(q, k, v, implementation="reference")[0]

    def by_parts(q, k, v):
        parts = [
            SoftmaxState(
                *flash_attention(q, k[:, keys], v[:, keys], kv_positions=jnp.arange(12)[keys])
            )
            for keys in (slice(8, 12), slice(0, 5), slice(5, 8))
        ]
        return merge(merge(parts[0], parts[1]), parts[2]).out

    def value_and_gradients(attend, q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    run = jax.jit(value_and_gradients, static_argnums=0)
    results = [run(attend, q, k, v, d_out) for attend in (whole, by_parts)]
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
