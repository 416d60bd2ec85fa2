# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the sampling against a slow reference and `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.models.sampling import SamplingConfig, choose, filter_logits

VOCAB = 23
KEEP = jax.jit(filter_logits)


def reference(logits, top_k, top_p, min_p):
    """The tokens that are left, one row at a time, in float64."""
    kept = np.zeros(logits.shape, bool)
    for row, values in enumerate(logits.astype(np.float64)):
        left = sorted(range(len(values)), key=lambda token: -values[token])[:top_k]
        if top_p is not None:
            probs = np.exp(values[left] - np.logaddexp.reduce(values[left]))
            total, number = 0.0, 0
            while number < len(left) and (number == 0 or total < top_p):
                total, number = total + probs[number], number + 1
            left = left[:number]
        if min_p is not None:
            left = [token for token in left if values[token] >= values[left[0]] + np.log(min_p)]
        kept[row, left] = True
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.none() | st.integers(1, VOCAB + 3),
    top_p=st.none() | st.floats(0.01, 0.99),
    min_p=st.none() | st.floats(0.001, 0.999),
)
def test_filters_equal_the_slow_reference(seed, temperature, top_k, top_p, min_p):
    """Except for tokens within rounding of a border."""
    logits = np.random.default_rng(seed).standard_normal((3, VOCAB)).astype(np.float32)
    logits = logits / np.float32(temperature)
    config = SamplingConfig(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = np.asarray(KEEP(jnp.asarray(logits), config.limits(VOCAB)))
    kept = np.isfinite(filtered)
    np.testing.assert_array_equal(filtered[kept], logits[kept])
    assert kept.any(axis=-1).all()
    borders = [
        reference(logits, top_k, top_p and top_p + change, min_p and min_p * (1 + change))
        for change in (-1e-5, 1e-5)
    ]
    assert (kept >= np.logical_and(*borders)).all() and (kept <= np.logical_or(*borders)).all()


def test_tokens_whose_sum_is_exactly_top_p_are_enough():
    """Probabilities 1/2, 1/4 and 1/4, which float32 holds: the first alone reaches 1/2."""
    logits = jnp.asarray([[np.log(2.0), 0.0, 0.0]], jnp.float32)
    limits = SamplingConfig(temperature=1.0, top_p=0.5).limits(3)
    assert np.isfinite(np.asarray(KEEP(logits, limits))).tolist() == [[True, False, False]]


@pytest.mark.slow
def test_filters_equal_those_of_transformers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    warpers = pytest.importorskip("transformers", reason="not installed: extra hf")
    logits = np.random.default_rng(0).standard_normal((50, VOCAB)).astype(np.float32) * 2
    for top_k, top_p, min_p in (
        (5, None, None),
        (None, 0.7, None),
        (None, None, 0.1),
        (9, 0.8, 0.05),
    ):
        scores = torch.tensor(logits)
        if top_k is not None:
            scores = warpers.TopKLogitsWarper(top_k)(None, scores)
        if top_p is not None:
            scores = warpers.TopPLogitsWarper(top_p)(None, scores)
        if min_p is not None:
            scores = warpers.MinPLogitsWarper(min_p)(None, scores)
        config = SamplingConfig(top_k=top_k, top_p=top_p, min_p=min_p)
        ours = KEEP(jnp.asarray(logits), config.limits(VOCAB))
        np.testing.assert_array_equal(ours, scores.numpy())


def test_sampled_tokens_have_the_filtered_frequencies():
    logits = jnp.asarray([[2.0, 1.5, 1.0, 0.0, -1.0]])
    config = SamplingConfig(temperature=0.7, top_k=3)
    many = jnp.tile(logits, (4000, 1))
    tokens = choose(many, jax.random.key(0), config.limits(5), is_greedy=False, has_filters=True)
    wanted = np.exp(np.asarray(logits[0, :3]) / 0.7)
    wanted /= wanted.sum()
    found = np.bincount(np.asarray(tokens), minlength=5) / 4000
    assert not found[3:].any()
    np.testing.assert_allclose(found[:3], wanted, atol=0.04)


def test_bad_sampling_is_refused():
    for text, fields in {
        "temperature=-1.0 must be 0 (greedy) or above": {"temperature": -1.0},
        "top_k=0 must be at least 1": {"top_k": 0},
        "top_p=1.5 must be above 0 and at most 1": {"top_p": 1.5},
        "min_p=-0.1 must lie between 0 and 1": {"min_p": -0.1},
    }.items():
        with pytest.raises(ValueError) as error:
            SamplingConfig(**fields)
        assert text in str(error.value)
