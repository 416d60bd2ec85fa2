# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters that mix additions for each token: meshes, training, decoding, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding

from jaxmoe.adapters import (
    LoraConfig,
    LoraMixerConfig,
    MultiHeadRoutingConfig,
    RemixConfig,
    TargetsConfig,
    TaskLoraConfig,
    fold_adapters,
)
from jaxmoe.catalog import choice
from jaxmoe.contrib.adapters.repeated import ADVANTAGE
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.loss import forward_and_nll
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.meshes import mesh_of
from tests.support.models import FULL, WIDE
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

DENSE = TargetsConfig(
    roles=(
        "attention_in",
        "attention_out",
        "attention_gate",
        "mlp_in",
        "mlp_out",
        "shared_in",
        "shared_out",
    )
)
MIXED = {
    "lora_mixer": LoraMixerConfig(members=4, rank=2, top_k=2, targets=DENSE),
    "task_lora": TaskLoraConfig(members=3, rank=2, targets=DENSE),
    "multi_head_routing": MultiHeadRoutingConfig(
        members=3, rank=2, tasks=3, splits=2, targets=DENSE
    ),
    "remix": RemixConfig(members=4, rank=2, targets=DENSE),
}
EXECUTIONS = {
    "data2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2)),
    "data4": ExecutionConfig(mesh=MeshConfig(data=4), remat="full"),
    "zero2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2), rules="zero2"),
    "data2_seq2": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2),
        sequence_parallel=AllGatherKVConfig(layout="contiguous"),
    ),
}


def adapted(model, adapter):
    return dataclasses.replace(model, adapter=adapter)


def drawn(model):
    """Parameters with additions and logits that are not zero.

    With three times as large ones a rounding of the parameters moves gradients by up to 8e-5 of the
    largest, which is more than devices may differ by; with these by up to 1.4e-5.
    """
    params = traverse_util.flatten_dict(init_params(model, jax.random.key(0)), sep="/")
    for number, (path, value) in enumerate(sorted(params.items())):
        if path.endswith((":ups", ":up", ":logits")):
            key = jax.random.fold_in(jax.random.key(1), number)
            params[path] = 0.1 * jax.random.normal(key, value.shape)
    return traverse_util.unflatten_dict(params, sep="/")


def task_batch():
    rows = batch()
    tasks = np.broadcast_to(np.arange(len(rows.tokens))[:, None] % 3, rows.tokens.shape)
    advantage = np.random.default_rng(3).standard_normal(tasks.shape).astype(np.float32)
    extra = {"task": np.array(tasks, np.int32), ADVANTAGE: advantage}
    return dataclasses.replace(rows, extra=extra)


def loss_and_gradients(model, execution, params, rows):
    table = parameter_table(model)

    def loss(trained):
        whole = table.merge(trained, params)
        key = jax.random.key(7)
        nll, output = forward_and_nll(model, execution, whole, rows, train=True, key=key)
        return nll + 100.0 * sum(output.losses.values(), jnp.float32(0.0))

    return jax.value_and_grad(loss)(table.select_trained(params))


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", MIXED)
def test_loss_and_gradients_of_mixtures_equal_one_device(name, execution):
    execution, model = EXECUTIONS[execution], adapted(WIDE, MIXED[name])
    params, rows = drawn(model), task_batch()
    wanted = jax.jit(functools.partial(loss_and_gradients, model, ExecutionConfig()))(params, rows)
    mesh, table = mesh_of(execution), parameter_table(model, rules=execution.axis_rules)
    placed = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(loss_and_gradients, model, execution))
        found = run(placed, global_batch(rows, mesh))
    assert_close(found, wanted, "end_to_end")
    gradients = traverse_util.flatten_dict(wanted[1], sep="/")
    for row in table.trained_rows:
        assert float(jnp.abs(gradients[row.path]).max()) > 0, row.path


@pytest.mark.slow
def test_one_member_is_lora():
    """With one addition, of whatever mixture, a model is one with LoRA of the same factors."""
    targets = TargetsConfig(roles=("attention_in", "attention_out"))
    given = {"rank": 2, "alpha": 3.0, "targets": targets}
    lora = adapted(FULL, LoraConfig(**given))
    params = drawn(lora)
    flat = traverse_util.flatten_dict(params, sep="/")
    ids = jax.random.randint(jax.random.key(2), (2, 6), 0, FULL.vocab_size)
    wanted = forward(lora, ExecutionConfig(), params, ids).logits
    members = (TaskLoraConfig(members=1, **given), MultiHeadRoutingConfig(members=1, **given))
    routed = (LoraMixerConfig, RemixConfig)
    for adapter in (*members, *(one(members=1, top_k=1, **given) for one in routed)):
        model, own = adapted(FULL, adapter), {}
        for row in parameter_table(model):
            own[row.path] = jnp.zeros(row.shape)
            if (base := row.path.replace(":downs", ":down").replace(":ups", ":up")) in flat:
                own[row.path] = flat[base].reshape(row.shape)
        found = forward(model, ExecutionConfig(), traverse_util.unflatten_dict(own, sep="/"), ids)
        assert_close(found.logits, wanted, "end_to_end")


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", MIXED)
def test_decoding_with_a_mixture_equals_one_pass(name):
    model = adapted(dataclasses.replace(WIDE, num_layers=1), MIXED[name])
    params, execution = drawn(model), ExecutionConfig()
    ids = jax.random.randint(jax.random.key(2), (2, 4), 0, model.vocab_size)
    wanted = forward(model, execution, params, ids).logits
    cache = initial_cache(model, execution, batch=2, length=8)

    def step(cache, token, place):
        output = forward(model, execution, params, token, positions=place, cache=cache)
        return output.cache, output.logits[:, 0]

    step = jax.jit(step)
    for place in range(4):
        where = jnp.full((2, 1), place, jnp.int32)
        cache, logits = step(cache, ids[:, place : place + 1], where)
        assert_close(logits, wanted[:, place], "end_to_end")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraMixerConfig(targets=TargetsConfig(roles=("expert_in",))), "expert_in cannot"),
        (
            lambda: LoraMixerConfig(members=2),
            "top_k=3 must be at least 1 and at most adapter.members=2",
        ),
        (lambda: TaskLoraConfig(task=4), "task=4 must be at least 0 and at most 3"),
        (lambda: MultiHeadRoutingConfig(splits=0), "splits=0 must be at least 1"),
        (lambda: RemixConfig(draws=1), "draws=1 must be at least 2: the router is trained by"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mixer", ["mamba2", "latent", "mamba"])
@pytest.mark.parametrize("name", MIXED)
def test_matrices_that_a_layer_uses_whole_are_refused_before_anything_is_traced(name, mixer):
    model = adapted(dataclasses.replace(WIDE, attention=choice("mixer", mixer)()), MIXED[name])
    with pytest.raises(ValueError, match=r"\S+ is used whole by its layer, and adapter:"):
        parameter_table(model)


def test_a_mixture_is_not_folded():
    model = adapted(WIDE, MIXED["lora_mixer"])
    with pytest.raises(ValueError, match="which of them a token has depends on the token"):
        jax.eval_shape(fold_adapters, parameter_table(model).tree(lambda row: jnp.zeros(row.shape)))
