# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The ground that tests/conftest.py promises is there: without it other tests would prove less."""

import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxmoe.layers.norms import rms_norm
from pallas_kernels import grouped_matmul
from sharding.expert_parallel.permute import permute_rows
from tests.support.tolerances import assert_close

WRONG_CALLS = {
    "pallas_kernels": lambda: grouped_matmul(
        jnp.ones((4, 3)), jnp.ones((2, 5, 6)), jnp.ones(2, jnp.int32)
    ),
    "sharding": lambda: permute_rows(
        jnp.ones((4, 3)), jnp.zeros(4, jnp.int32), jnp.zeros(5, jnp.int32)
    ),
    "jaxmoe": lambda: rms_norm(jnp.ones((4, 3)), jnp.ones(2), 1e-6),
    "jaxmoe, a dtype": lambda: rms_norm(jnp.ones((4, 3), jnp.int32), jnp.ones(3), 1e-6),
    "jaxmoe, a number": lambda: rms_norm(jnp.ones((4, 3)), jnp.ones(3), "small"),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_annotations_are_checked(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def test_promotion_is_strict():
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(2, jnp.int32) + jnp.ones(2, jnp.float32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="^from a test$"):
        warnings.warn("from a test", UserWarning, stacklevel=1)


@pytest.mark.parametrize("name", ["a", "b"])
def test_keys_differ_from_test_to_test(key, name, request):
    seen = request.config.stash.setdefault(KEYS, {})
    seen[name] = jax.random.bits(key).item()
    assert len(set(seen.values())) == len(seen)


KEYS = pytest.StashKey[dict]()


def test_tolerances_see_structures_values_and_nan():
    assert_close({"a": np.array([1.0, 1000.0])}, {"a": np.array([1.0, 1000.001])}, "elementwise")
    for actual, desired in (
        ([1.0], (1.0,)),
        ([1.0], [1.0, 1.0]),
        ([1.0], [1.00001]),
        ([np.nan], [1.0]),
        ([np.ones(3)], [np.ones((3, 1))]),
    ):
        with pytest.raises(AssertionError):
            assert_close(actual, desired, "elementwise")
