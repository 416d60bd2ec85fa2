# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Averages of continual training: closed forms, the exponential average of optax, the last step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.contrib.adapters.average import (
    Averaging,
    BalancedAverageConfig,
    FixedAverageConfig,
)
from jaxmoe.declarations import Declaration
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.optim import adamw
from jaxmoe.parameters import Hyperparameters, ParameterSpec, ParameterTable
from jaxmoe.training.parts.average import AVERAGES
from jaxmoe.training.parts.base import run_after
from jaxmoe.training.state import TrainState, init_state
from jaxmoe.training.step import Step, make_train_step
from tests.support.models import TINY
from tests.support.one_step import batch

OPTIMIZER = adamw(1e-2)


def table_of(**shapes):
    """A table of vectors, or of stacked matrices where there are three dimensions."""

    def row(name, shape):
        axes = (
            ("layers", "embed", "mlp")[: len(shape)] if len(shape) == 3 else ("embed",) * len(shape)
        )
        matrix = ((-2,), (-1,)) if len(shape) == 3 else None
        given = Declaration(shape=shape, axes=axes, role="norm", matrix=matrix)
        return ParameterSpec(
            path=name, declaration=given, hyper=Hyperparameters(), spec=PartitionSpec()
        )

    return ParameterTable(tuple(row(name, shapes[name]) for name in sorted(shapes)))


def state_of(params, average):
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=params,
        opt_state=(),
        router_state={},
        rng=jax.random.key(0),
        skipped=zero,
        skipped_in_a_row=zero,
        parts={"average": average},
    )


def followed(averaging, state, table, params, grads, is_good=True):
    step = Step(model=TINY, optimizer=OPTIMIZER, table=table, parts=(averaging,))
    after = dataclasses.replace(state, params=params, step=state.step + 1)
    return run_after(step.parts, step, state, after, grads, jnp.asarray(is_good))


def scalar(value):
    return {"w": jnp.asarray(value, jnp.float32)}


def test_balanced_weight_of_a_scalar_is_the_closed_form():
    table, averaging = table_of(w=()), Averaging(config=BalancedAverageConfig())
    state = state_of(scalar(1.0), averaging.config.begin(scalar(1.0)))
    mean, before = 1.0, 0.0
    for new, slope in ((5.0, 3.0), (9.0, -4.0), (-20.0, 6.0)):
        state = followed(averaging, state, table, scalar(new), scalar(slope))
        weight = 2 * (1 + abs(slope)) / (abs(new - mean) * abs(slope - before))
        assert 0 < weight < 1
        mean, before = (1 - weight) * mean + weight * new, slope
        assert float(state.parts["average"]["params"]["w"]) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("new", "slope", "before"),
    [
        (2.0, 1.0, 1.0),  # infinite: the slope did not change
        (1.0, 1.0, 0.0),  # infinite: nothing moved
        (1.0, 1.0, 1.0),
        (1.5, 1.0, 0.0),  # 8
    ],
)
def test_a_weight_outside_of_0_and_1_is_a_hundredth(new, slope, before):
    (row,) = table_of(w=())
    given = [jnp.asarray(x, jnp.float32) for x in (new - 1.0, slope, before)]
    assert float(BalancedAverageConfig().weight(row, *given)) == pytest.approx(0.01)


def test_each_layer_has_a_weight_of_its_own():
    (row,) = table_of(w=(2, 3, 4))
    far, slope = jnp.ones((2, 3, 4)).at[1].mul(5.0), jnp.ones((2, 3, 4))
    found = BalancedAverageConfig().weight(row, far, slope, jnp.zeros((2, 3, 4)))
    wanted = [2 * 13 / (12 * 12), 2 * 13 / (60 * 12)]
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-6)


def test_a_fixed_weight_is_the_exponential_average_of_optax():
    table, averaging = table_of(w=(3,)), Averaging(config=FixedAverageConfig(new=0.2))
    ema = optax.ema(0.8, debias=False)
    first = {"w": jnp.zeros(3)}
    state, theirs = state_of(first, averaging.config.begin(first)), ema.init(first)
    rng = np.random.default_rng(0)
    for _ in range(4):
        new = {"w": jnp.asarray(rng.standard_normal(3), jnp.float32)}
        state = followed(averaging, state, table, new, new)
        _, theirs = ema.update(new, theirs)
        np.testing.assert_allclose(
            state.parts["average"]["params"]["w"], theirs.ema["w"], rtol=1e-6
        )


def trained(config, steps=3, bad=()):
    parts = () if config is None else (Averaging(config=config, steps=3),)
    state = init_state(TINY, OPTIMIZER, jax.random.key(0), parts=parts)
    step = make_train_step(TINY, OPTIMIZER, parts=parts)
    states = []
    for number in range(steps):
        state, _ = step(state, batch(math.nan if number in bad else 1.0))
        states.append(jax.tree.map(np.asarray, (state.params, state.parts.get("average"))))
    return states


@pytest.mark.slow
def test_the_average_takes_the_place_of_the_parameters_at_the_end():
    plain, states = trained(None), trained(BalancedAverageConfig(), bad=(2,))
    for number in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, states[number][0], plain[number][0])
    params, average = states[2]
    jax.tree.map(np.testing.assert_array_equal, params, average["params"])
    # The third step was refused: nothing else changed.
    jax.tree.map(np.testing.assert_array_equal, average, states[1][1])
    far = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params, states[1][0])
    assert max(jax.tree.leaves(far)) > 1e-4


def test_averages_are_a_registry():
    assert set(AVERAGES) == {"fixed", "balanced"}


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match=r"training.average.new=0 must be above 0"):
        FixedAverageConfig(new=0)
    with pytest.raises(
        ValueError, match="training.average:fixed reads .* execution.offload.optimizer=host"
    ):
        make_train_step(
            TINY,
            OPTIMIZER,
            execution=ExecutionConfig(offload=OffloadConfig()),
            parts=(Averaging(config=FixedAverageConfig()),),
        )
