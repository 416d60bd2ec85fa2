# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two sizes: given patterns against plain models, draws, the budget, the oracle of all patterns."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.doctor.devices import tiny_config
from jaxmoe.contrib.depth.size_oracle import find_oracle
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import DenseConfig, TwoSizesConfig
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.models.config import LayerConfig
from jaxmoe.models.transformer import forward
from jaxmoe.run.assemble import assemble
from jaxmoe.run.measures import details_of
from jaxmoe.scaling.initialize import parameter_table
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device
from tests.support.models import BATCH, LENGTH, TINY, tokens_for
from tests.support.one_step import stepped
from tests.support.tolerances import assert_close

RANDOM = TwoSizesConfig(big_dim=24, small_dim=8, options="skip_small_big")
ROUTED = dataclasses.replace(RANDOM, choice="router", target=0.25, budget_weight=2.0)


def with_sizes(config):
    return dataclasses.replace(TINY, moe=None, layers=(LayerConfig(feed_forward=config),))


MODEL = with_sizes(ROUTED)


@functools.cache
def params_of(model):
    def value(row):
        rng = np.random.default_rng(sum(map(ord, row.path)))
        scale = row.declaration.fan(0) ** -0.5
        return jnp.asarray(2.0 * scale * rng.standard_normal(row.shape), jnp.float32)

    return parameter_table(model).tree(value)


@functools.cache
def logits_of(model, *, train=False):
    def run(params, tokens, pattern, key):
        context = {} if pattern is None else {"size_pattern": pattern}
        output = forward(
            model, ExecutionConfig(), params, tokens, context=context, train=train, key=key
        )
        return output.logits, output.losses

    return jax.jit(run)


@pytest.mark.parametrize(("size", "digit"), [("small", 1), ("big", 2)])
def test_a_pattern_of_one_size_is_the_plain_model(size, digit):
    params, (tokens, _) = params_of(MODEL), tokens_for(MODEL)
    pattern = jnp.full(tokens.shape, digit * 3 + digit, jnp.int32)
    found = logits_of(MODEL)(params, tokens, pattern, None)[0]
    hidden = getattr(ROUTED, f"{size}_dim")
    plain = with_sizes(DenseConfig(hidden_dim=hidden))
    blocks = dict(params["two_sizes_blocks_0"])
    blocks["feed_forward"] = blocks["feed_forward"][size]
    own = {key: value for key, value in params.items() if key != "two_sizes_blocks_0"}
    wanted = logits_of(plain)(own | {"dense_blocks_0": blocks}, tokens, None, None)[0]
    assert_close(found, wanted, "end_to_end")


def test_a_pattern_without_computation_skips_the_feed_forward():
    params, (tokens, _) = params_of(MODEL), tokens_for(MODEL)
    skipped = jnp.zeros(tokens.shape, jnp.int32)
    found = logits_of(MODEL)(params, tokens, skipped, None)[0]
    other = jax.tree.map(lambda leaf: leaf, params)
    other["two_sizes_blocks_0"]["feed_forward"] = jax.tree.map(
        jnp.zeros_like, params["two_sizes_blocks_0"]["feed_forward"]
    )
    assert_close(found, logits_of(MODEL)(other, tokens, skipped + 8, None)[0], "end_to_end")


def test_training_draws_each_option_equally_often():
    """The layer alone: its output is that of one option, with factor 1."""
    params = jax.tree.map(
        lambda leaf: leaf[0], params_of(with_sizes(RANDOM))["two_sizes_blocks_0"]["feed_forward"]
    )
    shape = (64, 64)
    x = jax.random.normal(jax.random.key(0), (*shape, TINY.embed_dim))
    index = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)

    @jax.jit
    def run(context, key):
        layer = RANDOM.build(TINY.context, ExecutionConfig(), train=True)
        routing = RoutingInputs(
            token_mask=jnp.ones(shape, bool),
            segment_ids=jnp.ones(shape, jnp.int32),
            router_state={},
            key=key,
            layer=jnp.int32(0),
            context=context,
        )
        return layer.apply({"params": params}, x, routing)[0]

    ways = [
        run({"index": index, "size_pattern": jnp.full(shape, size, jnp.int32)}, jax.random.key(0))
        for size in range(3)
    ]
    y = run({"index": index}, jax.random.key(1))
    taken = jnp.stack([jnp.abs(y - way).max(axis=-1) < 1e-6 for way in ways])
    assert (taken.sum(axis=0) == 1).all()
    shares = np.asarray(taken.mean(axis=(1, 2)))
    assert np.abs(shares - 1 / 3).max() < 5 * np.sqrt(2 / 9 / index.size)


def test_the_budget_loss_is_zero_at_the_target_and_grows_away_from_it():
    mask = jnp.asarray([[True, True, False]])
    at = ROUTED.budget_loss(jnp.asarray([[0.1, 0.4, 0.9]]), mask)
    assert float(at) == pytest.approx(0.0, abs=1e-14)
    away = ROUTED.budget_loss(jnp.asarray([[0.5, 0.7, 0.0]]), mask)
    assert float(away) == pytest.approx(2.0 * (0.6 - 0.25) ** 2)


@pytest.mark.slow
def test_the_loss_of_a_step_has_the_budget_and_no_share_of_micro_batches():
    """Two micro-batches of one repeated row have the loss of one micro-batch."""
    tokens, targets = map(np.asarray, tokens_for(MODEL))
    same = [np.repeat(part[:1], BATCH, axis=0) for part in (tokens, targets)]
    rows = Batch(
        tokens=same[0],
        targets=same[1],
        loss_weights=np.ones(same[0].shape, np.float32),
        segment_ids=np.ones(same[0].shape, np.int32),
    )
    losses = [float(stepped(MODEL, rows, parts=parts)[1].losses["size_budget"]) for parts in (1, 2)]
    assert losses[0] > 0 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data4_tensor2", "replica2_data2_expert2"])
def test_sizes_are_the_same_on_every_mesh(mesh):
    assert_close(on_mesh(MODEL, mesh, "fully_sharded"), on_one_device(MODEL), "end_to_end")


def test_the_oracle_is_the_best_of_all_patterns():
    """Against a search by sequence in plain Python; never worse with more budget, nor than the
    router."""
    tokens, targets = map(np.asarray, tokens_for(MODEL))
    weights = np.ones(tokens.shape, np.float32)
    weights[:, 4:] = 0.0
    batch = Batch(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        segment_ids=np.ones(tokens.shape, np.int32),
    )
    found = find_oracle(MODEL, params_of(MODEL), batch)
    assert found.losses.shape == (9, BATCH)
    curve = found.oracle()
    wanted = np.full((3, BATCH), np.inf)
    for low, high in itertools.product(range(3), repeat=2):
        pattern = jnp.full(tokens.shape, low + 3 * high, jnp.int32)
        logits = logits_of(MODEL)(params_of(MODEL), jnp.asarray(tokens), pattern, None)[0]
        logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        nll = -np.take_along_axis(logs, targets[..., None], axis=-1)[:, :4, 0].mean(axis=1)
        for budget in range((low == 2) + (high == 2), 3):
            wanted[budget] = np.minimum(wanted[budget], nll)
    assert_close(curve, wanted.mean(axis=1), "end_to_end")
    assert (np.diff(curve) <= 0).all() and curve[0] > curve[-1]
    loss, _ = found.router()
    big = found.num_big[found.preferred]
    assert len(np.unique(found.preferred)) > 1
    for budget in range(3):
        if (big <= budget).all():
            assert curve[budget] <= loss
    best = [found.losses[found.num_big <= one].min(axis=0)[row] for row, one in enumerate(big)]
    assert (np.array(best) <= found.losses[found.preferred, np.arange(BATCH)]).all()
    assert [row["budget"] for row in found.rows()] == [0, 1, 2]


def test_what_has_no_sizes_is_refused():
    ids = np.ones((1, LENGTH), np.int32)
    batch = Batch(tokens=ids, targets=ids, loss_weights=ids.astype(np.float32))
    with pytest.raises(ValueError, match="an oracle of sizes tries 1 options"):
        find_oracle(with_sizes(DenseConfig()), {}, batch)
    with pytest.raises(ValueError, match=r"two_sizes.target=1.5 must be between 0 and 1"):
        dataclasses.replace(ROUTED, target=1.5)
    with pytest.raises(ValueError, match="two_sizes.choice=random draws in training"):
        tokens, _ = tokens_for(MODEL)
        logits_of(with_sizes(RANDOM), train=True)(params_of(with_sizes(RANDOM)), tokens, None, None)


@pytest.mark.slow
def test_evaluation_has_a_row_for_each_budget():
    config = tiny_config(1)
    model = dataclasses.replace(config.model, moe=None, layers=MODEL.layers)
    config = dataclasses.replace(
        config, model=model, evaluation=dataclasses.replace(config.evaluation, batches=1)
    )
    assembly = assemble(config, devices=jax.devices()[:1])
    with jax.set_mesh(assembly.mesh):
        rows = details_of(assembly.plan.model).rows(assembly, assembly.new_state())
    assert [row["budget"] for row in rows] == list(range(model.num_layers + 1))
    oracle = np.array([row["oracle"] for row in rows])
    assert np.isfinite(oracle).all() and (np.diff(oracle) <= 0).all()
    assert oracle[-1] <= rows[0]["preferred"]
