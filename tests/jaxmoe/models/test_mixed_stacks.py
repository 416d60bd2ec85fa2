# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ: their scans, against the same layers unrolled, on meshes, decoded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe import configs
from jaxmoe.contrib.telemetry.indicators import summarise_indicators
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.feed_forwards import DenseConfig
from jaxmoe.layers.mixers import AttentionConfig, LatentAttentionConfig
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, Stream, TokenInputs
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import ForwardMultipliers, LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.embedding import output_logits
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import RingConfig
from tests.support.tolerances import assert_close

BATCH, LENGTH = 4, 8
FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6)
WINDOWED = dataclasses.replace(FULL, window=3, is_gated=True)
LATENT = LatentAttentionConfig(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=2, value_dim=6)
MODEL = ModelConfig(
    vocab_size=32,
    num_layers=5,
    embed_dim=16,
    attention=FULL,
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=12),
    layers=(
        LayerConfig(mixer=LATENT),
        LayerConfig(mixer=WINDOWED, feed_forward=DenseConfig(hidden_dim=12)),
    ),
    dense_layers=(0,),
    dense_dim=20,
)
"""A dense layer, then two repeats of windowed attention, dense, and latent attention, experts."""


@functools.cache
def params_of(model):
    params = init_params(model, jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)


def tokens():
    return np.random.default_rng(2).integers(0, 32, (BATCH, LENGTH)).astype(np.int32)


def segments():
    ids = np.ones((BATCH, LENGTH), np.int32)
    ids[1, 5:] = 2
    ids[2, 6:] = 0  # padding
    return ids


def value_and_gradient(run):
    """Compile a function of (params, batch) to its value, gradient and results."""

    def number(params, batch):
        logits, losses, aside = run(params, batch)
        weights = jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
        weights = jnp.where(batch["segment_ids"][..., None] > 0, weights, 0.0)
        return jnp.sum(logits * weights) + losses, (logits, aside)

    return jax.jit(jax.value_and_grad(number, has_aux=True))


def scanned(model, execution):
    def run(params, batch):
        output = Transformer(model, execution).apply({"params": params}, **batch)
        aside = {"counts": output.statistics.counts}
        return output.logits, sum(output.losses.values()), aside

    return run


def unrolled(model, execution):
    """The layers in a Python loop, each with its own slice of the parameters."""

    def run(params, batch):
        ids = batch["segment_ids"]
        about = TokenInputs(token_mask=ids != 0, segment_ids=ids)
        stream, losses, counts = Stream(x=params["embedding"]["weight"][batch["tokens"]]), [], []
        for number, kind in enumerate(model.kinds):
            stack = next(stack for stack in model.stacks if number in stack.layers)
            own = functools.reduce(lambda tree, name: tree[name], stack.path.split("/"), params)
            place = stack.layers.index(number)
            block = Block(kind.mixer, kind.feed_forward, model.context, execution, train=False)
            given = LayerInputs(
                router_state={}, key=None, stack_layer=jnp.int32(0), moe_layer=jnp.int32(0)
            )
            weights = {"params": jax.tree.map(lambda w, i=place: w[i], own)}
            stream, _ = block.apply(weights, stream, given, about, method="mix")
            stream, fed = block.apply(weights, stream, given, about, method="feed")
            if kind.feed_forward.is_routed:
                counts.append(fed.statistics.counts)
                losses.append(fed.statistics)
        statistics = jax.tree.map(lambda *leaves: jnp.stack(leaves), *losses)
        balance = sum(b.loss(statistics, num_free=0) for b in model.moe.balancers)
        x = rms_norm(stream.x, params["final_norm"]["gain"], model.norm_epsilon)
        logits = output_logits(x, params["head"]["weight"], model, execution)
        return logits, balance, {"counts": jnp.stack(counts)}

    return run


def batch_of():
    return {"tokens": jnp.asarray(tokens()), "segment_ids": jnp.asarray(segments())}


@functools.cache
def on_one_device():
    return value_and_gradient(scanned(MODEL, ExecutionConfig()))(params_of(MODEL), batch_of())


def test_mixed_layers_equal_the_same_layers_unrolled():
    wanted = value_and_gradient(unrolled(MODEL, ExecutionConfig()))(params_of(MODEL), batch_of())
    assert_close(on_one_device(), wanted, "end_to_end")


MESHES = {
    "seq2_tensor2": ExecutionConfig(
        mesh=MeshConfig(seq=2, tensor=2), sequence_parallel=RingConfig()
    ),
    "data2_expert2_zero2": ExecutionConfig(mesh=MeshConfig(data=2, expert=2), rules="zero2"),
    "replica2_data2_hierarchical": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=2), rules="hierarchical", remat="full", unroll=2
    ),
}


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", MESHES)
def test_mixed_layers_are_the_same_on_every_mesh(name):
    execution = MESHES[name]
    mesh = make_mesh(execution.mesh, jax.devices()[:4])
    table = parameter_table(MODEL, rules=execution.axis_rules)
    params = jax.device_put(params_of(MODEL), table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        given = global_batch({"tokens": tokens(), "segment_ids": segments()}, mesh)
        found = value_and_gradient(scanned(MODEL, execution))(params, given)
    assert_close(found, on_one_device(), "end_to_end")


def test_decoding_with_a_cache_per_mixer_equals_the_whole_forward():
    """Two tokens at a time, on the rows that are one document."""
    given = jnp.asarray(tokens())
    cache = initial_cache(MODEL, ExecutionConfig(), batch=BATCH, length=LENGTH)
    parts = {path: len(jax.tree.leaves(part)) for path, part in cache.items()}
    assert parts == {
        "dense_blocks_0": 1,
        "cycle_1/0": 2,
        "cycle_1/1": 1,
    }

    @jax.jit
    def step(params, new, first, cache):
        places = first + jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
        output = Transformer(MODEL).apply(
            {"params": params},
            new,
            positions=jnp.broadcast_to(places, new.shape),
            cache=cache,
        )
        return output.logits, output.cache

    found = []
    for first in range(0, LENGTH, 2):
        new = given[:, first : first + 2]
        logits, cache = step(params_of(MODEL), new, jnp.int32(first), cache)
        found.append(logits)
    whole, rows = on_one_device()[0][1][0], np.array([0, 3])
    assert_close(jnp.concatenate(found, axis=1)[rows], whole[rows], "end_to_end")


@pytest.mark.slow
def test_indicators_are_in_the_order_of_the_layers():
    execution = ExecutionConfig(telemetry="detailed")
    output = jax.jit(Transformer(MODEL, execution).apply)(
        {"params": params_of(MODEL)}, jnp.asarray(tokens())
    )
    found = summarise_indicators(output.observations, residual_multiplier=1.0)
    assert not np.isnan(found["attention_z"]).any() and found["attention_z"].shape == (5,)
    dense = [not kind.feed_forward.is_routed for kind in MODEL.kinds]
    np.testing.assert_array_equal(np.isnan(found["router_z"]), dense)


def names_of(**changes):
    model = dataclasses.replace(MODEL, dense_layers=(), **changes)
    return [(stack.path, list(stack.layers), list(stack.moe_layers)) for stack in model.stacks]


A, B, D = (
    LayerConfig(mixer=WINDOWED),
    LayerConfig(),
    LayerConfig(feed_forward=DenseConfig(hidden_dim=12)),
)


@pytest.mark.parametrize(
    ("layers", "number", "wanted"),
    [
        ((A,), 3, [("moe_blocks_0", [0, 1, 2], [0, 1, 2])]),
        ((A, B), 2, [("moe_blocks_0", [0], [0]), ("moe_blocks_1", [1], [1])]),
        ((A, B), 4, [("cycle_0/0", [0, 2], [0, 2]), ("cycle_0/1", [1, 3], [1, 3])]),
        ((A, D), 4, [("cycle_0/0", [0, 2], [0, 1]), ("cycle_0/1", [1, 3], [])]),
        (
            (D, A, B, A, B, B),
            6,
            [
                ("dense_blocks_0", [0], []),
                ("cycle_1/0", [1, 3], [0, 2]),
                ("cycle_1/1", [2, 4], [1, 3]),
                ("moe_blocks_5", [5], [4]),
            ],
        ),
        (
            (A, A, B),
            8,
            [
                ("cycle_0/0", [0, 3], [0, 3]),
                ("cycle_0/1", [1, 4], [1, 4]),
                ("cycle_0/2", [2, 5], [2, 5]),
                ("moe_blocks_6", [6, 7], [6, 7]),
            ],
        ),
    ],
    ids=["equal", "no period", "period", "dense and experts", "part of the list", "remainder"],
)
def test_stacks_of_mixed_layers(layers, number, wanted):
    assert names_of(layers=layers, num_layers=number) == wanted


def test_alternating_dense_layers_without_layers_keep_their_names():
    model = dataclasses.replace(MODEL, layers=(), dense_layers=(0, 2), num_layers=4)
    assert [stack.path for stack in model.stacks] == [
        "dense_blocks_0",
        "moe_blocks_1",
        "dense_blocks_2",
        "moe_blocks_3",
    ]


def test_mixed_config_survives_json():
    assert configs.from_json(ModelConfig, configs.to_json(MODEL)) == MODEL


OTHER = MoEConfig(num_experts=8, top_k=1)
SCALED = ForwardMultipliers(attention_scale=0.5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_layers": 1},
            "model.layers names 2 layers, which must be at most model.num_layers=1",
        ),
        (
            {"layers": (LayerConfig(mixer=dataclasses.replace(FULL, is_causal=False)),)},
            r"model.layers.0.mixer.is_causal=False and model.attention.is_causal=True",
        ),
        (
            {"layers": (B, LayerConfig(feed_forward=OTHER))},
            r"model.layers.1.feed_forward must equal model.moe",
        ),
        (
            {"dense_layers": (0, 1, 3)},
            r"model.dense_layers=\[1, 3\] and model.layers.1.feed_forward",
        ),
        (
            {"layers": (LayerConfig(mixer=dataclasses.replace(FULL, head_dim=8)),)}
            | {"multipliers": SCALED},
            r"model.layers.0.mixer has heads of 8 and model.attention of 6",
        ),
    ],
)
def test_layers_that_contradict_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(MODEL, **changes)
