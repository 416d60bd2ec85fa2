# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The transformations on trees of other projects: matrices beside vectors, within optax and NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from jaxmoe.optim import adamh, adamw, muon, muonh
from tests.support.tolerances import assert_close

SHAPES = {
    "embedding": (11, 6),
    "layer": {"kernel": (6, 4), "bias": (4,)},
    "experts": (3, 6, 4),
    "temperature": (),
}
AXES = {
    "embedding": None,
    "layer": {"kernel": (-2, -1), "bias": None},
    "experts": (-2, -1),
    "temperature": None,
}
BY_NAME = {"muon": muon, "muonh": muonh, "adamh": adamh}
every_optimizer = pytest.mark.parametrize("name", BY_NAME)


def random(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def train(optimizer, steps=4, promotion="strict"):
    params = random(0)
    with jax.numpy_dtype_promotion(promotion):
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(1, steps + 1):
            updates, state = update(random(step), state, params)
            params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("has_experts", [False, True])
def test_muon_separates_as_optax_does(has_experts):
    """One rate for all, AdamW for what has not two dimensions; with experts by an argument."""
    numbers = optax.contrib.MuonDimensionNumbers
    dims = {
        "embedding": numbers(),
        "layer": {"kernel": numbers(), "bias": None},
        "experts": numbers(1, 2),
        "temperature": None,
    }
    theirs = optax.contrib.muon(
        0.1,
        nesterov=False,
        ns_coeffs="dion",
        weight_decay=0.2,
        adam_b2=0.95,
        adam_weight_decay=0.0,
        muon_weight_dimension_numbers=dims if has_experts else None,
    )
    ours = muon(
        0.1,
        matrix_axes=(-2, -1) if has_experts else None,
        nesterov=False,
        form="ema",
        scale="clip_norm",
        weight_decay=0.2,
        other_optimizer=None if has_experts else adamw(0.1),
    )
    assert_close(train(ours), train(theirs, promotion="standard"), "matmul")


@every_optimizer
def test_what_has_no_pair_goes_to_the_other_optimiser(name):
    """As by `optax.partition` with labels of one's own."""
    make = BY_NAME[name]
    others = adamw(0.3, beta1=0.8)
    labels = {
        "embedding": "others",
        "layer": {"kernel": "matrices", "bias": "others"},
        "experts": "matrices",
        "temperature": "others",
    }
    wanted = optax.partition(
        {"matrices": make(0.1, matrix_axes=(-2, -1)), "others": others}, labels
    )
    assert_close(
        train(make(0.1, matrix_axes=AXES, other_optimizer=others)), train(wanted), "elementwise"
    )


@every_optimizer
def test_rates_are_injected_chained_and_accumulated(name):
    """A rate of the state is read by both parts; two gradients make one step."""
    make = BY_NAME[name]
    injected = optax.inject_hyperparams(make)(learning_rate=0.1)
    state: Any = injected.init(random(0))
    state.hyperparams["learning_rate"] = jnp.float32(0.02)
    updates, _ = jax.jit(injected.update)(random(1), state, random(0))
    plain = make(0.02)
    wanted, _ = jax.jit(plain.update)(random(1), plain.init(random(0)), random(0))
    assert_close(updates, wanted, "elementwise")
    chain = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), make(0.02)), 2)
    params = train(chain.gradient_transformation(), steps=2, promotion="standard")
    mean = jax.tree.map(lambda a, b: (a + b) / 2, random(1), random(2))
    clipped, _ = optax.clip_by_global_norm(1.0).update(mean, optax.EmptyState())
    updates, _ = plain.update(clipped, plain.init(random(0)), random(0))
    assert_close(params, optax.apply_updates(random(0), updates), "matmul")


@every_optimizer
def test_none_in_place_of_a_parameter_stays_none(name):
    """As in the arrays of an Equinox module without biases."""
    params = {"weight": jnp.asarray(random(0)["embedding"]), "bias": None, "gain": jnp.ones(4)}
    axes = jax.tree.map(lambda leaf: (-2, -1) if leaf.ndim == 2 else None, params)
    whole = BY_NAME[name](0.1)
    wanted, _ = whole.update(params, whole.init(params), params)
    for tree in (axes, {**axes, "bias": (-2, -1)}):
        optimizer = BY_NAME[name](0.1, matrix_axes=tree)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates["bias"] is None
        assert_close(updates, wanted, "elementwise")


@every_optimizer
def test_a_tuple_of_pairs_is_a_tree_where_the_parameters_are_one(name):
    """At the root and below it; elsewhere two tuples of dimensions are one pair."""
    first = jnp.asarray(random(0)["experts"])
    second = jnp.asarray(random(1)["experts"])
    by_name = {"first": first, "second": second}
    alone = BY_NAME[name](0.1, matrix_axes={"first": (-1, -2), "second": (-2, -1)})
    wanted, _ = alone.update(by_name, alone.init(by_name), by_name)
    pairs = ((-1, -2), (-2, -1))
    for params, axes in (((first, second), pairs), ([(first, second)], [pairs])):
        optimizer = BY_NAME[name](0.1, matrix_axes=axes)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert_close(jax.tree.leaves(updates), jax.tree.leaves(wanted), "elementwise")
    params = (first, second)
    for axes in ((-2, -1), ((-3,), (-2, -1))):
        one, both = (BY_NAME[name](0.1, matrix_axes=tree) for tree in (axes, (axes, axes)))
        assert_close(
            one.update(params, one.init(params), params)[0],
            both.update(params, both.init(params), params)[0],
            "elementwise",
        )


def test_adamw_reads_a_tuple_of_pairs_as_a_tree():
    params = (jnp.ones((2, 3)), jnp.ones((2, 3)))
    optimizer = adamw(0.1, matrix_axes=((-2, -1), None), weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert_close(updates, (jnp.full((2, 3), -0.05), zeros[1]), "elementwise")


@pytest.mark.parametrize("make", [adamw, muon])
def test_only_weight_decay_reads_parameters(make):
    params = random(0)
    plain = make(0.1)
    state = plain.init(params)
    wanted, _ = plain.update(random(1), state, params)
    updates, _ = plain.update(random(1), state)
    assert_close(updates, wanted, "elementwise")
    decayed = make(0.1, weight_decay=0.1)
    with pytest.raises(ValueError) as error:
        decayed.update(random(1), decayed.init(params))
    assert str(error.value) == ("weight decay reads parameters: call update(grads, state, params)")


@pytest.mark.parametrize("name", ["muonh", "adamh"])
def test_spheres_read_parameters(name):
    params = random(0)
    optimizer = BY_NAME[name](0.1)
    with pytest.raises(ValueError, match=r"on spheres: call update\(grads, state, params\)"):
        optimizer.update(random(1), optimizer.init(params))


@every_optimizer
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 4, 4)])
def test_a_matrix_without_elements_gets_an_update_without_elements(name, shape):
    params = {"empty": jnp.zeros(shape), "w": jnp.asarray(random(0)["embedding"])}
    for scale in ({"scale": scale} for scale in ("spectral_norm", "rms_norm", "clip_norm")):
        options = scale if name == "muon" else {}
        optimizer = BY_NAME[name](0.1, matrix_axes=(-2, -1), **options)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates["empty"].shape == shape and np.isfinite(updates["w"]).all()


@every_optimizer
def test_a_model_of_nnx_trains(name):
    """Kernels and biases of two layers; the same numbers as the tree of arrays."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(6, 8, rngs=rngs)
            self.outer = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.outer(nnx.relu(self.inner(x)))

    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 6)), jnp.float32)

    def loss(model):
        return jnp.mean((model(x) - x[:, :2]) ** 2)

    model = Model(nnx.Rngs(0))
    transformation = BY_NAME[name](0.05)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value, grads

    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    first, grads = step(model, optimizer)
    pure = nnx.to_pure_dict(grads)
    updates, _ = transformation.update(pure, transformation.init(before), before)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert_close(after, optax.apply_updates(before, updates), "matmul")
    for _ in range(20):
        last, _ = step(model, optimizer)
    assert last < 0.7 * first
