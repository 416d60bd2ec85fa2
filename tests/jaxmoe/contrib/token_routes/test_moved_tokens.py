# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative token shuffling in the forward pass: exact, and local where experts are predicted."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.doctor.devices import tiny_config
from jaxmoe import make_train_step
from jaxmoe.contrib.token_routes.token_shuffle import TokenTables
from jaxmoe.contrib.token_routes.token_tables import load_tables, save_tables
from jaxmoe.contrib.token_routes.traced_tables import token_tables
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layout import check_layout
from jaxmoe.models.transformer import Transformer
from jaxmoe.routing import (
    CapacityConfig,
    ExpertChoiceConfig,
    HashConfig,
    LoadBalanceConfig,
    NoisyTopKConfig,
    RouterZConfig,
    SoftmaxGateConfig,
    telemetry,
)
from jaxmoe.routing.telemetry.summary import LOCAL_ASSIGNMENTS
from jaxmoe.run.assemble import assemble
from jaxmoe.run.measures import record_trace
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.state import init_state
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from sharding.expert_parallel.placement import ExpertPlacement
from sharding.mesh import MeshConfig, make_mesh
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.models import FULL, TINY
from tests.support.tolerances import assert_close

MESH = MeshConfig(data=2, expert=4)
BATCH, LENGTH = 16, 8
NOISY = dataclasses.replace(
    FULL,
    moe=dataclasses.replace(
        FULL.moe,
        router=NoisyTopKConfig(),
        gate=SoftmaxGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.1), RouterZConfig(coefficient=0.1)),
    ),
)
"""A dense layer before two MoE layers whose router draws noise, and losses of their statistics."""
HASHED = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, router=HashConfig()))
"""The token id decides: tables from a trace are right about every token."""


def drawn_tables(path, model, *, devices=4, layers=None, experts=None, vocab_size=None):
    """Write tables without meaning; the sizes are those of the model unless they are given."""
    rng, layers = np.random.default_rng(0), layers or model.num_moe_layers
    shapes = {"id": (layers, vocab_size or model.vocab_size), "next": (layers, devices)}
    arrays = {
        f"{name}_{kind}": jnp.asarray(
            rng.integers(devices, size=shape) if kind == "device" else rng.random(shape),
            "int32" if kind == "device" else "float32",
        )
        for name, shape in shapes.items()
        for kind in ("device", "confidence")
    }
    save_tables(path, TokenTables(**arrays), experts or model.moe.num_experts)
    return str(path)


def batch_of(model, length=LENGTH):
    rng = np.random.default_rng(1)
    tokens = rng.integers(model.vocab_size, size=(BATCH, length + 1)).astype(np.int32)
    segments = np.ones((BATCH, length), np.int32)
    segments[::3, length // 2 :] = 0  # padding
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segments}


def one_step(model, dispatcher, *, accumulation=1, mesh=MESH, **fields):
    """Parameters after a step of plain gradient descent, with its metrics."""
    execution = ExecutionConfig(mesh=mesh, dispatcher=dispatcher, **fields)
    made, optimizer = make_mesh(mesh), optax.sgd(0.5)
    with jax.set_mesh(made):
        state = init_state(model, optimizer, jax.random.key(0), execution=execution, mesh=made)
        given = batch_of(model)
        batch = Batch(**given, loss_weights=(given["segment_ids"] != 0).astype(np.float32))
        step = make_train_step(model, optimizer, execution=execution, accumulation=accumulation)
        state, metrics = step(state, global_batch(batch, made))
        return jax.device_get((state.params, state.router_state)), jax.device_get(metrics)


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "options",
    [
        {"remat": "full", "accumulation": 2},
        {"mesh": MeshConfig(expert=4, seq=2), "sequence_parallel": AllGatherKVConfig()},
    ],
    ids=["remat-micro_batches", "seq"],
)
def test_a_step_with_moved_tokens_equals_one_without(options, tmp_path):
    """Loss, metrics of a noisy router and updates, up to the order of sums; equal counts."""
    tables = drawn_tables(tmp_path / "tables.npz", NOISY)
    params, metrics = one_step(NOISY, AllToAllConfig(num_chunks=2), **options)
    moved_params, moved = one_step(
        NOISY, AllToAllConfig(num_chunks=2, token_tables=tables), **options
    )
    assert_close(moved_params, params, "matmul")
    assert_close(moved.loss, metrics.loss, "matmul")
    local = {name: moved.router.pop(name) for name in sorted(moved.router) if "local" in name}
    assert set(local) == {"local_activation", "local_activation_unmoved"}
    assert all(0.0 < value < 0.6 for value in local.values())
    assert_close(moved.router, metrics.router, "matmul")
    np.testing.assert_array_equal(moved.load, metrics.load)


@functools.cache
def forward(model, execution):
    @jax.jit
    def run(params, batch):
        return Transformer(model, execution).apply(
            {"params": params},
            batch["tokens"],
            segment_ids=batch["segment_ids"],
            train=True,
            key=jax.random.key(3),
        )

    return run


def outputs(model, dispatcher):
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        params = init_params(model, jax.random.key(0), mesh=mesh)
        batch = {name: x for name, x in batch_of(model).items() if name != "targets"}
        execution = ExecutionConfig(mesh=MESH, dispatcher=dispatcher)
        return jax.device_get(forward(model, execution)(params, global_batch(batch, mesh)))


def compared(model, path):
    """Outputs of the model with tokens that move and with tokens that stay; local assignments."""
    still = outputs(model, AllToAllConfig())
    moved = outputs(model, AllToAllConfig(token_tables=drawn_tables(path, model)))
    number, after, unmoved = np.moveaxis(moved.statistics.extra.pop(LOCAL_ASSIGNMENTS), -1, 0)
    np.testing.assert_array_equal(number, still.statistics.kept.sum(-1))
    assert np.all(after < number) and np.all(unmoved < number)
    assert_close((moved.logits, moved.losses), (still.logits, still.losses), "matmul")
    return moved.statistics, still.statistics


def test_statistics_and_logits_are_those_of_tokens_that_stay(tmp_path):
    """A noisy router: its counts are equal only if every token has the noise that it had."""
    moved, still = compared(dataclasses.replace(TINY, moe=NOISY.moe), tmp_path / "tables.npz")
    np.testing.assert_array_equal(moved.counts, still.counts)
    assert_close(moved, still, "matmul")


@pytest.mark.slow
def test_statistics_are_bitwise_those_of_tokens_that_stay_with_drops(tmp_path):
    """Counts, drops, probabilities and noise: tokens are routed where they were."""
    moe = dataclasses.replace(NOISY.moe, capacity=CapacityConfig(factor=1.0))
    moved, still = compared(dataclasses.replace(NOISY, moe=moe), tmp_path / "tables.npz")
    assert np.all(still.kept.sum(-1) < still.counts.sum(-1))
    for got, wanted in zip(*map(jax.tree.leaves, (moved, still)), strict=True):
        np.testing.assert_array_equal(got[0], wanted[0])  # the second layer reads sums of the first
    np.testing.assert_array_equal(moved.kept, still.kept)


def traced_tables(model, path):
    """Write the tables of a trace of the model itself, on the batch of `outputs`."""
    mesh, still = make_mesh(MESH), ExecutionConfig(mesh=MESH, dispatcher=AllToAllConfig())
    with jax.set_mesh(mesh):
        params = init_params(model, jax.random.key(0), mesh=mesh)
        given = batch_of(model)
        batch = Batch(**given, loss_weights=(given["segment_ids"] != 0).astype(np.float32))
        trace = record_trace(model, still, params, {}, [global_batch(batch, mesh)])
    identity = ExpertPlacement.identity(trace.num_layers, trace.num_experts, 4)
    tables = token_tables(trace, identity, vocab_size=model.vocab_size)
    save_tables(path, tables, trace.num_experts)
    return str(path)


@pytest.mark.slow
def test_a_planted_affinity_raises_local_activation(tmp_path):
    """With routing by token id: near 1/K, the most with one expert a device, from near 1/P."""
    tables = traced_tables(HASHED, tmp_path / "tables.npz")
    moved = outputs(HASHED, AllToAllConfig(token_tables=tables))
    found = telemetry.summarise(moved.statistics)
    assert abs(float(found["local_activation_unmoved"]) - 1 / 4) < 0.1
    assert 0.35 < float(found["local_activation"]) <= 1 / 2
    still = outputs(HASHED, AllToAllConfig())
    assert "local_activation" not in telemetry.summarise(still.statistics)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 31}, "is for 31 token ids (model.vocab_size), and this run has 8"),
        ({"devices": 2}, "is for 2 devices of the expert axes (place --devices), and this run has"),
        ({"layers": 3}, "is for 3 MoE layers, and this run has 1"),
        ({"experts": 12}, "is for 12 experts (model.moe.num_experts), and this run has 4"),
        (
            "absent",
            "is no file of token tables (No such file or directory): write one with jaxmoe place",
        ),
        ("text", "is no file of token tables ("),
        ("trace", "is no file of token tables ('id_device is not a file in the archive'): write"),
    ],
)
def test_tables_of_another_run_are_refused_before_data_are_read(changes, words, tmp_path):
    config = tiny_config(8)
    path = tmp_path / "tables.npz"
    if isinstance(changes, dict):
        drawn_tables(path, config.model, **changes)
    if changes == "text":
        path.write_text("no archive")
    if changes == "trace":
        np.savez(path, token_ids=np.zeros(3))
    execution = dataclasses.replace(
        config.execution, mesh=MESH, dispatcher=AllToAllConfig(token_tables=str(path))
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        assemble(dataclasses.replace(config, execution=execution))


def test_routers_in_which_experts_choose_are_refused():
    moe = dataclasses.replace(
        TINY.moe, router=ExpertChoiceConfig(), gate=SoftmaxGateConfig(), balancers=()
    )
    execution = ExecutionConfig(mesh=MESH, dispatcher=AllToAllConfig(token_tables="any.npz"))
    with pytest.raises(ValueError, match="router experts choose tokens: leave token_tables out"):
        check_layout(moe, execution, sequences=1, length=8, mesh=MESH.by_axis)


def test_tokens_that_devices_do_not_divide_are_refused(tmp_path):
    """Before data are read; without a run, when the step is traced."""
    config, given = tiny_config(8), drawn_tables(tmp_path / "small.npz", tiny_config(8).model)
    execution = dataclasses.replace(
        config.execution, mesh=MESH, dispatcher=AllToAllConfig(token_tables=given)
    )
    training = dataclasses.replace(config.training, sequence_length=18)
    with pytest.raises(ValueError, match="18 tokens of a device must be divisible by the 4"):
        assemble(dataclasses.replace(config, execution=execution, training=training))
    tables = drawn_tables(tmp_path / "tables.npz", TINY)
    mesh = make_mesh(MESH)
    execution = ExecutionConfig(mesh=MESH, dispatcher=AllToAllConfig(token_tables=tables))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="7 tokens of a device must be"):
        params = jax.eval_shape(lambda: init_params(TINY, jax.random.key(0)))
        tokens = global_batch(np.zeros((8, 7), np.int32), mesh)
        jax.eval_shape(
            lambda p, t: Transformer(TINY, execution).apply({"params": p}, t), params, tokens
        )


def test_tables_on_one_device_move_nothing(tmp_path):
    """A run on four devices is evaluated on one."""
    tables = drawn_tables(tmp_path / "tables.npz", TINY)
    execution = ExecutionConfig(dispatcher=AllToAllConfig(token_tables=tables))
    params = init_params(TINY, jax.random.key(0))
    output = jax.eval_shape(
        lambda p, t: Transformer(TINY, execution).apply({"params": p}, t),
        params,
        jnp.zeros((2, 6), jnp.int32),
    )
    assert LOCAL_ASSIGNMENTS not in output.statistics.extra


def test_stored_tables_are_those_that_were_saved(tmp_path):
    rng = np.random.default_rng(0)
    given = TokenTables(
        id_device=jnp.asarray(rng.integers(4, size=(2, 9)), jnp.int32),
        id_confidence=jnp.asarray(rng.random((2, 9)), jnp.float32),
        next_device=jnp.asarray(rng.integers(4, size=(2, 4)), jnp.int32),
        next_confidence=jnp.asarray(rng.random((2, 4)), jnp.float32),
    )
    save_tables(tmp_path / "tables", given, 8)
    stored = load_tables(tmp_path / "tables")
    wanted = {"num_devices": 4, "num_layers": 2, "num_experts": 8, "vocab_size": 9}
    assert stored.sizes == wanted
    layer = stored.of_layer(jnp.int32(1))
    np.testing.assert_array_equal(layer.id_device, given.id_device[1])
    np.testing.assert_allclose(layer.next_confidence, given.next_confidence[1], atol=1e-3)
    assert layer.id_device.dtype == jnp.int32 and layer.id_confidence.dtype == jnp.float32
