# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""UltraMemV2: its two passes against all scores, its initial size, the rows it touches, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.huggingface.export import suggest_family
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.depth.product_keys import (
    choose_among_all,
    choose_entries,
    expected_norm,
    leading_directions,
    score_keys,
)
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import UltraMemConfig
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.models.config import LayerConfig
from jaxmoe.models.flops import matmul_parameters
from jaxmoe.scaling import PARAMETERIZATIONS, BasePoint, Budget
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device
from tests.support.meshes import EXECUTIONS
from tests.support.models import TINY, WIDE, WIDE_LENGTH, tokens_for
from tests.support.one_step import stepped
from tests.support.tolerances import assert_close

CONFIG = UltraMemConfig(hidden_dim=32, num_keys=8, top_k=3, num_heads=2, key_dim=6, value_dim=8)
MODEL = dataclasses.replace(TINY, moe=None, layers=(LayerConfig(feed_forward=CONFIG),))
TOKENS, KEYS, TOP_K = 5, 16, 4


def scores_of(seed, *, has_sign=True):
    drawn = np.random.default_rng(seed).standard_normal((2, TOKENS, KEYS, 2)).astype(np.float32)
    rows, columns = jnp.asarray(drawn if has_sign else np.abs(drawn))
    return rows, columns


def both_ways(rows, columns, core, top_k):
    """Entries, scores and gradients of the two passes and of all scores."""

    def run(choose, rows, columns, core):
        (ids, scores), back = jax.vjp(lambda *given: choose(*given, top_k), rows, columns, core)
        zeros = np.zeros(ids.shape, jax.dtypes.float0)
        return ids, scores, back((zeros, jnp.cos(jnp.arange(scores.size).reshape(scores.shape))))

    run = jax.jit(run, static_argnums=0)
    return run(choose_entries, rows, columns, core), run(choose_among_all, rows, columns, core)


@pytest.mark.parametrize("seed", range(4))
def test_two_passes_equal_all_scores_with_a_core_of_rank_one(seed):
    left, right = np.abs(np.random.default_rng(seed).standard_normal((2, 2, 1)))
    core = jnp.asarray(left @ right.T, jnp.float32)
    found, wanted = both_ways(*scores_of(seed, has_sign=False), core, TOP_K)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert_close(found[1:], wanted[1:], "matmul")


def test_two_passes_equal_all_scores_with_every_key():
    core = jnp.asarray([[0.3, -1.0], [0.8, 0.4]], jnp.float32)
    found, wanted = both_ways(*scores_of(9), core, KEYS)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert_close(found[1:], wanted[1:], "matmul")


def test_two_passes_lose_products_of_two_scores_below_zero():
    """A core of rank 1, and more than K first scores above 0 on both sides: 9 is found, 25 best."""
    first = jnp.asarray([3.0, 2.0, 1.0, -5.0], jnp.float32)
    sides = jnp.stack([first, jnp.zeros(4)], axis=-1)[None]
    core = jnp.asarray([[1.0, 0.0], [0.0, 0.0]])
    found, wanted = choose_entries(sides, sides, core, 2), choose_among_all(sides, sides, core, 2)
    np.testing.assert_array_equal(found[1], [[9.0, 6.0]])
    np.testing.assert_array_equal(wanted[1], [[25.0, 9.0]])


def test_two_passes_of_a_full_core_can_differ_from_all_scores():
    """Else the tests of rank 1 would prove nothing."""
    found, wanted = both_ways(*scores_of(1), jnp.asarray([[0.1, 1.0], [-1.0, 0.2]]), TOP_K)
    assert (np.asarray(found[0]) != np.asarray(wanted[0])).any()


@pytest.mark.parametrize("seed", range(3))
def test_leading_directions_are_those_of_the_decomposition(seed):
    core = np.random.default_rng(seed).standard_normal((2, 2)).astype(np.float32)
    left, right = map(np.asarray, leading_directions(jnp.asarray(core)))
    u, sigma, v = np.linalg.svd(core)
    wanted = sigma[0] * np.outer(u[:, 0], v[0])
    assert_close(sigma[0] * np.outer(left, right), wanted, "matmul")
    assert left.sum() + right.sum() >= 0.0


@functools.cache
def fresh(config, width=64, name="standard"):
    model = dataclasses.replace(MODEL, embed_dim=width, layers=(LayerConfig(feed_forward=config),))
    rules = PARAMETERIZATIONS[name]().build(
        model,
        Budget(tokens=10**6, batch_tokens=10**3),
        BasePoint(embed_dim=width, num_layers=2, tokens=10**6, batch_tokens=10**3),
    )
    params = init_params(rules.model, jax.random.key(0), parameterization=rules)
    stacked = params["ultra_mem_blocks_0"]["memory_layer"]
    return rules.model, jax.tree.map(lambda leaf: leaf[0], stacked)


@functools.cache
def applied(config):
    model, _ = fresh(config)
    layer = config.build(model.context, ExecutionConfig(), train=True)
    dense = FeedForward(model.embed_dim, config.hidden_dim, ExecutionConfig())

    def terms(params, x):
        fed = dense.apply({"params": params["feed_forward"]}, x)[0]
        return layer.apply({"params": params}, x)[0] - fed, fed

    return jax.jit(terms)


def rms(x):
    return float(jnp.sqrt(jnp.mean(x * x)))


@pytest.mark.parametrize("num_heads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_initial_output_is_as_large_as_that_of_the_feed_forward(num_heads):
    config = UltraMemConfig(
        hidden_dim=256, num_keys=64, top_k=8, num_heads=num_heads, key_dim=32, value_dim=64
    )
    x = jax.random.normal(jax.random.key(1), (16, 64, 64))
    memory, fed = applied(config)(fresh(config)[1], x)
    assert rms(memory) == pytest.approx(rms(fed), rel=0.1)


def test_memory_equals_a_sum_over_all_pairs_of_keys():
    """The reference reads every value, those that are not chosen with weight 0."""
    _, params = fresh(CONFIG)
    x = jax.random.normal(jax.random.key(2), (2, 3, 64))
    query = (x @ params["query"]).reshape(2, 3, CONFIG.num_heads, 2, CONFIG.key_dim)
    rows, columns = score_keys(query, params["keys"], 1e-6)
    ids, scores = choose_entries(rows, columns, params["core"] / 2, CONFIG.top_k)
    chosen = jax.nn.one_hot(ids, CONFIG.num_keys**2) * scores[..., None]
    weights = chosen.sum((2, 3)) * ((x @ params["project"]) @ params["inputs"].T)
    scale = np.sqrt(0.35578 * CONFIG.value_dim / CONFIG.num_heads)
    scale /= expected_norm(CONFIG.num_keys, CONFIG.top_k)
    wanted = jnp.float32(scale) * (weights @ params["values"]) @ params["out"]
    assert_close(applied(CONFIG)(params, x)[0], wanted, "end_to_end")


def test_gradients_touch_only_the_rows_that_were_read():
    _, params = fresh(CONFIG)
    x = jax.random.normal(jax.random.key(3), (1, 2, 64))
    gradient = jax.grad(lambda p: jnp.sum(jnp.sin(applied(CONFIG)(p, x)[0])))(params)
    query = (x @ params["query"]).reshape(1, 2, CONFIG.num_heads, 2, CONFIG.key_dim)
    ids, _ = choose_entries(*score_keys(query, params["keys"], 1e-6), params["core"], CONFIG.top_k)
    read = set(np.asarray(ids).ravel().tolist())
    assert 0 < len(read) < CONFIG.num_keys**2
    for name in ("inputs", "values"):
        assert set(np.flatnonzero(np.abs(gradient[name]).sum(-1)).tolist()) == read
    assert all(float(jnp.abs(gradient[name]).max()) > 0 for name in ("keys", "core", "query"))


CUT = [
    ("data4_tensor2", "fully_sharded"),
    ("replica2_data2_expert2", "data_parallel"),
    ("replica2_data2_expert2", "hierarchical"),
    ("data8", "fully_sharded"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rules"), CUT)
def test_a_cut_table_equals_a_whole_one(mesh, rules):
    assert_close(on_mesh(MODEL, mesh, rules), on_one_device(MODEL), "end_to_end")


@pytest.mark.large
@pytest.mark.parametrize("name", ["data2_expert2_tensor2", "fold_expert4_tensor"])
def test_a_cut_table_beside_experts_equals_a_whole_one(name):
    """A step of a period of experts and memory, also on a folded mesh."""
    layers = (LayerConfig(), LayerConfig(feed_forward=CONFIG))
    model = dataclasses.replace(WIDE, layers=layers)
    tokens, targets = map(np.asarray, tokens_for(model, length=WIDE_LENGTH))
    weights = np.ones(tokens.shape, np.float32)
    rows = Batch(tokens=tokens, targets=targets, loss_weights=weights)
    found = [stepped(model, rows, execution=one) for one in (EXECUTIONS[name], None)]
    mine, wanted = ((metrics.loss, state.params) for state, metrics in found)
    assert_close(mine, wanted, "end_to_end")


def test_no_family_of_transformers_has_a_memory():
    with pytest.raises(CheckpointError, match="model.layers with the feed-forward ultra_mem"):
        suggest_family(MODEL)


def test_a_token_counts_the_rows_that_it_reads():
    table = parameter_table(MODEL)
    values = [row for row in table if row.declaration.role == "memory_value"]
    held = sum(row.size for row in values)
    read = MODEL.num_layers * 2 * CONFIG.num_heads * CONFIG.top_k * CONFIG.value_dim
    assert held == MODEL.num_layers * 2 * CONFIG.num_keys**2 * CONFIG.value_dim
    assert table.total - table.active(0, 0) == held - read
    others = sum(row.size for row in table if row.declaration.role not in ("norm", "embedding"))
    assert matmul_parameters(MODEL, table) == others - held + read
    assert CONFIG.sizes.read_dim * MODEL.num_layers == read


@pytest.mark.parametrize("name", PARAMETERIZATIONS)
def test_every_parameterization_has_rows_for_keys_and_values(name):
    model, params = fresh(CONFIG, name=name)
    assert np.std(params["values"]) == pytest.approx(CONFIG.value_dim**-0.5, rel=0.1)
    assert 0.0 < np.std(params["keys"]) < 1.0


def test_more_values_than_pairs_of_keys_are_refused():
    with pytest.raises(ValueError, match=r"ultra_mem.top_k=9 must be at most .*num_keys=8"):
        dataclasses.replace(CONFIG, top_k=9)
