# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA-Mixer: its losses by hand, its router's gradient, and its gates at inference."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import LoraMixerConfig
from jaxmoe.contrib.adapters.lora_mixer import largest
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.view import HalfInputs
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.state import state_around
from jaxmoe.training.step import make_train_step
from tests.support.models import WIDE
from tests.support.one_step import batch

CONFIG = LoraMixerConfig(members=4, rank=2, anchor=0.1)


def gates_of(config, *, train):
    given = HalfInputs(
        x=jax.random.normal(jax.random.key(0), (2, 3, 8)),
        token_mask=jnp.ones((2, 3), bool),
        context={},
        key=None,
    )
    own = {"gates": jax.random.normal(jax.random.key(1), (8, config.members))}
    return config.mix(own, given, ExecutionConfig().placement, train=train)


def test_all_additions_at_inference_are_the_soft_mixture():
    soft, losses = gates_of(CONFIG, train=True)
    every, none = gates_of(dataclasses.replace(CONFIG, top_k=4), train=False)
    np.testing.assert_allclose(every.values, soft.values, rtol=1e-6)
    assert set(losses) == {"adapter_balance", "adapter_entropy"} and none == {}


def test_the_largest_gates_stay_and_sum_to_one():
    found = largest(jnp.array([[[0.1, 0.5, 0.1, 0.3]]]), 2)
    np.testing.assert_allclose(found, [[[0.0, 0.625, 0.0, 0.375]]], rtol=1e-6)


@pytest.mark.parametrize("sign", ["sharpen", "flatten"])
def test_losses_of_uniform_gates_are_those_of_the_equations(sign):
    config = dataclasses.replace(CONFIG, balance=0.5, entropy=2.0, entropy_sign=sign)
    gates, mask = jnp.full((2, 3, 4), 0.25), jnp.ones((2, 3), bool).at[0, 1].set(False)
    found = config.losses_of(gates, mask)
    assert float(found["adapter_balance"]) == pytest.approx(0.5)
    wanted = 2.0 * math.log(4) * (1 if sign == "sharpen" else -1)
    assert float(found["adapter_entropy"]) == pytest.approx(wanted)


def test_a_step_trains_router_and_factors_and_leaves_the_base():
    model = dataclasses.replace(WIDE, num_layers=1, adapter=CONFIG)
    params = init_params(model, jax.random.key(0))
    flat = traverse_util.flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith(":downs")]:
        np.testing.assert_array_equal(flat[path], flat[path.replace(":downs", ":start")])
        ups = path.replace(":downs", ":ups")
        flat[ups] = 0.3 * jax.random.normal(jax.random.key(len(ups)), flat[ups].shape)
    params, before = traverse_util.unflatten_dict(flat, sep="/"), jax.tree.map(np.asarray, flat)
    optimizer = adamw(1e-2)
    state = state_around(model, optimizer, ExecutionConfig(), params, jax.random.key(0))
    squares = sum(float(np.sum(before[path] ** 2)) for path in before if path.endswith(":ups"))
    state, metrics = make_train_step(model, optimizer)(state, batch())
    assert float(metrics.losses["adapter_anchor"]) == pytest.approx(0.1 * squares, rel=1e-5)
    assert float(metrics.losses["adapter_balance"]) > 0.0
    for path, value in traverse_util.flatten_dict(state.params, sep="/").items():
        is_trained = path.endswith((":downs", ":ups", ":gates"))
        assert np.array_equal(before[path], value) != is_trained, path
