# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Surrogates of random features: the gradient of a quadratic, a model's, and what workers send."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.estimators.surrogate import (
    SurrogateConfig,
    basis,
    difference_rows,
    fit,
    gradient,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models import presets
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.estimators import BackpropConfig
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.jaxmoe.contrib.estimators.test_spsa import DENSE
from tests.support.estimators import estimated, state_of, step_of
from tests.support.meshes import mesh_of
from tests.support.models import TINY
from tests.support.one_step import batch

SIZE, FEATURES = 48, 1024


def cosine(one, other):
    return float(np.vdot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.cache
def cosines(numbers, steps=1):
    """Cosine of the surrogate's gradient of a quadratic to the true one, at one point."""
    rng, length, epsilon = np.random.default_rng(0), 3.0, 0.1
    root = rng.standard_normal((SIZE, SIZE)) / math.sqrt(SIZE)
    square, x = root @ root.T, rng.standard_normal(SIZE)
    vectors, angles = basis(jax.random.key(1), FEATURES, SIZE)
    phases = vectors @ jnp.asarray(x / length, jnp.float32) + angles
    found = []
    for n in numbers:
        weights = jnp.zeros(FEATURES)
        for _ in range(steps):
            u = rng.standard_normal((n, SIZE))
            seen = 2.0 * epsilon * u @ square @ x  # exact for a quadratic
            rows = difference_rows(
                phases, jnp.asarray(u * epsilon / length, jnp.float32) @ vectors.T
            )
            weights = fit(weights, rows, jnp.asarray(seen, jnp.float32), 1e-3)
        found.append(cosine(gradient(vectors, phases, weights), square @ x))
    return found


def test_cosine_to_the_gradient_of_a_quadratic_rises_with_queries():
    found = cosines((1, 4, 12, 24, 48))
    assert (np.diff(found) > 0.0).all() and found[0] < 0.4 and found[-1] > 0.9, found


def test_cosine_rises_with_the_trajectory():
    """The weights of the steps before keep what their queries said."""
    found = [cosines((4,), steps)[0] for steps in (1, 3, 10, 40)]
    assert (np.diff(found) > 0.0).all() and found[-1] > 0.9, found


def test_message_is_the_weights_of_the_features():
    config = SurrogateConfig(features=32, queries=4)
    assert config.init(parameter_table(TINY)).shape == (32,)
    said = config.describe(step_of(TINY))
    assert said.startswith("zeroth order: 2 x 4 passes a step, 128 bytes a worker and step")


def test_large_models_are_refused():
    model = presets.tiny()
    text = "at most 100000 values, and there are .*: train an adapter, such as model.adapter:lora"
    with pytest.raises(ValueError, match=text):
        Step(model=model, optimizer=optax.sgd(1.0), gradients=SurrogateConfig())
    for field in ("features", "queries", "length", "ridge", "epsilon"):
        with pytest.raises(ValueError, match=rf"training.gradients.{field}=0 must be "):
            SurrogateConfig(**{field: 0})


@pytest.mark.slow
def test_gradient_of_a_model_nears_that_of_backpropagation():
    """The cosine is that of n of d directions, seen through M features of uneven sensitivity."""
    model = dataclasses.replace(DENSE, num_layers=1, embed_dim=8, dense_dim=8)
    step, found, numbers = step_of(model), [], (8, 64, 256)
    wanted = flat(estimated(BackpropConfig(), step, state_of(model)).summed.grads)
    for queries in numbers:
        config = SurrogateConfig(features=2048, queries=queries, epsilon=1e-2)
        state = state_of(model, config.init(parameter_table(model)))
        found.append(cosine(flat(estimated(config, step, state).summed.grads), wanted))
    through = math.sqrt(1.0 + 1.5 * wanted.size / 2048)
    expected = [math.sqrt(min(n / wanted.size, 1.0)) / through for n in numbers]
    seen = (found, expected, wanted.size)
    assert (np.diff(found) > 0.0).all() and found[-1] > 0.7 * expected[-1] > 0.2, seen


@pytest.mark.slow
def test_workers_send_their_weights_and_stay_equal():
    config, optimizer = SurrogateConfig(features=100, queries=1), optax.sgd(1e-3)
    table, mesh = parameter_table(DENSE), MeshConfig(replica=2, data=2)
    execution = ExecutionConfig(mesh=mesh, rules="data_parallel")
    step = Step(
        model=DENSE, optimizer=optimizer, execution=execution, table=table, gradients=config
    )
    made = mesh_of(execution)
    state = init_state(
        DENSE,
        optimizer,
        jax.random.key(0),
        execution=execution,
        mesh=made,
        gradients=config,
    )
    with jax.set_mesh(made):
        rows = global_batch(batch(), made)
        compiled = step.jit_step().lower(state, rows).compile()
        text = compiled.as_text()
        state, metrics = compiled(state, rows)
    assert not metrics.is_skipped and np.asarray(state.parts["gradients"]).any()
    sizes = []
    for line in text.splitlines():
        result = re.search(r"= (.*) all-(?:reduce|gather)(?:-start)?\(", line)
        if result and not re.search(r"replica_groups=\{(\{\d+\},?)+\}", line):
            shapes = re.findall(r"f32\[([\d,]*)\]", result[1])
            sizes += [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    assert max(sizes) == config.features, sizes
    for leaf in jax.tree.leaves(state.params):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all(np.array_equal(first, other) for other in others)


def test_missing_weights_are_refused():
    with pytest.raises(ValueError, match=r"state.parts has no gradients, .*:surrogate carries"):
        SurrogateConfig().compute(step_of(DENSE), state_of(DENSE), batch())
