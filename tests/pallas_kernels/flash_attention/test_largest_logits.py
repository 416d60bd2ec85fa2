# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the largest logit of every query with the whole matrix of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import largest_logits

B, N, M, H = 2, 4, 2, 8
SEGMENTS = np.sort(np.random.default_rng(9).integers(0, 3, (B, 300)), axis=1).astype(np.int32)

CASES = {
    "causal": {},
    "whole": {"causal": False},
    "window_cap_scale": {"window": 40, "softcap": 1.5, "scale": 0.7},
    "cache": {"q_positions": np.arange(100, 400, dtype=np.int32)},
    "segments": {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
    "sees_nothing": {"q_positions": np.arange(-1, 299, dtype=np.int32)},
    "sees_nothing_with_a_cap": {"q_positions": np.arange(-1, 299, dtype=np.int32), "softcap": 1.5},
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_equals_the_whole_matrix(given):
    """300 queries make three blocks, the last of them padded."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((B, 300, n, H)).astype(np.float32) for n in (N, M))
    logits = np.einsum("bsnh,bunh->bnsu", q, np.repeat(k, N // M, axis=2), dtype=np.float64)
    logits = logits * given.get("scale", H**-0.5)
    if "softcap" in given:
        logits = given["softcap"] * np.tanh(logits / given["softcap"])
    distance = given.get("q_positions", np.arange(300))[:, None] - np.arange(300)
    sees = np.broadcast_to(distance >= 0, (B, 300, 300)) | (not given.get("causal", True))
    if "window" in given:
        sees = sees & (distance < given["window"])
    if "q_segment_ids" in given:
        sees = sees & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    wanted = np.where(sees[:, None], logits, -np.inf).max(-1)
    arrays = {n: jnp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    top = jax.jit(lambda q, k: largest_logits(q, k, **arrays))(q, k)
    np.testing.assert_allclose(top, wanted, rtol=2e-5, atol=2e-5)  # sums of 8 products of order 1
    _, lse = flash_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k), **arrays)
    assert (top <= lse + 1e-5).all() and (top >= lse - np.log(300) - 1e-5).all()
    assert np.isneginf(wanted).any() == (given.get("q_positions", [0])[0] < 0)


def test_it_has_no_gradient():
    q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))
    slopes = jax.grad(lambda q, k: largest_logits(q, k).sum(), argnums=(0, 1))(q, k)
    assert all((slope == 0.0).all() for slope in slopes)
