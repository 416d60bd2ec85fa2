# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evolution strategies with perturbations of low rank."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.estimators.evolution import EvolutionConfig, low_rank, pair_factors
from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.contrib.estimators.passes import prepare
from jaxmoe.contrib.estimators.spsa import Ends, direction_keys, paired_losses
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.step import make_train_step
from tests.support.estimators import estimated, state_of, step_of
from tests.support.models import TINY
from tests.support.one_step import batch, params_of

MATRIX = ((-2,), (-1,))


@pytest.mark.slow
def test_members_equal_dense_perturbed_models():
    """Losses of all members, through the view, and the gradient made of them."""
    sigma, pairs = 0.05, 2
    step, draw = step_of(TINY), partial(low_rank, 1)
    rows, table = jax.tree.map(jnp.asarray, batch()), parameter_table(TINY)
    _, given = prepare(step, state_of(TINY), rows, 0)
    keys = direction_keys(given, jnp.arange(pairs))
    found = jax.jit(lambda given: paired_losses(step, given, keys, Ends(sigma, draw)))(given)

    @jax.jit
    def loss(key, sign):
        noise = noise_sum(table, params_of(TINY), key[None], jnp.ones(1), draw)
        moved = jax.tree.map(lambda p, e: p + sign * sigma * e, params_of(TINY), noise)
        state = dataclasses.replace(state_of(TINY), params=moved)
        _, summed = batch_gradients(step, state, rows)
        return summed.loss + sum(summed.losses.values())

    dense = [[loss(key, sign) for sign in (1.0, -1.0)] for key in keys]
    np.testing.assert_allclose(found.total, np.asarray(dense), rtol=1e-5)
    assert np.ptp(np.asarray(dense)) > 1e-3
    config = EvolutionConfig(population=2 * pairs, sigma=sigma)
    grads = estimated(config, step, state_of(TINY)).summed.grads
    expected = noise_sum(table, params_of(TINY), keys, pair_factors(found.total, sigma), draw)
    for one, other in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_even_fitness_gives_no_gradient():
    even = jnp.asarray([[3.0, 3.0], [1.0, 1.0], [7.5, 7.5]])
    np.testing.assert_array_equal(pair_factors(even, 0.1), np.zeros(3))
    assert np.all(np.asarray(pair_factors(even + jnp.asarray([[0.0, 1.0]]), 0.1)) < 0.0)


def test_groups_standardise_by_themselves():
    totals = jnp.asarray([[1.0, 2.0], [100.0, 300.0]])
    alone = [pair_factors(totals[i : i + 1], 0.1) for i in range(2)]
    both = pair_factors(totals, 0.1, groups=2)
    np.testing.assert_allclose(both, np.concatenate(alone) / np.sqrt(2.0), rtol=1e-5)


def test_mean_of_rank_one_draws_has_full_rank_and_unit_variance():
    keys = jax.random.split(jax.random.key(0), 64)
    draws = jax.vmap(lambda key: low_rank(1, key, (3, 16, 24), MATRIX))(keys)
    assert set(np.linalg.matrix_rank(np.asarray(draws[:5]))[..., :].ravel()) == {1}
    assert set(np.linalg.matrix_rank(np.asarray(draws.mean(0)))) == {16}
    wide = jax.vmap(lambda key: low_rank(4, key, (16, 24), MATRIX))(keys)
    assert set(np.linalg.matrix_rank(np.asarray(wide))) == {4}
    assert float(jnp.var(draws)) == pytest.approx(1.0, abs=0.05)
    assert float(jnp.var(wide)) == pytest.approx(1.0, abs=0.05)


def test_dimensions_of_a_matrix_keep_their_places():
    """Inputs between outputs: the noise is of rank one in the matrix and not elsewhere."""
    noise = low_rank(1, jax.random.key(2), (4, 6, 5), ((-2,), (-3, -1)))
    matrix = np.moveaxis(np.asarray(noise), 1, 0).reshape(6, 20)
    assert np.linalg.matrix_rank(matrix) == 1
    assert low_rank(1, jax.random.key(2), (7,), None).shape == (7,)


def test_linear_fitness_recovers_the_gradient():
    """The direction of -sqrt(n) mean(score E) is that of the gradient of a linear loss."""
    shape, pairs = (4, 5), 20_000
    slope = jax.random.normal(jax.random.key(1), shape)
    keys = jax.random.split(jax.random.key(3), pairs)
    draws = jax.vmap(lambda key: low_rank(1, key, shape, MATRIX))(keys)
    along = jnp.einsum("nio,io->n", draws, slope)
    factors = pair_factors(jnp.stack([along, -along], axis=1), 1.0)
    found = jnp.einsum("n,nio->io", factors, draws)
    cosine = jnp.sum(found * slope) / (jnp.linalg.norm(found) * jnp.linalg.norm(slope))
    # Rank one: the fourth moments triple the variance of independent noise at most.
    assert float(cosine) > 1.0 - 3.0 * slope.size / (2 * pairs)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"population": 5}, r"population=5 must be a multiple of 2 x training.gradients.groups=1"),
        ({"population": 8, "groups": 3}, r"population=8 must be a multiple of 2 x"),
        ({"sigma": 0.0}, r"training.gradients.sigma=0.0 must be above 0"),
        ({"rank": 0}, r"training.gradients.rank=0 must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        EvolutionConfig(**given)


def test_clip_is_refused():
    with pytest.raises(ValueError, match=r"training.clip=1.0 limits .* set training.clip to None"):
        make_train_step(TINY, optax.sgd(0.1), gradients=EvolutionConfig())
