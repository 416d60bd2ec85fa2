# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention differs in its window or its positions alone, as published models have.

Window layers with rotary positions alternate with full layers without positions: against a loop
over tokens, with a cache, and on devices that share a sequence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import DenseConfig
from jaxmoe.layers.mixers import AttentionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import LayerConfig, ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, MoEMesh, make_mesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
)
from tests.fuzz.pairs import compare_with
from tests.support.tolerances import assert_close

BATCH, LENGTH, WINDOW = 4, 8, 3
FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, qk_norm="none", positions="none")
SLIDING = dataclasses.replace(FULL, window=WINDOW, positions="rotary")
MODEL = ModelConfig(
    vocab_size=32,
    num_layers=4,
    embed_dim=8,
    attention=FULL,
    moe=None,
    dense_dim=12,
    layers=(
        LayerConfig(mixer=SLIDING),
        LayerConfig(feed_forward=DenseConfig(hidden_dim=20)),
    ),
)
"""Two repeats of a window layer and a full one, whose feed-forwards have other widths."""


@functools.cache
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: w + 0.2 * rng.standard_normal(w.shape).astype(np.float32),
        init_params(MODEL, jax.random.key(0)),
    )


def tokens():
    return np.random.default_rng(1).integers(0, 32, (BATCH, LENGTH)).astype(np.int32)


def logits(execution):
    return lambda params, tokens: forward(MODEL, execution, params, tokens).logits


def value_and_gradient(function):
    def total(params, tokens):
        x = function(params, tokens)
        return jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)), x

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@functools.cache
def on_one_device():
    return value_and_gradient(logits(ExecutionConfig()))(params(), tokens())


def rotated(heads):
    """Heads [S N H] with rotary positions, pair by pair."""
    half = heads.shape[-1] // 2
    places = jnp.arange(LENGTH, dtype=jnp.float32)
    angles = (
        places[:, None] * SLIDING.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)[None]
    )
    sines, cosines = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    low, high = heads[..., :half], heads[..., half:]
    return jnp.concatenate([low * cosines - high * sines, high * cosines + low * sines], -1)


def attend(x, weights, config):
    """One query after the other sees the keys of its window."""
    q, k, v = (jnp.einsum("sd,dnh->snh", x, weights[name]) for name in "qkv")
    if config.positions == "rotary":
        q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(heads, 2, axis=1) for heads in (k, v))
    rows = []
    for place in range(LENGTH):
        first = 0 if config.window is None else max(0, place + 1 - config.window)
        scores = jnp.einsum("nh,snh->ns", q[place], k[first : place + 1]) * config.head_dim**-0.5
        weighted = jnp.einsum("ns,snh->nh", jax.nn.softmax(scores, -1), v[first : place + 1])
        rows.append(jnp.einsum("nh,nhd->d", weighted, weights["o"]))
    return jnp.stack(rows)


def reference(params, tokens):
    def norm(x, name, weights):
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_epsilon)
        return x * weights[name]["gain"][None]

    def row(ids):
        x = params["embedding"]["weight"][ids]
        for number, kind in enumerate(MODEL.kinds):
            weights = jax.tree.map(
                lambda w, i=number // 2: w[i], params["cycle_0"][str(number % 2)]
            )
            y = attend(norm(x, "attention_norm", weights), weights["attention"], kind.mixer)
            x = x + y
            y = norm(x, "feed_forward_norm", weights)
            dense = weights[kind.feed_forward.module_name]
            gate, up = (y @ dense["gate_up"][:, place] for place in (0, 1))
            x = x + (jax.nn.silu(gate) * up) @ dense["down"]
        return norm(x, "final_norm", params) @ params["head"]["weight"]

    return jax.vmap(row)(tokens)


def test_alternating_windows_and_positions_equal_a_loop_over_tokens():
    wanted = value_and_gradient(reference)(params(), tokens())
    assert_close(on_one_device(), wanted, "end_to_end")


def test_cached_steps_equal_the_whole_forward():
    execution = ExecutionConfig()

    @jax.jit
    def step(ids, position, cache):
        positions = jnp.broadcast_to(position, ids.shape)
        output = forward(MODEL, execution, params(), ids, positions=positions, cache=cache)
        return output.logits, output.cache

    cache, parts = initial_cache(MODEL, execution, batch=BATCH, length=LENGTH), []
    for position in range(LENGTH):
        ids = jnp.asarray(tokens()[:, position : position + 1])
        part, cache = step(ids, jnp.full((1, 1), position, jnp.int32), cache)
        parts.append(part)
    assert_close(jnp.concatenate(parts, axis=1), on_one_device()[0][1], "end_to_end")


SHARED = {
    form.name: ExecutionConfig(mesh=MeshConfig(data=2, seq=2, tensor=2), sequence_parallel=form)
    for form in (RingConfig(), TokenRingConfig(), AllGatherKVConfig())
}
SHARED |= {
    "ring_in_order": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4), sequence_parallel=RingConfig(layout="contiguous")
    ),
    "ulysses": ExecutionConfig(mesh=MeshConfig(data=4, seq=2), sequence_parallel=UlyssesConfig()),
    "ulysses_ring": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4),
        fold=MoEMesh(seq_inner=2),
        sequence_parallel=UlyssesRingConfig(ulysses=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("execution", SHARED.values(), ids=SHARED)
def test_devices_that_share_a_sequence_compute_the_same(execution):
    mesh = make_mesh(execution.mesh, jax.devices()[:8], fold=execution.mesh_fold)
    table = parameter_table(MODEL, rules=execution.axis_rules)
    places = table.tree(lambda row: NamedSharding(mesh, row.spec))
    spread = jax.device_put(params(), places)
    batch = global_batch({"tokens": tokens()}, mesh)["tokens"]
    with jax.set_mesh(mesh):
        result = value_and_gradient(logits(execution))(spread, batch)
    assert_close(result, on_one_device(), "end_to_end")


STEPS = {
    "stage": {"execution.mesh": MeshConfig(stage=2, data=4), "training.accumulation": 2},
    "seq": {
        "execution.mesh": MeshConfig(data=4, seq=2),
        "execution.sequence_parallel": RingConfig(),
    },
}
WIDE = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=8)


@pytest.mark.slow
@pytest.mark.parametrize("fields", STEPS.values(), ids=STEPS)
def test_a_training_step_is_that_of_one_device(fields):
    window = LayerConfig(mixer=dataclasses.replace(WIDE, window=5))
    without = LayerConfig(mixer=dataclasses.replace(WIDE, positions="none"))
    outcome = compare_with({"model.layers": (window, without), **fields})
    assert outcome.name == "equal", outcome.text
