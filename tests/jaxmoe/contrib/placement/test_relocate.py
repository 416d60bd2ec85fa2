# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A placement renumbers experts and changes nothing else: outputs bit for bit where no sum runs
over all experts, a training step, moments, spheres, router state, and back again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.placement.relocate import relocate, relocate_params, relocate_router_state
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward, initial_router_state
from jaxmoe.optim import adamw, muonh
from jaxmoe.routing import METHODS, GroupLimitConfig, SoftmaxTopKConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding.expert_parallel.placement import ExpertPlacement
from tests.support.models import FULL, TINY
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

EXPERTS, DEVICES = 8, 4

EXACT = (
    "mixtral",
    "hyperp",
    "gshard",
    "deepseek_v3",
    "deepseek_v4",
    "loss_free",
    "loss_free_rms",
    "quantile",
    "base",
    "selective_sinkhorn",
)
"""Gates of the chosen scores alone: logits are equal bit for bit."""
NAMED = ("hash", "random", "forced_balance")
"""Experts by number: refused."""
ROUNDED = tuple(name for name in METHODS if name not in EXACT + NAMED)
"""A sum over all experts, whose order changes."""
IN_SHORT = ("moe_plus_plus",)
"""Bit for bit with a group limit: `test_a_group_limit_moves_as_a_whole_or_not_at_all`."""


@functools.cache
def model_of(name, base=TINY):
    parts = METHODS[name].parts()
    if name == "sigma":
        parts["top_k"] = 2
    moe = dataclasses.replace(base.moe, num_experts=EXPERTS, **parts)
    attention = dataclasses.replace(base.attention, is_causal=parts["router"].traits.is_causal)
    return dataclasses.replace(base, moe=moe, attention=attention)


@functools.cache
def placement_of(model):
    even = np.tile(np.arange(EXPERTS) // (EXPERTS // DEVICES), (model.num_moe_layers, 1))
    return ExpertPlacement(np.random.default_rng(3).permuted(even, axis=1), DEVICES)


def inverse_of(placement):
    """What brings the experts back; with a device for each expert any order is a placement."""
    return ExpertPlacement(placement.order, EXPERTS)


def drawn(model):
    """Parameters and router state without a zero, so that nothing that moves is like another."""
    rng = np.random.default_rng(0)

    def value(row):
        return jnp.asarray(rng.normal(size=row.shape) * max(row.init_std, 0.1), jnp.float32)

    params = parameter_table(model).tree(value)
    state = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.02 * rng.random(leaf.shape), leaf.dtype),
        initial_router_state(model),
    )
    return params, state


def looked_at(model):
    """(params, state) -> logits and counts, compiled once."""
    tokens = jnp.asarray(batch().tokens)
    context = {"mask_ratio": jnp.full(tokens.shape, 0.3)}

    @jax.jit
    def look(params, state):
        output = forward(
            model, ExecutionConfig(), params, tokens, router_state=state, context=context
        )
        return output.logits, output.statistics.counts

    return look


def check_method(name):
    model = model_of(name)
    placement, (params, state) = placement_of(model), drawn(model)
    moved = (
        relocate_params(model, params, placement),
        relocate_router_state(model, state, placement),
    )
    look = looked_at(model)
    (logits, counts), (others, renumbered) = look(params, state), look(*moved)
    expected = np.take_along_axis(np.asarray(counts)[:, :EXPERTS], placement.order, axis=1)
    np.testing.assert_array_equal(np.asarray(renumbered)[:, :EXPERTS], expected)
    np.testing.assert_array_equal(renumbered[:, EXPERTS:], counts[:, EXPERTS:])
    if name in EXACT:
        np.testing.assert_array_equal(others, logits)
    else:
        assert_close(others, logits, "matmul")
    # Not because nothing depends on it: with the router left behind the output is another.
    if "router" in params["moe_blocks_0"]["moe"]:
        wrong = jax.tree.map(lambda leaf: leaf, moved[0])
        wrong["moe_blocks_0"]["moe"]["router"] = params["moe_blocks_0"]["moe"]["router"]
        assert np.abs(look(wrong, state)[0] - logits).max() > 1e-4


@pytest.mark.parametrize("name", IN_SHORT)
def test_outputs_stay(name):
    check_method(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*IN_SHORT, *NAMED)])
def test_outputs_stay_for_every_method(name):
    check_method(name)


def test_every_method_has_its_row():
    assert set(EXACT) | set(ROUNDED) | set(NAMED) == set(METHODS)


@pytest.mark.rows(14)
@pytest.mark.parametrize("name", EXACT + ROUNDED)
def test_there_and_back_bit_for_bit(name):
    """And what moves has moved: every leaf with a dimension of experts, of both trees."""
    model = model_of(name, FULL if name == "hyperp" else TINY)
    placement, trees = placement_of(model), drawn(model)
    there = (
        relocate_params(model, trees[0], placement),
        relocate_router_state(model, trees[1], placement),
    )
    again = (
        relocate_params(model, there[0], inverse_of(placement)),
        relocate_router_state(model, there[1], inverse_of(placement)),
    )
    jax.tree.map(np.testing.assert_array_equal, again, trees)

    def check(path, old, new):
        sizes = {EXPERTS, model.moe.num_routed}
        has_experts = bool(sizes & set(old.shape[1:]))
        assert np.array_equal(old, new) != has_experts, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, trees, there)


OPTIMIZERS = {
    # The root of a tiny second moment would turn rounding into a step.
    "adamw": adamw(1e-2, epsilon=1e-3, weight_decay=0.1),
    "muonh": optax.partition(
        {"muonh": muonh(1e-2, matrix_axes=(-2, -1)), "adamw": adamw(1e-2, epsilon=1e-3)},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "muonh" if "experts" in str(path) else "adamw", params
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.large
def test_training_continues(name):
    """One step before, then relocating and stepping in either order, bit for bit; with moments and
    a sphere. Nothing here sums over all experts: no balancer, no clipping, sigmoid scores."""
    model = model_of("loss_free")
    optimizer, (params, router_state) = OPTIMIZERS[name], drawn(model)
    step = make_train_step(model, optimizer, clip=None)
    rows, placement = batch(), placement_of(model)
    first = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_state=router_state,
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
    second, _ = step(first, rows)
    # A step donates its state.
    moved = jax.tree.map(jnp.copy, relocate(model, second, placement))
    unmoved = jax.tree.map(jnp.copy, dataclasses.replace(moved, opt_state=second.opt_state))
    after, metrics = step(second, rows)
    after_moved, metrics_moved = step(moved, rows)
    expected = relocate(model, after, placement)
    for part in ("params", "opt_state", "router_state"):
        pair = (getattr(after_moved, part), getattr(expected, part))
        jax.tree.map(np.testing.assert_array_equal, *pair)
    np.testing.assert_array_equal(metrics.loss, metrics_moved.loss)
    wrong, _ = step(unmoved, rows)
    experts = ("moe_blocks_0", "moe", "experts", "down")
    right = functools.reduce(dict.__getitem__, experts, expected.params)
    assert np.abs(functools.reduce(dict.__getitem__, experts, wrong.params) - right).max() > 1e-3


@pytest.mark.parametrize("name", NAMED)
def test_experts_by_number_are_refused(name):
    model = model_of(name)
    router = METHODS[name].router.name
    with pytest.raises(ValueError, match=f"the router {router} assigns tokens to expert numbers"):
        relocate_params(model, {}, placement_of(model))


def test_a_group_limit_moves_as_a_whole_or_not_at_all():
    groups = GroupLimitConfig(num_groups=4, top_groups=2)
    router = SoftmaxTopKConfig(softmax="after", groups=groups)
    moe = dataclasses.replace(TINY.moe, num_experts=EXPERTS, router=router)
    model = dataclasses.replace(TINY, moe=moe)
    params, state = drawn(model)
    whole = ExpertPlacement(np.repeat([[2, 0, 3, 1], [1, 3, 0, 2]], 2, axis=1), DEVICES)
    look = looked_at(model)
    logits, _ = look(params, state)
    others, _ = look(relocate_params(model, params, whole), state)
    np.testing.assert_array_equal(others, logits)
    torn = ExpertPlacement(np.array([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 2, 3, 3]]), DEVICES)
    with pytest.raises(ValueError, match="in layer 1 it splits groups of model.moe.router.groups"):
        relocate_params(model, params, torn)


@pytest.mark.parametrize(
    ("model", "placement", "message"),
    [
        (dataclasses.replace(TINY, moe=None), (2, 8, 4), "the model has no MoE layer"),
        (TINY, (2, 8, 4), "it is of 2 MoE layers of 8 experts, and the model has 2 of 4"),
        (TINY, (3, 4, 2), "it is of 3 MoE layers of 4 experts"),
    ],
)
def test_a_placement_of_another_model_is_refused(model, placement, message):
    with pytest.raises(ValueError, match=message):
        relocate_params(model, {}, ExpertPlacement.identity(*placement))
