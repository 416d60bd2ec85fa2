# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers against optax's own, parameter by parameter and step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxmoe.declarations import ROLES
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import (
    OPTIMIZERS,
    AdamWConfig,
    LinearConfig,
    MuonConfig,
    MuonHConfig,
    SGDConfig,
    adamh,
    adamw,
    muon,
    muonh,
)
from jaxmoe.routing import METHODS
from jaxmoe.scaling import standard
from jaxmoe.scaling.initialize import parameter_table
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


@pytest.mark.parametrize("optimizer", [muon, muonh, adamh, adamw])
def test_hyperparameters_may_be_injected_and_changed(optimizer):
    """By `optax.inject_hyperparams`, in a jitted step too."""
    shapes = {"matrix": (4, 6), "stack": (2, 4, 6)}
    given = {"weight_decay": 0.3, "epsilon": 1e-3}
    injected = optax.inject_hyperparams(optimizer)(learning_rate=0.1, **given)
    path = _train(injected, shapes, "standard")
    assert_close(path, _train(optimizer(0.1, **given), shapes), kind="elementwise")
    params, gradients = _random(shapes, 0), _random(shapes, 1)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(injected.init)(params)
        for rate in (0.1, 0.2):
            state.hyperparams["learning_rate"] = jnp.float32(rate)
            updates, _ = jax.jit(injected.update)(gradients, state, params)
            alone = optimizer(rate, **given)
            wanted, _ = alone.update(gradients, alone.init(params), params)
            assert_close(updates, wanted, kind="elementwise")


def test_sgd_equals_optax():
    ours = SGDConfig(learning_rate=0.1).build(parameter_table(MODEL), _constant)
    shapes = parameter_table(MODEL).tree(lambda row: row.shape)
    assert_close(_train(ours, shapes), _train(optax.sgd(0.1), shapes), kind="elementwise")
    assert not any(leaf.ndim for leaf in jax.tree.leaves(ours.init(_random(shapes, 0))))


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


MATRICES = {"embedding": "adamw", "norm": "adamw"}
"""Groups of the roles whose group is neither the optimiser's first nor that of its head."""


def _by_role(first: str = "adamw", head: str = "adamw", *, is_scaled=False, **changes):
    """The standard parameterisation in other groups, and with every role's multipliers its own."""
    rules = standard(MODEL)

    def rule(i, role):
        own = {
            "learning_rate_multiplier": 1.0 + i / 4,
            "weight_decay_multiplier": (i % 3) / 2,
            "epsilon_multiplier": 1.0 + i % 2,
            "has_independent_decay": i % 4 == 1,
        }
        group = {**MATRICES, "head": head}.get(role, first)
        given = (own if is_scaled else {}) | {"group": group} | changes
        return dataclasses.replace(rules.of(role), **given)

    roles = tuple((role, rule(i, role)) for i, role in enumerate(ROLES))
    return dataclasses.replace(rules, roles=roles)


def _adamw(row, rate, decay, epsilon):
    return optax.adamw(rate, b1=0.8, b2=0.9, eps=epsilon, weight_decay=decay)


def _optax_muon(row, rate, decay, epsilon):
    if row.hyper.group == "adamw":
        decay *= 2.0 if row.hyper.has_independent_decay else 1.0
        return _adamw(row, lambda count: 0.5 * rate(count), decay, epsilon)
    inputs, outputs = (
        tuple(len(row.shape) + dim for dim in side) for side in row.declaration.matrix
    )
    numbers = optax.contrib.MuonDimensionNumbers(inputs, outputs)
    return optax.contrib.muon(
        rate,
        beta=0.7,
        ns_coeffs="dion",
        eps=1e-3,
        weight_decay=decay,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: numbers, params),
    )


def _alone_on_its_sphere(row, rate, decay, epsilon):
    """Ours; test_hypersphere.py has them against the oracle."""
    axes = row.declaration.matrix
    match row.hyper.group:
        case "muonh":
            return muonh(
                rate, matrix_axes=axes, momentum=0.7, sphere="stack", epsilon=1e-3,
                weight_decay=decay,
            )  # fmt: skip
        case "adamh":
            return adamh(
                rate, matrix_axes=axes, beta1=0.8, beta2=0.9, epsilon=epsilon, sphere="stack",
                weight_decay=decay,
            )  # fmt: skip
    return _adamw(row, rate, decay, epsilon)


FIELDS = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.3}

# One case per optimiser: a config, the groups of matrices and head, and the optimiser of one
# parameter alone. The latter's decay is its multiple of the learning rate.
CASES = {
    "adamw": (AdamWConfig(**FIELDS), ("adamw", "adamw"), _adamw),
    "muon": (
        MuonConfig(**FIELDS, adamw_ratio=0.5, momentum=0.7, form="ema", scale="clip_norm"),
        ("muon", "adamw"),
        _optax_muon,
    ),
    "muonh": (
        MuonHConfig(**FIELDS, momentum=0.7, sphere="stack"),
        ("muonh", "adamh"),
        _alone_on_its_sphere,
    ),
    # Before its first factors; what follows is in test_mkor.py.
    "mkor": (OPTIMIZERS["mkor"](**FIELDS), ("adamw", "adamw"), _adamw),
    "sgd": (
        SGDConfig(learning_rate=0.05, momentum=0.7, weight_decay=0.3),
        ("muonh", "adamh"),
        lambda row, rate, decay, epsilon: optax.chain(
            optax.trace(0.7), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
        ),
    ),
}


def test_every_optimizer_has_a_case():
    assert set(CASES) == set(OPTIMIZERS)
    assert all(type(config) is OPTIMIZERS[name] for name, (config, *_) in CASES.items())


@pytest.mark.parametrize(
    ("name", "is_scaled"),
    # mkor's updates take statistics of the step: test_mkor.py.
    [("adamw", False), *((name, True) for name in CASES if name != "mkor")],
)
def test_equals_the_optimizer_of_each_parameter(name, is_scaled):
    """Each parameter alone in an optimiser of optax, with its own rate, decay and epsilon."""
    config, groups, make = CASES[name]
    table = parameter_table(MODEL, _by_role(*groups, is_scaled=is_scaled))
    schedule = LinearConfig(warmup_steps=2).build(10)
    path = _train(config.build(table, schedule), table.tree(lambda row: row.shape))

    def alone(row):
        hyper = row.hyper
        peak = config.learning_rate * hyper.learning_rate_multiplier
        decay = config.weight_decay * hyper.weight_decay_multiplier
        decay = decay / peak if hyper.has_independent_decay else decay
        epsilon = getattr(config, "epsilon", 0.0) * hyper.epsilon_multiplier
        return make(row, lambda count: peak * schedule(count), decay, epsilon)

    labels = table.tree(lambda row: row.path)
    theirs = optax.multi_transform({row.path: alone(row) for row in table}, labels)
    wanted = _train(theirs, table.tree(lambda row: row.shape), "standard")
    assert_close(path, wanted, kind="elementwise" if name == "adamw" else "matmul")


@pytest.mark.parametrize("name", ["adamw", "muonh"])
def test_the_rate_may_be_an_argument_of_the_compiled_step(name):
    config, groups, _ = CASES[name]
    table = parameter_table(MODEL, _by_role(*groups, is_scaled=True))
    schedule = LinearConfig().build(10)
    params = _random(table.tree(lambda row: row.shape), 0)
    grads = _random(table.tree(lambda row: row.shape), 1)

    @jax.jit
    def step(rate):
        optimizer = config.build(table, schedule, learning_rate=rate)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    fixed = dataclasses.replace(config, learning_rate=0.2).build(table, schedule)
    wanted, _ = jax.jit(fixed.update)(grads, fixed.init(params), params)
    assert_close(step(jnp.float32(0.2)), wanted, kind="elementwise")


def test_an_independent_decay_does_not_follow_the_learning_rate():
    table = parameter_table(MODEL, _by_role("muon", has_independent_decay=True))
    schedule = LinearConfig(floor=0.0).build(4)
    params = table.tree(lambda row: jnp.ones(row.shape, jnp.float32))
    zeros = jax.tree.map(jnp.zeros_like, params)
    config = MuonConfig(weight_decay=0.2, adamw_ratio=0.5)

    @jax.jit
    def second_step(rate):
        optimizer = config.build(table, schedule, learning_rate=rate)
        _, state = optimizer.update(zeros, optimizer.init(params), params)
        return optimizer.update(zeros, state, params)[0]

    for rate in (0.1, 3.0):
        updates = jax.tree.leaves(second_step(jnp.float32(rate)))
        for row, update in zip(table, updates, strict=True):
            wanted = -0.2 * 0.75 * row.hyper.weight_decay_multiplier
            assert_close(update, np.full(row.shape, wanted), kind="elementwise")


def test_weight_decay_excludes_gains_and_embeddings():
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
        ("learning_rate", 0.0, "optimizer.learning_rate=0.0 must be above 0, and finite"),
        ("learning_rate", float("nan"), "optimizer.learning_rate=nan must be above 0, and finite"),
        ("beta1", 1.0, "optimizer.beta1=1.0 must lie in [0, 1)"),
        ("beta2", -0.1, "optimizer.beta2=-0.1 must lie in [0, 1)"),
        ("epsilon", 0.0, "optimizer.epsilon=0.0 must be above 0, and finite"),
        ("weight_decay", -1.0, "optimizer.weight_decay=-1.0 must be 0 or more, and finite"),
    ],
)
def test_bad_fields_are_refused(field, value, text):
    with pytest.raises(ValueError) as error:
        AdamWConfig(**{field: value})
    assert str(error.value) == text


@pytest.mark.parametrize("config", [MuonConfig, MuonHConfig])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("learning_rate", 0.0, "optimizer.learning_rate=0.0 must be above 0, and finite"),
        ("adamw_ratio", 0.0, "optimizer.adamw_ratio=0.0 must be above 0, and finite"),
        ("momentum", 1.0, "optimizer.momentum=1.0 must lie in [0, 1)"),
        ("beta2", 1.0, "optimizer.beta2=1.0 must lie in [0, 1)"),
        ("weight_decay", -1.0, "optimizer.weight_decay=-1.0 must be 0 or more, and finite"),
    ],
)
def test_bad_fields_of_matrix_optimizers_are_refused(config, field, value, text):
    with pytest.raises(ValueError) as error:
        config(**{field: value})
    assert str(error.value) == text


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"beta1=1.0 must lie in \[0, 1\)"):
        adamw(0.1, beta1=1.0)
    with pytest.raises(ValueError, match=r"weight_decay=-1.0 must be 0 or more"):
        adamw(0.1, weight_decay=-1.0)


def _refusal(config, **groups) -> str:
    table = parameter_table(MODEL, _by_role(**groups))
    with pytest.raises(ValueError) as error:
        config.build(table, _constant)
    return str(error.value)


def _choices(*names: str) -> str:
    return " or ".join(f"parameterization:{name}" for name in names)


@pytest.mark.parametrize(
    ("config", "group", "home", "others"),
    [
        (AdamWConfig(), "muon", "muon", _choices("standard")),
        (AdamWConfig(), "adamh", "muonh", _choices("standard")),
        (MuonConfig(), "muonh", "muonh", _choices("mup_muon", "mup_plus_plus_muon")),
        (MuonHConfig(), "muon", "muon", _choices("hyperp", "muonh_vanilla")),
    ],
)
def test_an_unknown_group_is_refused(config, group, home, others):
    assert _refusal(config, first=group) == (
        f"the optimizer {config.name!r} has no group {group}, where the parameterization puts"
        f" dense_blocks_0/attention/gate: choose optimizer:{home}, or {others}"
    )


@pytest.mark.parametrize(
    ("config", "others"),
    [
        (MuonConfig(), "parameterization:mup_muon or parameterization:mup_plus_plus_muon"),
        (MuonHConfig(), "parameterization:hyperp or parameterization:muonh_vanilla"),
    ],
)
def test_an_optimizer_without_its_matrices_is_refused(config, others):
    name = config.name
    assert _refusal(config) == (
        f"the optimizer {name!r} is for parameters of the group {name}, and the parameterization"
        f" puts none there: choose {others}, or optimizer:adamw"
    )


@pytest.mark.parametrize(("config", "group"), [(MuonConfig(), "muon"), (MuonHConfig(), "muonh")])
def test_a_vector_in_a_group_of_matrices_is_refused(config, group):
    assert _refusal(config, group=group) == (
        f"dense_blocks_0/attention/k_norm is a vector, and the group {group} is for matrices: the"
        " parameterization must put the role 'norm' into adamw"
    )


def test_a_sphere_of_radius_zero_is_refused_at_construction():
    model = dataclasses.replace(
        MODEL, moe=dataclasses.replace(MODEL.moe, router=METHODS["noisy_topk"].parts()["router"])
    )
    table = parameter_table(model, _by_role("muonh", "adamh"))
    with pytest.raises(ValueError) as error:
        MuonHConfig().build(table, _constant)
    assert str(error.value) == (
        "moe_blocks_1/moe/router/noise starts at zero, and muonh keeps the norm that a matrix"
        " begins with, so it would stay zero: the parameterization must put the role"
        " 'router_noise' into adamw, or start it elsewhere"
    )
    text = "head/weight starts at zero, and adamh keeps the norm that a matrix begins with"
    rules = _by_role("muonh", "adamh")
    roles = tuple(
        (role, dataclasses.replace(hyper, init_std=0.0) if role == "head" else hyper)
        for role, hyper in rules.roles
    )
    table = parameter_table(MODEL, dataclasses.replace(rules, roles=roles))
    with pytest.raises(ValueError, match=f"^{text}"):
        MuonHConfig().build(table, _constant)
