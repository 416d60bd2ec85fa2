# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parallel streams: one stream is the base, learned keys, weights, decoding, meshes, refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.parallel_streams import MergeStreams
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers import AttentionConfig, MambaConfig, ParallelStreamsConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.pipeline.stages import check_pipeline
from sharding import MeshConfig
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device
from tests.support.tolerances import assert_close

BATCH, LENGTH, VOCAB = 8, 6, 24
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
STREAMS = ParallelStreamsConfig(**HEADS, num_streams=3, prefix_length=5)
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    attention=STREAMS,
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
)


@functools.cache
def params_of(model=MODEL):
    def value(row):
        rng = np.random.default_rng(sum(map(ord, row.path)))
        scale = row.declaration.fan(0) ** -0.5
        return jnp.asarray(2.0 * scale * rng.standard_normal(row.shape), jnp.float32)

    return parameter_table(model).tree(value)


def tokens_of():
    drawn = np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH))
    return jnp.asarray(drawn, jnp.int32)


def with_attention(attention):
    return dataclasses.replace(MODEL, attention=attention)


@functools.cache
def logits_of(model):
    def run(params, tokens):
        return forward(model, ExecutionConfig(), params, tokens).logits

    return jax.jit(run)


def test_one_stream_without_learned_keys_is_the_base_bit_for_bit():
    alone = with_attention(dataclasses.replace(STREAMS, num_streams=1, prefix_length=0))
    base = with_attention(AttentionConfig(**HEADS))
    found = logits_of(alone)(params_of(alone), tokens_of())
    np.testing.assert_array_equal(found, logits_of(base)(params_of(base), tokens_of()))


@pytest.mark.slow
def test_equal_learned_keys_give_equal_streams():
    """Then the merge changes nothing: all weights sum to 1."""
    params = jax.tree.map(lambda leaf: leaf, params_of())
    for name in ("prefix_k", "prefix_v"):
        own = params["moe_blocks_0"]["attention"][name]
        params["moe_blocks_0"]["attention"][name] = jnp.broadcast_to(own[:, :1], own.shape)
    one = with_attention(dataclasses.replace(STREAMS, num_streams=1))
    alone = {**params, "merge_streams": params_of(one)["merge_streams"]}
    alone["moe_blocks_0"] = jax.tree.map(lambda leaf: leaf, params["moe_blocks_0"])
    for name in ("prefix_k", "prefix_v"):
        own = params["moe_blocks_0"]["attention"][name]
        alone["moe_blocks_0"]["attention"][name] = own[:, :1]
    found = logits_of(MODEL)(params, tokens_of())
    assert_close(found, logits_of(one)(alone, tokens_of()), "end_to_end")
    different = logits_of(MODEL)(params_of(), tokens_of())
    assert float(jnp.abs(different - found).max()) > 1e-2


def test_learned_keys_equal_a_softmax_over_all_keys():
    """Attention of one layer against plain NumPy-style softmax over [learned, tokens]."""
    config = dataclasses.replace(STREAMS, num_streams=2, qk_norm="none")
    layer = config.build(MODEL.context, ExecutionConfig())
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(rng.standard_normal((4, LENGTH, heads, 4)), jnp.float32) for heads in (4, 2, 2)
    )
    learned = [jnp.asarray(rng.standard_normal((2, 5, 2, 4)), jnp.float32) for _ in range(2)]

    def logits(keys):
        return jnp.einsum("bsnh,bunh->bnsu", q, jnp.repeat(keys, 2, axis=2)) / 2.0

    def weighted(weights, values):
        return jnp.einsum("bnsu,bunh->bsnh", weights, jnp.repeat(values, 2, axis=2))

    own = jnp.where(np.tri(LENGTH, dtype=bool), logits(k), -jnp.inf)
    lse = jax.nn.logsumexp(own, axis=-1)
    out = weighted(jax.nn.softmax(own, axis=-1), v)
    found, sums = layer._merge_learned(q, out, lse, *learned, batch_axes=())
    before = [jnp.tile(part, (2, 1, 1, 1)) for part in learned]
    whole = jnp.concatenate([logits(before[0]), own], axis=-1)
    wanted = weighted(jax.nn.softmax(whole, axis=-1), jnp.concatenate([before[1], v], axis=1))
    assert_close(found, wanted, "attention")
    assert_close(sums, jax.nn.logsumexp(whole, axis=-1), "attention")


def test_weights_are_at_least_the_smoothing_and_sum_to_one():
    module = MergeStreams(3, 0.3, 4, ExecutionConfig())
    rng = np.random.default_rng(4)
    params = {
        "first": jnp.asarray(20.0 * rng.standard_normal((3, 4, 4)), jnp.float32),
        "second": jnp.asarray(20.0 * rng.standard_normal((4, 3)), jnp.float32),
    }
    x = jnp.asarray(rng.standard_normal((6, 5, 4)), jnp.float32)
    y = module.apply({"params": params}, x)
    streams = np.asarray(x).reshape(2, 3, 5, 4)
    weights = np.stack(
        [
            np.linalg.lstsq(streams[b, :, s].T, np.asarray(y)[b, s], rcond=None)[0]
            for b, s in np.ndindex(2, 5)
        ]
    )
    assert_close(weights.sum(-1), np.ones(10), "other_length")
    assert weights.min() > 0.3 / 3 - 1e-4
    assert weights.min() < 0.3 / 3 + 1e-3 and weights.max() > 0.7, "logits are large"


@pytest.mark.slow
def test_decoding_step_by_step_equals_the_whole():
    execution, tokens = ExecutionConfig(), tokens_of()

    @jax.jit
    def step(params, tokens, positions, cache):
        output = forward(MODEL, execution, params, tokens, positions=positions, cache=cache)
        return output.logits, output.cache

    cache, found, first = initial_cache(MODEL, execution, batch=BATCH, length=LENGTH), [], 0
    for count in (4, 1, 1):
        positions = jnp.broadcast_to(first + jnp.arange(count, dtype=jnp.int32), (BATCH, count))
        logits, cache = step(params_of(), tokens[:, first : first + count], positions, cache)
        found.append(logits)
        first += count
    whole = logits_of(MODEL)(params_of(), tokens)
    assert_close(jnp.concatenate(found, axis=1), whole, "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data4_tensor2", "replica2_data2_expert2"])
def test_streams_are_the_same_on_every_mesh(mesh):
    """One layer: behind two, noise of 1e-7 in the parameters changes gradients by 2e-4."""
    model = dataclasses.replace(MODEL, num_layers=1)
    assert_close(on_mesh(model, mesh, "fully_sharded"), on_one_device(model), "end_to_end")


def test_layers_are_counted_once_for_each_stream():
    plain = with_attention(AttentionConfig(**HEADS))
    bare = with_attention(dataclasses.replace(STREAMS, prefix_length=0))
    flops = [flops_per_token(model, parameter_table(model), 16) for model in (bare, plain)]
    head = 6 * VOCAB * MODEL.embed_dim
    merge = 6 * (3 * 16 * 16 + 16 * 3)
    assert flops[0] - head - merge == pytest.approx(3 * (flops[1] - head))


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match="parallel streams pass through every layer"):
        dataclasses.replace(MODEL, layers=(LayerConfig(), LayerConfig(mixer=MambaConfig())))
    staged = ExecutionConfig(mesh=MeshConfig(stage=2))
    with pytest.raises(ValueError, match=r"merges its streams .* execution.mesh.stage=2"):
        check_pipeline(MODEL, staged, accumulation=2)
    with pytest.raises(ValueError, match="execution.halves=2 takes every other row"):
        forward(MODEL, ExecutionConfig(halves=2), {}, jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"attention.smoothing=2.0 must be between 0 and 1"):
        dataclasses.replace(STREAMS, smoothing=2.0)
