# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What some models add to grouped-query attention: each option against a plain softmax in value and
gradient, on eight devices against one, and decoded with a cache against the whole forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.mixers.attention import Attention, AttentionConfig
from jaxmoe.layers.mixers.attention_parts import ChunksConfig, QueryTemperatureConfig
from jaxmoe.layers.norms import CentredRmsNormConfig, LayerNormConfig, RmsNormConfig
from jaxmoe.layers.records import TokenInputs
from jaxmoe.layers.rotary import (
    DynamicScalingConfig,
    Llama3ScalingConfig,
    LongRopeConfig,
    YarnConfig,
    rotary_angles,
    rotate_in_place,
)
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, MoEMesh, make_mesh
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
)
from tests.support.model_options import attention_fields
from tests.support.tolerances import assert_close

BATCH, LENGTH, WIDTH, HEAD = 2, 7, 16, 8
OPTIONS = {
    "biases": {"has_bias": True, "has_output_bias": True},
    "some_features": {"rotary_dim": 4},
    "interleaved": {"rope_layout": "interleaved"},
    "some_interleaved_normed_after": {
        "rotary_dim": 6,
        "rope_layout": "interleaved",
        "qk_norm_place": "after",
    },
    "all_heads_normed_after": {"qk_norm": "full", "qk_norm_place": "after"},
    "yarn": {
        "rope_scaling": YarnConfig(
            factor=8.0, original_length=32, truncate=False, mscale=None, mscale_all_dim=None
        )
    },
    "llama3": {"rope_scaling": Llama3ScalingConfig(original_length=16)},
    "dynamic": {"rope_scaling": DynamicScalingConfig(factor=2.0, original_length=4)},
    "longrope": {
        "rope_scaling": LongRopeConfig(long_factor=(1.0, 2.0, 3.0, 4.0), factor=2.0, rows="long")
    },
    "clip": {"qkv_clip": 0.4, "qk_norm": "full"},
    "clip_with_biases": {"qkv_clip": 0.4, "qk_norm": "none", "has_bias": True},
    "gate_of_features": {"is_gated": True, "gate_form": "element"},
    "sinks": {"has_sinks": True},
    "sinks_window_softcap": {"has_sinks": True, "window": 3, "softcap": 1.5, "has_bias": True},
    "sinks_gate_of_heads": {"has_sinks": True, "is_gated": True},
    "norm_without_gains": {"qk_norm": "unit", "qk_norm_place": "after"},
    "chunks": {"chunks": ChunksConfig(size=3)},
    "chunks_window_sinks": {
        "chunks": ChunksConfig(size=5),
        "window": 3,
        "has_sinks": True,
        "qk_norm": "unit",
    },
    "temperature_without_positions": {
        "positions": "none",
        "query_temperature": QueryTemperatureConfig(floor_scale=2.0, attn_scale=0.5),
    },
    "everything": {
        "has_bias": True,
        "has_output_bias": True,
        "rotary_dim": 4,
        "rope_layout": "interleaved",
        "rope_scaling": YarnConfig(factor=4.0, original_length=16),
        "qk_norm_place": "after",
        "qkv_clip": 1.5,
        "is_gated": True,
        "gate_form": "element",
        "has_sinks": True,
        "query_temperature": QueryTemperatureConfig(floor_scale=2.0, attn_scale=0.5),
    },
}
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 3, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0, 0, 1]], np.int32)


def config_of(name: str, **sizes) -> AttentionConfig:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": HEAD} | sizes
    return AttentionConfig(**heads | attention_fields(**OPTIONS[name]))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def norm(x, gain):
    return gain * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def normed(config, params, q, k):
    if config.qk_norm == "none":
        return q, k
    if config.qk_norm == "unit":
        return norm(q, 1.0), norm(k, 1.0)
    if config.qk_norm == "head":
        return norm(q, params["q_norm"]), norm(k, params["k_norm"])
    flat = [x.reshape(*x.shape[:2], -1) for x in (q, k)]
    return (
        norm(flat[0], params["q_norm"]).reshape(q.shape),
        norm(flat[1], params["k_norm"]).reshape(k.shape),
    )


def oracle(config: AttentionConfig, params, x, positions, segment_ids):
    """A plain softmax over all keys, and over one more column where there are sinks."""
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in "qkv")
    if config.extras.has_bias:
        q, k, v = (
            part + params[f"{name}_bias"] for name, part in zip("qkv", (q, k, v), strict=True)
        )
    if config.extras.qk_norm_place == "before":
        q, k = normed(config, params, q, k)
    if config.extras.qkv_clip is not None:
        bound = config.extras.qkv_clip
        q, k, v = (jnp.minimum(jnp.maximum(part, -bound), bound) for part in (q, k, v))
    if config.positions == "rotary":
        width = config.extras.rotary_dim or HEAD
        angles = rotary_angles(
            jnp.asarray(positions), width, config.rope_theta, config.extras.rope_scaling
        )
        q, k = (rotate_in_place(part, angles, config.extras.rope_layout) for part in (q, k))
    if config.extras.qk_norm_place == "after":
        q, k = normed(config, params, q, k)
    if config.query_temperature is not None:
        steps = np.floor((positions + 1) / config.query_temperature.floor_scale)
        q = q * (1 + config.query_temperature.attn_scale * np.log(1 + steps))[:, :, None, None]
    distance = positions[:, :, None] - positions[:, None, :]
    sees = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if config.window is not None:
        sees = sees & (distance < config.window)
    if config.chunk is not None:
        chunks = positions // config.chunk
        sees = sees & (chunks[:, :, None] == chunks[:, None, :])
    groups = config.num_heads // config.num_kv_heads
    k, v = (jnp.repeat(part, groups, axis=2) for part in (k, v))
    logits = HEAD**-0.5 * jnp.einsum("bsnh,bunh->bnsu", q, k)
    if config.softcap is not None:
        logits = config.softcap * jnp.tanh(logits / config.softcap)
    logits = jnp.where(sees[:, None], logits, -1e30)
    if config.extras.has_sinks:
        column = jnp.broadcast_to(params["sinks"][None, :, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : x.shape[1]]
    out = jnp.einsum("bnsu,bunh->bsnh", weights, v)
    if config.is_gated and config.extras.gate_form == "head":
        out = out * jax.nn.sigmoid(x @ params["gate"])[..., None]
    elif config.is_gated:
        out = out * jax.nn.sigmoid(jnp.einsum("bsd,dnh->bsnh", x, params["gate"]))
    y = jnp.einsum("bsnh,nhd->bsd", out, params["o"])
    return y + params["o_bias"] if config.extras.has_output_bias else y


@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_equals_a_plain_softmax_in_value_and_gradient(name, is_packed):
    config = config_of(name)
    module = Attention(
        config, LayerContext(embed_dim=WIDTH, heads=(config.heads,)), ExecutionConfig()
    )
    x, cotangent = normal(1, BATCH, LENGTH, WIDTH), normal(2, BATCH, LENGTH, WIDTH)
    rows = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    positions = POSITIONS if is_packed else rows
    segments = SEGMENT_IDS if is_packed else np.ones((BATCH, LENGTH), np.int32)
    tokens = TokenInputs(
        token_mask=jnp.ones((BATCH, LENGTH), bool),
        positions=jnp.asarray(positions) if is_packed else None,
        segment_ids=jnp.asarray(segments) if is_packed else None,
    )
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, tokens, None)["params"]
    leaves, tree = jax.tree.flatten(nn.meta.unbox(shapes))
    values = [0.5 * normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, values)

    def ours(params, x):
        out, _ = module.apply({"params": params}, x, tokens, None)
        return jnp.sum(out * cotangent), out

    def theirs(params, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out = oracle(config, params, x, positions, segments)
        return jnp.sum(out * cotangent), out

    gradients, out = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))(params, x)
    wanted_gradients, wanted = jax.jit(jax.grad(theirs, argnums=(0, 1), has_aux=True))(params, x)
    assert_close(out, wanted, kind="attention")
    assert_close(gradients, wanted_gradients, kind="attention")


@pytest.mark.parametrize("kind", ["head", "full"])
def test_norms_of_heads_are_those_of_the_model(kind):
    """Zero-centred gains are the gains of RMSNorm less 1."""
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=HEAD, qk_norm=kind)
    x = normal(1, BATCH, LENGTH, WIDTH)
    tokens = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))

    def module(norm):
        context = LayerContext(embed_dim=WIDTH, heads=(config.heads,), norm=norm)
        return Attention(config, context, ExecutionConfig())

    plain = module(RmsNormConfig())
    params = nn.meta.unbox(plain.init(jax.random.key(0), x, tokens, None))["params"]
    params |= {name: 1.0 + 0.3 * normal(2, *params[name].shape) for name in ("q_norm", "k_norm")}
    centred = params | {name: params[name] - 1.0 for name in ("q_norm", "k_norm")}
    out = plain.apply({"params": params}, x, tokens, None)[0]
    again = module(CentredRmsNormConfig()).apply({"params": centred}, x, tokens, None)[0]
    assert_close(again, out, kind="attention")
    layer = module(LayerNormConfig(has_bias=True)).init(jax.random.key(0), x, tokens, None)
    assert {"q_norm", "q_norm_bias", "k_norm", "k_norm_bias"} <= layer["params"].keys()


MODEL = ModelConfig(
    vocab_size=24,
    num_layers=2,
    embed_dim=16,
    attention=config_of("everything", num_kv_heads=4),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
    dense_layers=(0,),
    dense_dim=16,
)
ROWS, NEW = 4, 16


def model_of(name: str) -> ModelConfig:
    return dataclasses.replace(MODEL, attention=config_of(name, num_kv_heads=4))


@functools.cache
def values_of(model: ModelConfig):
    rng = np.random.default_rng(0)

    def value(row):
        return jnp.asarray(rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5)

    return jax.tree.map(lambda w: w.astype(jnp.float32), parameter_table(model).tree(value))


def some_tokens(length: int = NEW):
    return jnp.asarray(np.random.default_rng(1).integers(0, 24, (ROWS, length)), jnp.int32)


def logits_and_gradients(model, execution, segment_ids):
    def run(params, tokens):
        output = Transformer(model, execution).apply(
            {"params": params}, tokens, segment_ids=segment_ids
        )
        chosen = jnp.sin(7.0 * jnp.arange(24, dtype=jnp.float32))[None, None, :]
        return jnp.mean(output.logits * chosen), output.logits

    return jax.jit(jax.grad(run, has_aux=True))


EXECUTIONS = {
    "tensor2_data4": (MeshConfig(tensor=2, data=4), {}),
    "ring": (MeshConfig(data=2, seq=2, tensor=2), {"sequence_parallel": RingConfig()}),
    "ring_of_contiguous_rows": (
        MeshConfig(data=2, seq=4),
        {"sequence_parallel": RingConfig(layout="contiguous")},
    ),
    "ring_of_documents": (
        MeshConfig(data=2, seq=4),
        {"sequence_parallel": RingConfig(layout="document_zigzag")},
    ),
    "token_ring": (MeshConfig(data=2, seq=4), {"sequence_parallel": TokenRingConfig()}),
    "token_ring_of_neighbours": (
        MeshConfig(data=2, seq=2, tensor=2),
        {"sequence_parallel": TokenRingConfig(form="co_travelling")},
    ),
    "all_gather": (MeshConfig(data=2, seq=4), {"sequence_parallel": AllGatherKVConfig()}),
    "ulysses": (MeshConfig(data=2, seq=4), {"sequence_parallel": UlyssesConfig()}),
    "ulysses_in_chunks": (
        MeshConfig(data=4, seq=2),
        {"sequence_parallel": UlyssesConfig(num_chunks=2)},
    ),
    "usp": (
        MeshConfig(data=2, seq=4),
        {
            "sequence_parallel": UlyssesRingConfig(ulysses=2),
            "fold": MoEMesh(seq_inner=2),
        },
    ),
}
ON_MESHES = [("everything", name) for name in EXECUTIONS]
ON_MESHES += [(name, "tensor2_data4") for name in OPTIONS if name != "everything"]
ON_MESHES += [("chunks", name) for name in EXECUTIONS if name != "tensor2_data4"]
ON_MESHES += [
    (name, "ring") for name in ("dynamic", "all_heads_normed_after", "sinks_window_softcap")
]


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("name", "execution"), ON_MESHES)
def test_an_option_on_eight_devices_gives_the_logits_and_gradients_of_one(
    name, execution, is_packed
):
    model = model_of(name)
    segments = None
    if is_packed:
        segments = jnp.asarray(np.repeat([[1] * 5 + [2] * 8 + [0] * 3], ROWS, axis=0), jnp.int32)
    params, tokens = values_of(model), some_tokens()
    wanted = logits_and_gradients(model, ExecutionConfig(), segments)(params, tokens)
    config, changes = EXECUTIONS[execution]
    execution = ExecutionConfig(mesh=config, **changes)
    mesh = make_mesh(config, jax.devices(), fold=execution.fold)
    table = parameter_table(model, rules=execution.axis_rules)
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
        actual = logits_and_gradients(model, execution, segments)(spread, tokens)
    assert_close(jax.device_get(actual), jax.device_get(wanted), kind="end_to_end")


DECODED = [name for name in OPTIONS if name != "dynamic"]
"""All options but the one whose wavelengths depend on the length of the row."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "everything" else pytest.mark.slow)
        for name in DECODED
    ],
)
def test_an_option_decoded_with_a_cache_gives_the_logits_of_the_whole_row(name):
    model = model_of(name)
    params, tokens = values_of(model), some_tokens(8)
    whole = Transformer(model).apply({"params": params}, tokens).logits

    @jax.jit
    def some(tokens, first, cache):
        places = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = jnp.broadcast_to(places, tokens.shape)
        output = Transformer(model).apply(
            {"params": params}, tokens, positions=positions, cache=cache
        )
        return output.logits, output.cache

    cache = initial_cache(model, ExecutionConfig(), batch=ROWS, length=8)
    logits, first = [], 0
    for number in (5, 1, 1, 1):
        part, cache = some(tokens[:, first : first + number], jnp.int32(first), cache)
        logits.append(part)
        first += number
    assert_close(jnp.concatenate(logits, axis=1), whole, kind="end_to_end")
