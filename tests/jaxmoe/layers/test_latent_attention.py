# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention against an oracle of loops over heads, decoding against the whole pass, and
meshes against one device."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.mixers.latent_attention import LatentAttention
from jaxmoe.layers.records import LayerCache, TokenInputs
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import LatentAttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.flops import flops_per_token, matmul_parameters
from jaxmoe.models.sizing import dense_parameters
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, make_mesh
from sharding.sequence_parallel import RingConfig
from tests.support.tolerances import assert_close

BATCH, LENGTH, WIDTH = 2, 6, 20
CASES = {
    "interleaved": LatentAttentionConfig(
        num_heads=2, latent_dim=7, query_latent_dim=9, nope_dim=3, rope_dim=4, value_dim=5
    ),
    "halves, no latent of queries, wide values": LatentAttentionConfig(
        **{"num_heads": 3, "latent_dim": 6, "nope_dim": 2, "rope_dim": 4, "value_dim": 9},
        **{"rope_layout": "halves", "rope_theta": 30.0, "norm_epsilon": 0.1},
    ),
    "without positions, an odd shared part": LatentAttentionConfig(
        num_heads=2, latent_dim=7, nope_dim=4, rope_dim=3, value_dim=5, positions="none"
    ),
}
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1]], np.int32)


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def turn(x, positions, config):
    """RoPE as multiplication by complex numbers, in the layout of the weights, or nothing."""
    if config.positions == "none":
        return x
    frequencies = config.rope_theta ** (-2.0 * np.arange(config.rope_dim // 2) / config.rope_dim)
    turn_by = np.exp(1j * np.asarray(positions)[:, :, None] * frequencies).astype(np.complex64)
    half = config.rope_dim // 2
    parts = (x[..., :half], x[..., half:])
    if config.rope_layout == "interleaved":
        parts = (x[..., 0::2], x[..., 1::2])
    turned = jax.lax.complex(*parts) * turn_by
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def norm(x, gain, epsilon):
    return gain * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)


def _module(config: LatentAttentionConfig, width: int = WIDTH) -> LatentAttention:
    return config.build(LayerContext(embed_dim=width, heads=(config.heads,)), ExecutionConfig())


def _tokens(positions=None, segment_ids=None) -> TokenInputs:
    mask = jnp.ones((BATCH, LENGTH), bool)
    return TokenInputs(token_mask=mask, positions=positions, segment_ids=segment_ids)


def oracle(params, x, config, positions, segment_ids):
    """One head after the other, as the papers write it."""
    epsilon, width = config.norm_epsilon, config.nope_dim
    source = norm(x @ params["q_a"], params["q_norm"], epsilon) if "q_a" in params else x
    queries = params["q_b"] if "q_a" in params else params["q"]
    down = x @ params["kv_a"]
    latent = norm(down[..., : config.latent_dim], params["kv_norm"], epsilon)
    shared = turn(down[..., config.latent_dim :], positions, config)
    distance = positions[:, :, None] - positions[:, None, :]
    sees = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    result = 0.0
    for head in range(config.num_heads):
        q, kv = source @ queries[:, head], latent @ params["kv_b"][:, head]
        logits = q[..., :width] @ kv[..., :width].swapaxes(1, 2)
        logits += turn(q[..., width:], positions, config) @ shared.swapaxes(1, 2)
        logits = jnp.where(sees, logits / math.sqrt(config.nope_dim + config.rope_dim), -1e30)
        result += jax.nn.softmax(logits) @ kv[..., width:] @ params["o"][head]
    return result


@pytest.mark.parametrize("name", CASES)
def test_latent_attention_equals_oracle(name):
    config, is_packed = CASES[name], name == "interleaved"
    module = _module(config)
    x, cotangent = _normal(1, BATCH, LENGTH, WIDTH), _normal(2, BATCH, LENGTH, WIDTH)
    segments = SEGMENT_IDS if is_packed else np.ones((BATCH, LENGTH), np.int32)
    positions = POSITIONS if is_packed else np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    given = _tokens(jnp.asarray(positions), jnp.asarray(segments)) if is_packed else _tokens()
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, given, None)["params"]
    leaves, tree = jax.tree.flatten(nn.meta.unbox(shapes))
    values = [0.5 * _normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, values)

    def ours(params, x):
        out, aside = module.apply({"params": params}, x, given, None)
        assert aside.cache is None and aside.observations is None
        return jnp.sum(out * cotangent), out

    def theirs(params, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out = oracle(params, x, config, positions, segments)
        return jnp.sum(out * cotangent), out

    grads, out = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))(params, x)
    wanted_grads, wanted = jax.jit(jax.grad(theirs, argnums=(0, 1), has_aux=True))(params, x)
    assert_close(out, wanted, kind="attention")
    assert_close(grads, wanted_grads, kind="attention")


# A whole model: a dense layer first, shared experts, a length that two devices of a ring can share.
MODEL = ModelConfig(
    vocab_size=24,
    num_layers=2,
    embed_dim=16,
    attention=LatentAttentionConfig(
        num_heads=4, latent_dim=6, query_latent_dim=8, nope_dim=4, rope_dim=2, value_dim=4
    ),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, num_shared_experts=1),
    dense_layers=(0,),
    dense_dim=16,
)
ROWS, NEW = 4, 8


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)

    def value(row):
        return jnp.asarray(2.0 * rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5)

    return jax.tree.map(lambda w: w.astype(jnp.float32), parameter_table(MODEL).tree(value))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, 24, (ROWS, NEW)), jnp.int32)


@pytest.fixture(scope="module")
def whole(params, tokens):
    return jax.jit(lambda p, t: Transformer(MODEL).apply({"params": p}, t).logits)(params, tokens)


def test_cached_logits_equal_the_whole_forward(params, tokens, whole):
    """A prompt of three tokens, then one after the other."""
    execution = ExecutionConfig()

    @jax.jit
    def some(tokens, first, cache):
        places = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = jnp.broadcast_to(places, tokens.shape)
        output = Transformer(MODEL).apply(
            {"params": params}, tokens, positions=positions, cache=cache
        )
        return output.logits, output.cache

    cache = initial_cache(MODEL, execution, batch=ROWS, length=NEW)
    # Two layers, and of every token the latent and one key for RoPE: 6 + 2 values.
    assert sum(part.size for part in cache.values()) == 2 * ROWS * NEW * (6 + 2)
    logits, first = [], 0
    for number in (3, 1, 1, 1, 1, 1):
        found, cache = some(tokens[:, first : first + number], jnp.int32(first), cache)
        logits.append(found)
        first += number
    assert_close(jnp.concatenate(logits, axis=1), whole, kind="end_to_end")


MESHES = {
    "tensor2_data2": (MeshConfig(tensor=2, data=2), {}),
    "seq2_tensor2": (MeshConfig(seq=2, tensor=2), {"sequence_parallel": RingConfig()}),
}


def _on_mesh(name, params):
    config, changes = MESHES[name]
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    execution = ExecutionConfig(mesh=config, **changes)
    table = parameter_table(MODEL, rules=execution.axis_rules)
    return mesh, execution, table.tree(lambda row: NamedSharding(mesh, row.spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_latent_attention_on_meshes_gives_the_same_logits_and_gradients(name, params, tokens):
    """Heads over tensor; over seq the values are padded to the width of the keys."""

    def loss(execution):
        def run(params):
            output = Transformer(MODEL, execution).apply({"params": params}, tokens)
            chosen = jnp.sin(7.0 * jnp.arange(24, dtype=jnp.float32))[None, None, :]
            return jnp.mean(output.logits * chosen), output.logits

        return jax.jit(jax.grad(run, has_aux=True))

    wanted = loss(ExecutionConfig())(params)
    mesh, execution, shardings = _on_mesh(name, params)
    with jax.set_mesh(mesh):
        found = loss(execution)(jax.device_put(params, shardings))
    assert_close(jax.device_get(found), jax.device_get(wanted), kind="end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_latent_attention_on_meshes_gives_the_same_tokens(name, params, tokens):
    given = {"num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
    wanted = generate(MODEL, params, tokens[:, :4], **given)
    mesh, execution, shardings = _on_mesh(name, params)
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, shardings)
        found = generate(MODEL, spread, tokens[:, :4], execution=execution, **given)
    np.testing.assert_array_equal(found, wanted)


def test_flops_and_cache_bytes_of_deepseek_v3():
    """Products of DeepSeek-V3's attention, by hand; the cache is 71 times smaller than keys and
    values."""
    config = LatentAttentionConfig(
        **{"num_heads": 128, "latent_dim": 512, "query_latent_dim": 1536},
        **{"nope_dim": 128, "rope_dim": 64, "value_dim": 128},
    )
    model = ModelConfig(
        vocab_size=8, num_layers=1, embed_dim=7168, dense_dim=16, moe=None, attention=config
    )
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    table = parameter_table(model)
    others = 3 * 7168 * 16 + 8 * 7168
    assert matmul_parameters(model, table) == by_hand + others
    assert dense_parameters(model) == by_hand + others + 8 * 7168
    wanted = 6 * (by_hand + others) + 6 * 128 * (192 + 128) * 2048
    assert flops_per_token(model, table, 4096) == wanted
    assert 128 * (192 + 128) / config.cache_dim == pytest.approx(71.1, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_dim": 3}, "attention.rope_dim=3 must be even: RoPE turns pairs"),
        ({"latent_dim": 0}, "attention.latent_dim=0 must be above 0"),
        ({"query_latent_dim": 0}, "attention.query_latent_dim=0 must be above 0, or None"),
    ],
)
def test_bad_sizes_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        LatentAttentionConfig(**changes)


def test_cache_needs_positions_and_causality():
    module = _module(MODEL.attention, 16)
    x, positions = _normal(8, BATCH, LENGTH, 16), jnp.asarray(POSITIONS)
    entries = jnp.zeros((1, BATCH, LENGTH, 1, 8), jnp.float32)
    cache = LayerCache(entries=entries, layer=jnp.int32(0))
    with pytest.raises(ValueError, match="a cache needs positions"):
        jax.eval_shape(module.init, jax.random.key(0), x, _tokens(), cache)
    attention = dataclasses.replace(MODEL.attention, is_causal=False)
    module = _module(attention, 16)
    with pytest.raises(ValueError, match="without causality a token's latent changes"):
        jax.eval_shape(module.init, jax.random.key(0), x, _tokens(positions), cache)
