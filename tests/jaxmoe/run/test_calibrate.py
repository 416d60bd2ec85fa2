# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration: what products see on held-out data, and that planted outliers are found."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recipes.markov import markov
from jaxmoe.data import evaluation_batches
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.quantize import channels_shape
from jaxmoe.run.assemble import assemble
from jaxmoe.run.calibrate import measure_activations
from jaxmoe.run.config import EvaluationConfig, TrainingConfig
from pallas_kernels.quantized_matmul.mixed_array import channel_order
from sharding.products.activations import ObservedArray
from tests.support.tolerances import assert_close

OUTLIERS = (3, 11, 17, 30)


def config():
    model = ModelConfig(
        vocab_size=16,
        num_layers=2,
        embed_dim=32,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
        moe=MoEConfig(num_experts=4, top_k=1, expert_dim=16),
    )
    return dataclasses.replace(
        markov(),
        model=model,
        training=TrainingConfig(steps=30, batch_size=8, sequence_length=16),
        evaluation=EvaluationConfig(batches=3),
    )


@pytest.fixture(scope="module")
def fresh():
    """A run before its first step, with outliers planted in the gains of the second layer."""
    assembly = assemble(config())
    state = assembly.new_state()
    params = jax.tree.map(np.array, jax.device_get(state.params))
    for name, gain in params["moe_blocks_0"].items():
        if "norm" in name:
            (gain,) = jax.tree.leaves(gain)
            gain[1, list(OUTLIERS)] = 40.0
    return assembly, dataclasses.replace(state, params=params)


@pytest.fixture(scope="module")
def measured(fresh):
    return measure_activations(*fresh, 2)


@pytest.mark.slow
def test_planted_outlier_channels_come_first(fresh, measured):
    table = {row.path: channels_shape(row) for row in fresh[0].plan.table}
    wanted = {path: shape for path, shape in table.items() if shape is not None}
    assert {path: largest.shape for path, largest in measured.items()} == wanted
    for path in ("attention/q", "attention/k", "attention/v", "moe/experts/gate_up"):
        order = np.asarray(channel_order(jnp.asarray(measured[f"moe_blocks_0/{path}"])))
        assert order.shape[0] == 2
        assert (np.sort(order[1][..., :4]) == OUTLIERS).all(), path
        assert not (np.sort(order[0][..., :4]) == OUTLIERS).all(), path


@pytest.mark.slow
def test_measurement_is_the_largest_activation(fresh, measured):
    """The first layer's queries read the normed embedding: their largest values are known."""
    assembly, state = fresh
    rows = evaluation_batches(assembly.source, batch_size=8, sequence_length=16, num_batches=5)
    tokens = np.concatenate([batch.tokens for batch in rows])[3 * 8 :]  # evaluation has the first
    table = np.asarray(state.params["embedding"]["weight"], np.float64)[tokens]
    table *= assembly.plan.model.forward_multipliers.embedding
    epsilon = assembly.plan.model.norm_epsilon
    normed = table / np.sqrt(np.mean(table**2, axis=-1, keepdims=True) + epsilon)
    assert_close(
        measured["moe_blocks_0/attention/q"][0], np.abs(normed).max(axis=(0, 1)), kind="elementwise"
    )


@pytest.mark.slow
def test_measurement_is_deterministic(fresh, measured):
    again = measure_activations(*fresh, 2)
    assert all((again[path] == largest).all() for path, largest in measured.items())


def test_products_measure_rows_and_have_no_other_gradient():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 4, 6)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((4, 6, 5)), jnp.float32)

    def loss(largest, x, w):
        weight = ObservedArray(values=w, largest=largest)
        out = weight.multiply(partial(jnp.einsum, "bsnh,nhd->bsd"), x)
        return out.sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.zeros(24), x, w
    )
    assert_close(out, np.einsum("bsnh,nhd->bsd", x, w), kind="matmul")
    assert (grads[0] == np.abs(x).max(axis=(0, 1)).reshape(-1)).all()
    assert (grads[1] == 0.0).all()


def test_groups_measure_their_own_rows():
    rng, sizes = np.random.default_rng(0), np.asarray([3, 0, 2], np.int32)
    rows = rng.standard_normal((7, 4)).astype(np.float32)
    w = jnp.asarray(rng.standard_normal((3, 4, 2, 3)), jnp.float32)
    rows[5:] = np.nan  # past the groups

    def loss(largest):
        weight = ObservedArray(values=w, largest=largest)
        out = weight.multiply_groups(jnp.asarray(rows), jnp.asarray(sizes), implementation=None)
        return out.sum(), out

    found, out = jax.jit(jax.grad(loss, has_aux=True))(jnp.zeros((3, 4)))
    wanted = [np.abs(rows[:3]).max(axis=0), np.zeros(4), np.abs(rows[3:5]).max(axis=0)]
    assert (found == np.stack(wanted)).all()
    matrices = np.asarray(w).reshape(3, 4, 6)
    products = [rows[:3] @ matrices[0], rows[3:5] @ matrices[2], np.zeros((2, 6))]
    assert_close(out, np.concatenate(products), kind="matmul")


@pytest.mark.slow
def test_expert_without_tokens_takes_over_the_others(fresh, measured):
    """Top-1 of four experts, one of them never chosen: its order is not that of zeros."""
    assembly, state = fresh
    params = jax.tree.map(np.array, state.params)
    (router,) = jax.tree.leaves(params["moe_blocks_0"]["moe"]["router"])
    router[...] = 0.0
    state = dataclasses.replace(state, params=params)
    found = measure_activations(assembly, state, 1)["moe_blocks_0/moe/experts/gate_up"]
    assert (found.max(axis=-1) > 0.0).all()


def test_too_few_held_out_batches_are_refused(fresh, monkeypatch):
    assembly, state = fresh
    monkeypatch.setattr(type(assembly.source), "num_rows", lambda self, *_: 8 * 4, raising=False)
    with pytest.raises(ValueError) as error:
        measure_activations(assembly, state, 2)
    assert "mixed.batches=2: outliers are measured on held-out batches that" in str(error.value)
    assert "holds 4 batches, of which evaluation reads the first 3: ask for at most 1 with" in str(
        error.value
    )


@pytest.mark.slow
def test_activations_that_are_not_finite_are_refused(fresh):
    assembly, state = fresh
    params = jax.tree.map(np.array, state.params)
    params["embedding"]["weight"][:, 0] = np.inf
    with pytest.raises(ValueError, match="the activations of .* are not finite on held-out data"):
        measure_activations(assembly, dataclasses.replace(state, params=params), 1)
