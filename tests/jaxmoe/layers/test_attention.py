# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention against an oracle of loops over heads and complex rotations, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import ForwardMultipliers, LayerContext
from jaxmoe.layers.mixers.attention import Attention, AttentionConfig
from jaxmoe.layers.records import LayerCache, TokenInputs
from jaxmoe.layers.rotary import rotary_angles, rotate
from sharding.sequence_parallel import KVCache
from tests.support.tolerances import assert_close

BATCH, LENGTH, WIDTH, HEAD = 2, 7, 16, 4

CASES = {
    "plain": AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=HEAD, qk_norm="none"),
    "grouped_segments": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=HEAD),
    "full_norm_gate": AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=HEAD, qk_norm="full", is_gated=True
    ),
    "one_kv_head_window_softcap_scale": AttentionConfig(
        num_heads=4, num_kv_heads=1, head_dim=HEAD, qk_norm="none", window=3, softcap=1.5
    ),
}
SCALES = {"one_kv_head_window_softcap_scale": 0.9}

SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 3, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0, 0, 1]], np.int32)


def _module(config: AttentionConfig, scale: float | None = None) -> Attention:
    multipliers = ForwardMultipliers(attention_scale=scale)
    context = LayerContext(embed_dim=WIDTH, multipliers=multipliers, heads=(config.heads,))
    return config.build(context, ExecutionConfig())


def _tokens(positions=None, segment_ids=None) -> TokenInputs:
    mask = jnp.ones((BATCH, LENGTH), bool)
    return TokenInputs(token_mask=mask, positions=positions, segment_ids=segment_ids)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _random_params(module: nn.Module, *inputs) -> dict:
    """Random values for every parameter, gains included, which start at 1."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    leaves, tree = jax.tree.flatten(nn.meta.unbox(shapes))
    values = [0.5 * _normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, values)


def turn(head, positions, theta: float):
    """RoPE of one head [B S H] as a rotation in the complex plane."""
    half = head.shape[-1] // 2
    frequencies = theta ** (-2.0 * np.arange(half) / head.shape[-1])
    turn_by = np.exp(1j * np.asarray(positions)[:, :, None] * frequencies).astype(np.complex64)
    turned = jax.lax.complex(head[..., :half], head[..., half:]) * turn_by
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def norm(x, gain):
    return gain * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def oracle(params, x, name, positions, segment_ids):
    """One head after the other."""
    config = CASES[name]
    scale = SCALES.get(name) or HEAD**-0.5
    queries, keys, values = (
        jnp.einsum("bsd,dnh->bsnh", x, params[weight]) for weight in ("q", "k", "v")
    )
    if config.qk_norm == "full":
        queries = norm(queries.reshape(*x.shape[:2], -1), params["q_norm"]).reshape(queries.shape)
        keys = norm(keys.reshape(*x.shape[:2], -1), params["k_norm"]).reshape(keys.shape)
    distance = positions[:, :, None] - positions[:, None, :]
    sees = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if config.window is not None:
        sees = sees & (distance < config.window)
    result = 0.0
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        q, k, v = queries[:, :, head], keys[:, :, shared], values[:, :, shared]
        if config.qk_norm == "head":
            q, k = norm(q, params["q_norm"]), norm(k, params["k_norm"])
        q, k = (turn(side, positions, config.rope_theta) for side in (q, k))
        logits = scale * q @ k.swapaxes(1, 2)
        if config.softcap is not None:
            logits = config.softcap * jnp.tanh(logits / config.softcap)
        out = jax.nn.softmax(jnp.where(sees, logits, -1e30)) @ v
        if config.is_gated:
            out = out * jax.nn.sigmoid(x @ params["gate"][:, head])[..., None]
        result = result + out @ params["o"][head]
    return result


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_oracle(name):
    module = _module(CASES[name], SCALES.get(name))
    x, cotangent = _normal(1, BATCH, LENGTH, WIDTH), _normal(2, BATCH, LENGTH, WIDTH)
    is_packed = "segments" in name
    segment_ids = SEGMENT_IDS if is_packed else np.ones((BATCH, LENGTH), np.int32)
    positions = POSITIONS if is_packed else np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    given = _tokens(jnp.asarray(positions), jnp.asarray(segment_ids)) if is_packed else _tokens()
    params = _random_params(module, x, given, None)

    def ours(params, x):
        out, aside = module.apply({"params": params}, x, given, None)
        assert aside.cache is None and aside.observations is None
        return jnp.sum(out * cotangent), out

    def theirs(params, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out = oracle(params, x, name, positions, segment_ids)
        return jnp.sum(out * cotangent), out

    grads, out = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))(params, x)
    wanted_grads, wanted = jax.jit(jax.grad(theirs, argnums=(0, 1), has_aux=True))(params, x)
    assert_close(out, wanted, kind="attention")
    assert_close(grads, wanted_grads, kind="attention")


@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_jax_nn(window):
    """Grouped heads and the window against jax.nn."""
    config = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=HEAD, qk_norm="none", window=window
    )
    module = _module(config)
    x = _normal(3, BATCH, LENGTH, WIDTH)
    params = _random_params(module, x, _tokens(), None)
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in ("q", "k", "v"))
    angles = rotary_angles(positions, HEAD, config.rope_theta)
    q, k = rotate(q, angles), rotate(k, angles)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        seen = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=seen)
    wanted = jnp.einsum("bsnh,nhd->bsd", out, params["o"])
    out, _ = module.apply({"params": params}, x, _tokens(), None)
    assert_close(out, wanted, kind="attention")


def test_rotation_equals_complex_numbers():
    x = _normal(4, BATCH, LENGTH, 3, 8)
    positions = jnp.asarray(POSITIONS) + 20
    turned = rotate(x, rotary_angles(positions, 8, 500.0))
    for head in range(3):
        wanted = turn(x[:, :, head], positions, 500.0)
        assert_close(turned[:, :, head], wanted, kind="attention")


def test_rotation_sees_only_distances():
    """Products of turned queries and keys depend on the difference of their positions."""
    q, k = _normal(5, 1, LENGTH, 1, 8), _normal(6, 1, LENGTH, 1, 8)

    def products(shift: int):
        angles = rotary_angles(jnp.asarray(POSITIONS[:1]) + shift, 8, 100.0)
        turned = rotate(q, angles), rotate(k, angles)
        return jnp.einsum("bsnh,bunh->bsu", *turned)

    assert_close(products(0), products(57), kind="attention")
    assert not np.allclose(products(0), jnp.einsum("bsnh,bunh->bsu", q, k), atol=0.1)


def test_rotation_keeps_lengths_and_the_dtype():
    x = _normal(7, BATCH, LENGTH, 2, 8).astype(jnp.bfloat16)
    turned = rotate(x, rotary_angles(jnp.asarray(POSITIONS), 8, 10_000.0))
    assert turned.dtype == jnp.bfloat16
    lengths = [np.linalg.norm(np.asarray(side, np.float32), axis=-1) for side in (x, turned)]
    np.testing.assert_allclose(*lengths, rtol=2**-7)  # half a step of bfloat16 in each component


def test_a_cache_without_positions_is_refused():
    module = _module(CASES["plain"])
    empty = jnp.zeros((1, BATCH, LENGTH, 2, HEAD), jnp.float32)
    cache = LayerCache(entries=KVCache(k=empty, v=empty), layer=jnp.int32(0))
    x, positions = _normal(8, BATCH, LENGTH, WIDTH), jnp.asarray(POSITIONS)
    with pytest.raises(ValueError, match="a cache needs positions"):
        jax.eval_shape(module.init, jax.random.key(0), x, _tokens(), cache)
    with pytest.raises(ValueError, match="cannot hold packed segments"):
        segments = jnp.asarray(SEGMENT_IDS)
        jax.eval_shape(module.init, jax.random.key(0), x, _tokens(positions, segments), cache)
