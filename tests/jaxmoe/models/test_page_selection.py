# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding with pages of the cache: all pages, few pages, meshes, and models without pages."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.layers.mixers import MambaConfig
from jaxmoe.models.cache import bytes_read, initial_cache
from jaxmoe.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import cache_length, generate
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.measures.decoded_loss import compare_readings
from sharding import MeshConfig, make_mesh
from sharding.sequence_parallel import (
    WHOLE_CACHE,
    AllGatherKVConfig,
    KVCache,
    PageSelectionConfig,
)

BATCH, PROMPT, NEW = 2, 40, 6
# Every expert computes for every token: no token changes its experts by a hair.
MODEL = ModelConfig(
    vocab_size=24,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
    moe=MoEConfig(num_experts=2, top_k=2, expert_dim=8),
)
ONE = ExecutionConfig()
SLOTS = cache_length(PROMPT, NEW)
FEW = PageSelectionConfig(kept=2, size=4, latest=1)
ALL = dataclasses.replace(FEW, kept=SLOTS // 4 - 2)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)

    def value(row):
        drawn = 2.0 * rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5
        return jnp.asarray(drawn, jnp.float32)

    return parameter_table(MODEL).tree(value)


@pytest.fixture(scope="module")
def prompt():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, MODEL.vocab_size, (BATCH, PROMPT)), jnp.int32)


def greedy(params, prompt, reading, execution=ONE):
    return generate(
        MODEL,
        params,
        prompt,
        num_tokens=NEW,
        key=jax.random.key(0),
        temperature=0.0,
        execution=WholeRowsConfig.of(execution, reading),
    )


def held_out(prompt):
    return Batch(
        tokens=np.asarray(prompt),
        targets=np.roll(np.asarray(prompt), -1, axis=1),
        loss_weights=np.ones(prompt.shape, np.float32),
    )


def test_all_pages_give_bitwise_the_loss_of_the_whole_cache_and_few_another(params, prompt):
    assert ALL.reads_all(SLOTS) and not FEW.reads_all(SLOTS)

    def losses(reading):
        given = {"execution": ONE, "reading": reading}
        return compare_readings(MODEL, params, None, [held_out(prompt)], **given)

    found = losses(ALL)
    assert found.selected == found.complete and found.complete.num_tokens == BATCH * PROMPT // 2
    few = losses(FEW)
    assert few.complete == found.complete
    assert 1e-4 < abs(few.selected.nats_per_token - few.complete.nats_per_token) < 1.0


def test_all_pages_write_the_tokens_of_the_whole_cache(params, prompt):
    wanted = greedy(params, prompt, WHOLE_CACHE)
    np.testing.assert_array_equal(greedy(params, prompt, ALL), wanted)
    written = greedy(params, prompt, dataclasses.replace(FEW, evicted_share=0.5))
    assert written.shape == wanted.shape and (np.asarray(written) < MODEL.vocab_size).all()


def test_few_pages_read_fewer_bytes():
    taken, whole = (
        bytes_read(MODEL, WholeRowsConfig.of(ONE, reading), SLOTS) for reading in (FEW, WHOLE_CACHE)
    )
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    assert whole == SLOTS * token
    assert taken == 4 * 4 * token + SLOTS // 4 * 2 * 8 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data2_seq2", "seq2_tensor2"])
def test_a_spread_cache_gives_the_same_tokens(params, prompt, name):
    sizes = {"data2_seq2": MeshConfig(data=2, seq=2), "seq2_tensor2": MeshConfig(seq=2, tensor=2)}
    config, reading = sizes[name], dataclasses.replace(FEW, evicted_share=0.25)
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    execution = dataclasses.replace(ONE, mesh=config, sequence_parallel=AllGatherKVConfig())
    table = parameter_table(MODEL, rules=execution.axis_rules)
    spread = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        found = greedy(spread, prompt, reading, execution)
        losses = compare_readings(
            MODEL, spread, None, [held_out(prompt)], execution=execution, reading=reading
        )
    np.testing.assert_array_equal(found, greedy(params, prompt, reading))
    one = compare_readings(MODEL, params, None, [held_out(prompt)], execution=ONE, reading=reading)
    for part in ("selected", "complete"):
        found, wanted = getattr(losses, part), getattr(one, part)
        assert found.nats_per_token == pytest.approx(wanted.nats_per_token, rel=1e-5)


def test_models_without_pages_are_refused(params, prompt):
    latent = LatentAttentionConfig(num_heads=2, latent_dim=8, nope_dim=8, rope_dim=4)
    for mixer in (latent, MambaConfig()):
        model = dataclasses.replace(MODEL, attention=mixer)
        with pytest.raises(ValueError, match=r"reading:pages .* 'grouped_query' attention"):
            initial_cache(model, WholeRowsConfig.of(ONE, FEW), batch=1, length=8)
    packed = dataclasses.replace(held_out(prompt), segment_ids=np.ones(prompt.shape, np.int32))
    with pytest.raises(ValueError, match="rows hold several documents"):
        compare_readings(MODEL, params, None, [packed], execution=ONE, reading=FEW)


def test_attention_without_a_selection_has_a_plain_cache():
    cache = initial_cache(MODEL, WholeRowsConfig.of(ONE), batch=1, length=8)
    assert all(isinstance(part, KVCache) for part in cache.values())
