# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz as a map of singular values, against the table of HyperP's code; shapes."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import recipes
from jaxmoe.optim.newton_schulz import COEFFICIENTS, newton_schulz, newton_schulz_flops
from jaxmoe.run.plan import describe_update, make_plan
from tests.support import muon_oracle
from tests.support.tolerances import assert_close


def mapped(singular, **options):
    """Return the images of singular values s, each in a 2 x 2 matrix of norm 1."""
    s = jnp.asarray(singular, jnp.float32)
    pairs = jnp.stack([s, jnp.sqrt(1.0 - s * s)], axis=-1)
    out = jax.jit(lambda x: newton_schulz(x, **options))(jax.vmap(jnp.diag)(pairs))
    return np.asarray(out)[:, 0, 0]


def gaussian(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def test_singular_values_equal_the_published_table():
    got = mapped([1e-4, 1e-3, 3e-3, 1e-2, 0.1, 0.5, 1.0])
    # The table has three decimals.
    np.testing.assert_allclose(
        got, [0.049, 0.475, 1.075, 1.018, 1.019, 0.986, 0.978], rtol=0.0, atol=5e-4
    )


def test_singular_values_above_a_hundredth_end_close_to_one():
    got = mapped(np.geomspace(0.01, 1.0, 4001))
    np.testing.assert_allclose([got.min(), got.max()], [0.978, 1.032], rtol=0.0, atol=5e-4)


def test_standard_coefficients_equal_optax():
    got = mapped(np.geomspace(0.1, 1.0, 1001), coefficients="standard")
    assert 0.65 < got.min() < 0.75 and 1.1 < got.max() < 1.2
    assert COEFFICIENTS["standard"] == ((3.4445, -4.7750, 2.0315),) * 5


@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_a_gaussian_matrix_becomes_nearly_orthogonal(shape):
    out = np.asarray(newton_schulz(gaussian(*shape)))
    singular = np.linalg.svd(out, compute_uv=False)
    assert 0.977 < singular.min() and singular.max() < 1.033
    assert np.linalg.norm(out) / np.sqrt(64) == pytest.approx(1.0, abs=0.005)  # seen: 1.001


def test_the_smallest_singular_values_stay_below_one():
    singular = np.linalg.svd(np.asarray(newton_schulz(gaussian(256, 256))), compute_uv=False)
    assert singular.max() < 1.15 and singular.min() < 0.9
    assert np.linalg.norm(singular) / 16.0 == pytest.approx(0.995, abs=0.004)


def test_a_stack_equals_a_loop_over_its_matrices():
    x = gaussian(2, 3, 6, 4) * jnp.asarray([1e-3, 1.0, 1e3]).reshape(1, 3, 1, 1)
    whole = newton_schulz(x)
    for index in np.ndindex(2, 3):
        assert_close(whole[index], newton_schulz(x[index]), "matmul")
        assert_close(whole[index], muon_oracle.orthogonal(np.asarray(x[index])), "matmul")


def test_a_tall_matrix_equals_its_transpose():
    x = gaussian(12, 5)
    assert_close(newton_schulz(x), newton_schulz(x.T).T, "matmul")


def test_zeros_stay_zeros_beside_others():
    x = gaussian(3, 4, 6).at[1].set(0.0)
    out = newton_schulz(x)
    assert not np.asarray(out[1]).any() and np.isfinite(np.asarray(out)).all()
    assert_close(out[2], newton_schulz(x[2]), "matmul")


def test_bfloat16_products_come_close():
    x = gaussian(4, 16, 24)
    out = newton_schulz(x, dtype=jnp.bfloat16)
    assert out.dtype == jnp.float32
    # Five polynomials of slope up to 4 multiply the rounding of the first; seen: 0.03 in norm.
    error = np.linalg.norm(np.asarray(out - newton_schulz(x))) / np.linalg.norm(np.asarray(out))
    assert error < 0.06


def test_bfloat16_does_not_round_the_coefficients():
    """Rounded coefficients would enlarge every singular value by 2%."""
    singular = np.geomspace(0.01, 1.0, 1001)
    bias = mapped(singular, dtype=jnp.bfloat16).mean() / mapped(singular).mean() - 1.0
    assert abs(bias) < 0.005


def test_unknown_coefficients_are_refused():
    with pytest.raises(ValueError) as error:
        # Unwrapped: the tests' type checker would refuse it first.
        inspect.unwrap(newton_schulz)(gaussian(2, 2), coefficients="quintic")
    assert str(error.value) == "coefficients='quintic' must be one of dion, standard"


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (80, 80)])
def test_flops_are_those_of_the_compiled_products(shape):
    compiled = jax.jit(newton_schulz).lower(jnp.ones(shape)).compile()
    cost = compiled.cost_analysis()
    assert cost is not None
    # The compiler counts the body of the loop once, and sums of the size of the matrices too.
    assert cost["flops"] * 5 == pytest.approx(newton_schulz_flops(*shape), rel=0.1)


def test_a_run_says_what_its_matrices_cost_where_it_is_much():
    assert describe_update(make_plan(recipes.tiny())) == (
        "Newton-Schulz takes 8.39 GFLOP a step beside these, whatever the batch (67% of them);"
        " AdamW takes none"
    )
    large = recipes.d8()
    assert describe_update(make_plan(large)) == ""
    assert make_plan(recipes.markov()).matrix_flops == 0.0, "it has AdamW"
