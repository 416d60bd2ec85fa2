# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: its choice by loops, one query and many, pieces, caches, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe import generate
from jaxmoe.contrib.family_layers import lightning_indexer
from jaxmoe.contrib.family_layers.lightning_indexer import IndexedKeys, IndexQueries, attend_chosen
from jaxmoe.contrib.family_layers.sparse_latent import SparseLatentConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import TokenInputs
from jaxmoe.models.config import LatentAttentionConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import parameter_table
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device, values_of
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

ON_ONE = ExecutionConfig()
LATENT = LatentAttentionConfig(
    num_heads=4, latent_dim=16, query_latent_dim=8, nope_dim=6, rope_dim=4, value_dim=8
)
CONFIG = SparseLatentConfig(latent=LATENT, index_heads=5, index_dim=8, index_top_k=3)
MODEL = dataclasses.replace(TINY, attention=CONFIG)
BATCH, ROW, TOP_K, SCALE = 2, 9, 3, 0.4


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs_of(queries=ROW, groups=2):
    """Queries, index queries, and keys of two heads that have `groups` query heads each."""
    index = IndexQueries(drawn(1, BATCH, queries, 5, 4), drawn(2, BATCH, queries, 5))
    keys = IndexedKeys(
        drawn(3, BATCH, ROW, 4), drawn(4, BATCH, ROW, 2, 6), drawn(5, BATCH, ROW, 2, 3)
    )
    return drawn(0, BATCH, queries, 2 * groups, 6), index, keys


def by_loops(q, index, keys, is_seen):
    """Each query alone: its scores by loops over heads and keys, its keys by sorting."""
    q, index, keys = jax.tree.map(np.asarray, (q, index, keys))
    out = np.zeros((*q.shape[:3], keys.v.shape[-1]), np.float32)
    for b, s in np.ndindex(q.shape[:2]):
        scores = {}
        for u in np.flatnonzero(is_seen[b, s]):
            products = [index.q[b, s, j] @ keys.index[b, u] for j in range(5)]
            terms = [w * max(p, 0.0) for w, p in zip(index.weights[b, s], products, strict=True)]
            scores[u] = sum(terms) / np.sqrt(5 * 4)
        chosen = sorted(scores, key=lambda u: (-scores[u], u))[:TOP_K]
        for n in range(q.shape[2]):
            m = n // (q.shape[2] // 2)
            logits = np.array([q[b, s, n] @ keys.k[b, u, m] for u in chosen]) * SCALE
            weights = np.exp(logits - logits.max())
            values = np.stack([keys.v[b, u, m] for u in chosen])
            out[b, s, n] = weights / weights.sum() @ values
    return out


def causal(places):
    return places[:, :, None] >= jnp.arange(ROW)[None, None]


@pytest.mark.parametrize("queries", [ROW, 1], ids=["a row", "one query"])
def test_attention_is_to_the_keys_of_largest_scores(queries):
    q, index, keys = inputs_of(queries)
    places = jnp.broadcast_to(jnp.arange(ROW - queries, ROW), (BATCH, queries))
    out = jax.jit(lambda *arrays: attend_chosen(*arrays, causal, places, top_k=TOP_K, scale=SCALE))(
        q, index, keys
    )
    assert_close(out, by_loops(q, index, keys, np.asarray(causal(places))), "matmul")


def test_pieces_of_queries_change_neither_values_nor_gradients(monkeypatch):
    q, index, keys = inputs_of()
    places = jnp.broadcast_to(jnp.arange(ROW), (BATCH, ROW))

    def results(size):
        monkeypatch.setattr(lightning_indexer, "_QUERIES", size)

        def loss(q, keys):
            out = attend_chosen(q, index, keys, causal, places, top_k=TOP_K, scale=SCALE)
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(q, keys)

    assert_close(results(4), results(128), "matmul")


def test_the_gradient_is_that_of_attention_to_the_chosen_keys():
    """Dense softmax with the mask of the choice; index keys have no gradient."""
    q, index, keys = inputs_of()
    is_seen = np.asarray(causal(jnp.broadcast_to(jnp.arange(ROW), (BATCH, ROW))))
    scores = np.where(is_seen, lightning_indexer.index_scores(index, keys.index), -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
    is_chosen = np.zeros_like(is_seen)
    np.put_along_axis(is_chosen, order, True, axis=-1)
    is_chosen &= is_seen

    def dense(q, keys):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (keys.k, keys.v))
        logits = jnp.einsum("bsnh,bunh->bnsu", q, k) * jnp.float32(SCALE)
        weights = jax.nn.softmax(jnp.where(is_chosen[:, None], logits, -jnp.inf), axis=-1)
        return jnp.einsum("bnsu,bunh->bsnh", weights, v)

    def sparse(q, keys):
        places = jnp.broadcast_to(jnp.arange(ROW), (BATCH, ROW))
        return attend_chosen(q, index, keys, causal, places, top_k=TOP_K, scale=SCALE)

    def gradient(run):
        loss = jax.value_and_grad(lambda q, keys: jnp.sum(jnp.sin(run(q, keys))), argnums=(0, 1))
        return jax.jit(loss)(q, keys)

    ours = gradient(sparse)
    assert_close(ours, gradient(dense), "matmul")
    assert not np.any(ours[1][1].index)


def test_as_many_keys_as_tokens_are_latent_attention():
    config = dataclasses.replace(CONFIG, index_top_k=7)
    tokens = TokenInputs(token_mask=jnp.ones((2, 7), bool))
    x = drawn(6, 2, 7, 16)
    layer = config.build(MODEL.context, ON_ONE)
    params = nn.meta.unbox(layer.init(jax.random.key(1), x, tokens, None))["params"]
    dense = {name: leaf for name, leaf in params.items() if not name.startswith("index_")}

    def loss(module, params):
        def run(params):
            return jnp.sum(jnp.sin(3.0 * module.apply({"params": params}, x, tokens, None)[0]))

        return jax.jit(jax.value_and_grad(run))(params)

    value, gradients = loss(layer, params)
    assert not any(np.asarray(gradients.pop(name)).any() for name in params.keys() - dense)
    assert_close((value, gradients), loss(LATENT.build(MODEL.context, ON_ONE), dense), "matmul")


def test_tokens_from_a_cache_are_those_of_whole_passes():
    params = values_of(MODEL)
    prompts = tokens_for(MODEL)[0][:2]
    greedy = {"num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
    tokens = generate(MODEL, params, prompts, **greedy)
    rows = jnp.concatenate([prompts, tokens], axis=1)
    logits = Transformer(MODEL).apply({"params": params}, rows).logits
    np.testing.assert_array_equal(logits[:, LENGTH - 1 : -1].argmax(-1), tokens)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"latent": dataclasses.replace(LATENT, query_latent_dim=None)}, "query_latent_dim=None"),
        ({"latent": dataclasses.replace(LATENT, is_causal=False)}, "latent.is_causal=False"),
        ({"index_dim": 3}, "attention.index_dim=3 must be at least attention.latent.rope_dim=4"),
        ({"index_top_k": 0}, "attention.index_top_k=0 must be above 0"),
    ],
)
def test_an_indexer_that_cannot_choose_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(CONFIG, **changes)


def test_projections_count_those_of_the_indexer():
    names = ("q_a", "q_b", "kv_a", "kv_b", "o", "index_q", "index_k", "index_weights")
    paths = {f"moe_blocks_0/attention/{name}" for name in names}
    size = sum(row.size for row in parameter_table(MODEL) if row.path in paths)
    assert size == MODEL.num_layers * CONFIG.projection_parameters(MODEL.embed_dim)


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "rules"), [("data4_tensor2", "fully_sharded"), ("replica2_data2_expert2", "nested")]
)
def test_a_mesh_changes_neither_loss_nor_gradients(mesh, rules):
    assert_close(on_mesh(MODEL, mesh, rules), on_one_device(MODEL), "end_to_end")
