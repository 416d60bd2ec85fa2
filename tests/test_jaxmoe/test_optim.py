# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers against optax's own, parameter by parameter and step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.initialize import parameter_table
from jaxmoe.optim import OPTIMIZERS, AdamWConfig, LinearConfig, adamw
from jaxmoe.parameters import ROLES
from jaxmoe.scaling import standard
from tests.support.tolerances import assert_close

STEPS = 4
MODEL = ModelConfig(
    vocab_size=8,
    num_layers=2,
    embed_dim=8,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, is_gated=True),
    moe=MoEConfig(num_experts=2, top_k=1, expert_dim=4, num_shared_experts=1),
    dense_layers=(0,),
    dense_dim=8,
)


def _constant(step):
    return jnp.ones((), jnp.float32)


def _random(shapes, seed: int):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    rng = np.random.default_rng(seed)
    draw = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in leaves]
    return jax.tree.unflatten(tree, draw)


def _train(optimizer, shapes, promotion: str = "strict"):
    """The parameters after every step of a given sequence of gradients."""
    params = _random(shapes, 0)
    with jax.numpy_dtype_promotion(promotion):
        update = jax.jit(optimizer.update)
        state, path = optimizer.init(params), []
        for step in range(1, STEPS + 1):
            updates, state = update(_random(shapes, step), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            path.append(params)
    return path


SHAPES = {"matrix": (4, 6), "stack": (2, 4, 6), "gain": (6,)}


@pytest.mark.parametrize("rate", [0.1, lambda count: 0.1 / (count + 1)])
def test_adamw_equals_optax(rate):
    ours = adamw(rate, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    mask = {"matrix": True, "stack": True, "gain": False}
    theirs = optax.adamw(rate, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3, mask=mask)
    assert_close(_train(ours, SHAPES), _train(theirs, SHAPES, "standard"), kind="elementwise")


def test_adamw_takes_a_tree_of_matrix_axes():
    axes = {"matrix": None, "stack": (-3, -1), "gain": None}
    ours = adamw(0.1, matrix_axes=axes, weight_decay=0.3)
    mask = {"matrix": False, "stack": True, "gain": False}
    theirs = optax.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.3, mask=mask)
    assert_close(_train(ours, SHAPES), _train(theirs, SHAPES, "standard"), kind="elementwise")


@pytest.mark.parametrize("name", ["adamw", "config"])
def test_moments_are_f32_whatever_the_parameters(name):
    table = parameter_table(MODEL)
    optimizer = adamw(0.1) if name == "adamw" else AdamWConfig().build(table, _constant)
    params = table.tree(lambda row: jnp.zeros(row.shape, jnp.bfloat16))
    state = optimizer.init(params)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    floats = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(floats) == 2 * len(table) and {m.dtype for m in floats} == {jnp.dtype("float32")}


# One case per optimiser: (a config, the optax optimiser of one parameter).
CASES = {
    "adamw": (
        AdamWConfig(learning_rate=0.05, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3),
        lambda rate, decay: optax.adamw(rate, b1=0.8, b2=0.9, eps=1e-3, weight_decay=decay),
    )
}


def test_every_optimizer_has_a_case():
    assert set(CASES) == set(OPTIMIZERS)
    assert all(type(config) is OPTIMIZERS[name] for name, (config, _) in CASES.items())


def _with_multipliers(**changes):
    """Every role with other multipliers."""
    rules = standard(MODEL)
    roles = tuple(
        (
            role,
            dataclasses.replace(
                rules.of(role),
                learning_rate_multiplier=1.0 + i / 4,
                weight_decay_multiplier=(i % 3) / 2,
                **changes,
            ),
        )
        for i, role in enumerate(ROLES)
    )
    return dataclasses.replace(rules, roles=roles)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_equals_optax_by_role(name, is_scaled):
    """Each parameter alone in an optimiser of optax, with its own rate and decay."""
    config, make = CASES[name]
    table = parameter_table(MODEL, _with_multipliers() if is_scaled else None)
    schedule = LinearConfig(warmup_steps=2).build(10)
    path = _train(config.build(table, schedule), table.tree(lambda row: row.shape))

    def rate_of(row):
        return lambda count: (
            config.learning_rate * row.hyper.learning_rate_multiplier * schedule(count)
        )

    optimizers = {
        row.path: make(rate_of(row), config.weight_decay * row.hyper.weight_decay_multiplier)
        for row in table
    }
    labels = table.tree(lambda row: row.path)
    theirs = optax.multi_transform(optimizers, labels)
    wanted = _train(theirs, table.tree(lambda row: row.shape), "standard")
    assert_close(path, wanted, kind="elementwise")


def test_weight_decay_spares_gains_and_embeddings():
    table = parameter_table(MODEL)
    optimizer = AdamWConfig(learning_rate=0.5, weight_decay=0.1).build(table, _constant)
    params = table.tree(lambda row: jnp.ones(row.shape, jnp.float32))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    moved = table.tree(lambda row: row.declaration.role not in ("norm", "embedding"))
    assert len(set(jax.tree.leaves(moved))) == 2
    jax.tree.map(
        lambda update, is_moved: assert_close(
            update, np.full(update.shape, -0.05 * is_moved), kind="elementwise"
        ),
        updates,
        moved,
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("learning_rate", 0.0, "optimizer.learning_rate=0.0 must be above 0"),
        ("learning_rate", float("nan"), "optimizer.learning_rate=nan must be above 0"),
        ("beta1", 1.0, "optimizer.beta1=1.0 must lie in [0, 1)"),
        ("beta2", -0.1, "optimizer.beta2=-0.1 must lie in [0, 1)"),
        ("epsilon", 0.0, "optimizer.epsilon=0.0 must be above 0"),
        ("weight_decay", -1.0, "optimizer.weight_decay=-1.0 must be 0 or more"),
    ],
)
def test_bad_fields_are_refused(field, value, text):
    with pytest.raises(ValueError) as error:
        AdamWConfig(**{field: value})
    assert str(error.value) == text


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"beta1=1.0 must lie in \[0, 1\)"):
        adamw(0.1, beta1=1.0)
    with pytest.raises(ValueError, match=r"weight_decay=-1.0 must be 0 or more"):
        adamw(0.1, weight_decay=-1.0)


def test_an_unknown_group_is_refused():
    table = parameter_table(MODEL, _with_multipliers(group="muon"))
    with pytest.raises(ValueError) as error:
        AdamWConfig().build(table, _constant)
    assert str(error.value) == "the optimizer 'adamw' has no group muon"
