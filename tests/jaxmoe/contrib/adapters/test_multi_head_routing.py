# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head routing against PEFT's Poly, against one LoRA, and its draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.adapters import MultiHeadRoutingConfig
from jaxmoe.contrib.adapters.mixtures import Gates
from jaxmoe.contrib.adapters.multi_head_routing import task_weights
from jaxmoe.scaling.initialize import parameter_table
from sharding.products.low_rank import LowRank
from tests.support.models import WIDE

TASKS, COUNT, RANK, INPUTS, OUTPUTS = 3, 4, 2, 8, 12


def drawn(*shape, number=0):
    return jax.random.normal(jax.random.key(number), shape)


def addition(logits, tasks, x, down, up):
    """The addition of the rows' tasks, without draws."""
    rows = jnp.zeros(x.shape[:2], jnp.int32)
    values = task_weights(logits[tasks], rows, None)
    gates = Gates(values=values, is_paired=False)
    zeros = jnp.zeros((INPUTS, OUTPUTS))
    matrix = LowRank(weight=zeros, down=down, up=up, scale=jnp.float32(1 / RANK), mix=gates)
    return matrix.mixed_by(gates).additions(jnp.zeros((*x.shape[:2], OUTPUTS)), x)


@pytest.mark.parametrize("splits", [1, 4])
def test_weights_and_additions_equal_those_of_peft(splits):
    torch, poly = (
        pytest.importorskip("torch", reason="torch is not installed"),
        pytest.importorskip("peft.tuners.poly.layer", reason="peft is not installed"),
    )
    config = pytest.importorskip("peft", reason="peft is not installed").PolyConfig(
        r=RANK, n_tasks=TASKS, n_skills=COUNT, n_splits=splits, init_weights=False
    )
    layer = poly.Linear(torch.nn.Linear(INPUTS, OUTPUTS, bias=False), "one", config).eval()
    logits, x = drawn(TASKS, splits, COUNT), drawn(2, 5, INPUTS, number=1)
    tasks = jnp.array([2, 0], jnp.int32)
    with torch.no_grad():
        layer.poly_router["one"].module_logits.copy_(torch.tensor(np.array(logits.reshape(3, -1))))
        given = {"task_ids": torch.tensor(np.array(tasks)).long()}
        rows = torch.tensor(np.array(x))
        wanted = (layer(rows, **given) - layer.base_layer(rows)).numpy()
        first, last = (one["one"].numpy() for one in (layer.poly_lora_A, layer.poly_lora_B))
    down = first.transpose(0, 2, 1, 3).reshape(INPUTS, COUNT, RANK)
    up = last.transpose(1, 2, 0, 3).reshape(COUNT, RANK, OUTPUTS)
    ids = jnp.repeat(tasks[:, None], 5, axis=1)
    found = addition(logits, ids, x, jnp.asarray(down), jnp.asarray(up))
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_one_chosen_addition_is_one_lora():
    x, down, up = drawn(1, 5, INPUTS), drawn(INPUTS, COUNT, RANK), drawn(COUNT, RANK, OUTPUTS)
    logits = jnp.full((1, 2, COUNT), -60.0).at[:, :, 2].set(60.0)
    found = addition(logits, jnp.zeros((1, 5), jnp.int32), x, down, up)
    np.testing.assert_allclose(found, x @ down[:, 2] @ up[2] / RANK, atol=2e-5)


def test_equal_logits_are_the_average_of_the_factors():
    x, down, up = drawn(1, 5, INPUTS), drawn(INPUTS, COUNT, RANK), drawn(COUNT, RANK, OUTPUTS)
    found = addition(jnp.zeros((1, 2, COUNT)), jnp.zeros((1, 5), jnp.int32), x, down, up)
    np.testing.assert_allclose(found, x @ down.mean(1) @ up.mean(0) / RANK, atol=2e-5)


def test_draws_are_those_of_a_relaxed_bernoulli_once_for_each_row():
    """As often is one the larger of two as the difference of two logistic draws has it."""
    rows = jnp.repeat(jnp.arange(4000, dtype=jnp.int32)[:, None], 2, axis=1)
    logits = jnp.zeros((4000, 2, 1, 2)).at[..., 0].set(1.0)
    found = np.asarray(task_weights(logits, rows, jax.random.key(0)))
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-5)
    # m_0 > m_1 where the difference of two logistic draws is above -1.
    wanted = np.e * (np.e - 2) / (np.e - 1) ** 2
    assert np.mean(found[:, 0, 0, 0] > 0.5) == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize(
    ("trains", "names"),
    [("all", {"downs", "ups", "logits"}), ("logits", {"logits"}), ("average", {"downs", "ups"})],
)
def test_each_variant_trains_its_parameters(trains, names):
    adapter = MultiHeadRoutingConfig(trains=trains)
    table = parameter_table(dataclasses.replace(WIDE, num_layers=1, adapter=adapter))
    assert {row.path.rpartition(":")[2] for row in table.trained_rows} == names
    assert all(
        row.hyper.learning_rate_multiplier == 100.0
        for row in table.trained_rows
        if row.path.endswith(":logits")
    )
