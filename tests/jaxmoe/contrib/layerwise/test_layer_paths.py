# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Paths of sequences through the layers: how they run, the search, and the router (Dr.LLM)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.contrib.layerwise.layer_paths.router import (
    class_weights,
    focal_loss,
    new_router,
    path_logits,
    route_rows,
    train_router,
)
from jaxmoe.contrib.layerwise.layer_paths.rows import (
    REPEAT,
    RUN,
    SKIP,
    along_paths,
    num_predicted,
    pool_windows,
    prompt_mask,
)
from jaxmoe.contrib.layerwise.layer_paths.search import PathSearch, SearchConfig, find_paths
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.training.cross_entropy import token_nll
from tests.jaxmoe.layers.test_mesh_invariance import values_of
from tests.support.models import TINY, tokens_for

ONE = ExecutionConfig()
MODEL = dataclasses.replace(TINY, num_layers=3)
LAYERS = MODEL.num_layers


@functools.cache
def chain():
    return Chain.of(MODEL, ONE, values_of(MODEL))


@functools.cache
def batch_of():
    """Sequences without padding, except the last two tokens of the first row."""
    tokens, targets = tokens_for(MODEL)
    segments = jnp.ones(tokens.shape, jnp.int32).at[0, -2:].set(0)
    weights = (segments != 0).astype(jnp.float32)
    return Batch(tokens=tokens, targets=targets, loss_weights=weights, segment_ids=segments)


def plain(path):
    """The losses of a batch that runs along one path, layer by layer."""
    stream, about = chain().begin(batch_of().tokens, batch_of().segment_ids)
    for call, times in zip(chain().calls, path, strict=True):
        for _ in range(times):
            stream = chain().call(call, stream, about)
    return losses_of(chain().logits(stream))


def losses_of(logits):
    batch = batch_of()
    weights = batch.loss_weights.at[:, :3].set(0.0).at[0, 2].set(1.0)  # 4 real tokens: half is 2
    nll = token_nll(logits, batch.targets)
    return np.asarray((nll * weights).sum(1) / weights.sum(1))


def test_running_every_layer_is_bitwise_the_model():
    batch = batch_of()
    found = along_paths(chain(), batch, np.full((8, LAYERS), RUN))
    given = {"segment_ids": batch.segment_ids}
    run = jax.jit(lambda p: forward(MODEL, ONE, p, batch.tokens, **given).logits)
    np.testing.assert_array_equal(found.losses, losses_of(run(values_of(MODEL))))
    assert num_predicted(batch).tolist() == [2.0] + 7 * [3.0]


def test_skipping_is_the_identity_and_repeating_applies_a_layer_twice():
    """Each row has a path of its own, and the loss of the batch that runs along it."""
    skip_all, repeat_last = (SKIP,) * LAYERS, (RUN, SKIP, REPEAT)
    rows = [skip_all, repeat_last, (REPEAT, RUN, RUN), (RUN,) * LAYERS]
    paths = np.array([rows[i % 4] for i in range(8)])
    found = along_paths(chain(), batch_of(), paths)
    for place, path in enumerate(rows):
        np.testing.assert_allclose(found.losses[place::4], plain(path)[place::4], rtol=1e-5)
    embedded = found.windows[0, 0]
    np.testing.assert_array_equal(found.windows[0], np.stack([embedded] * LAYERS))
    assert not np.array_equal(found.windows[1, 1], found.windows[1, 0])
    np.testing.assert_array_equal(found.windows[1, 1], found.windows[1, 2])


def test_windows_are_means_of_the_prompt_and_padding_changes_nothing():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 36, 3)).astype(np.float32)
    mask = np.ones((2, 36), bool)
    mask[1, 32:] = False
    found = np.asarray(pool_windows(jnp.asarray(hidden), jnp.asarray(mask)))
    assert prompt_mask(mask).sum(1).tolist() == [18, 16]
    np.testing.assert_allclose(found[1], hidden[1, :16].reshape(8, 2, 3).mean(1), rtol=1e-5)
    hidden[1, 32:] = 7.0
    hidden[:, 20:32] += 1.0  # after the prompts
    np.testing.assert_array_equal(pool_windows(jnp.asarray(hidden), jnp.asarray(mask)), found)
    few = np.asarray(pool_windows(jnp.asarray(hidden[:, :6]), jnp.ones((2, 6), bool)))
    assert np.isfinite(few).all()


@pytest.mark.parametrize(("budget", "price"), [(1.0, 0.0), (2.0, 0.1), (1.5, 100.0)])
def test_a_path_that_is_found_is_never_worse_than_all_layers(budget, price):
    """Random losses of every path, so that most paths are worse."""
    layers, rows = 5, 4
    rng, tried = np.random.default_rng(3), []
    table = {
        path: rng.uniform(1.0, 3.0, rows) for path in itertools.product(range(3), repeat=layers)
    }

    def known(paths):
        return np.array([table[tuple(path)][row] for row, path in enumerate(paths)])

    def losses_of(paths):
        tried.append(paths)
        return known(paths)

    config = SearchConfig(budget=budget, price=price)
    found = find_paths(losses_of, (rows, layers), config)
    full, chosen = table[(RUN,) * layers], known(found)
    assert (chosen <= full).all() and (chosen < full).any()
    assert len(tried) == 51 and np.concatenate(tried).sum(1).max() <= budget * layers
    if not price:
        np.testing.assert_array_equal(chosen, np.min([known(paths) for paths in tried], axis=0))
    again = find_paths(losses_of, (rows, layers), config)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_a_layer_that_only_harms(seed):
    """Layer 1 of six raises the loss, the others lower it once; the root gets all its children."""

    def loss(path):
        return 2.0 + 0.5 * path[1] - sum(min(path[i], 1) for i in (0, 2, 3, 4, 5))

    search = PathSearch(6, loss((RUN,) * 6), SearchConfig(), seed)
    for _ in range(400):
        search.learn(loss(search.propose()))
    assert search.best() == (RUN, SKIP, RUN, RUN, RUN, RUN)


def test_losses_of_the_search_equal_those_of_the_model():
    def losses(paths):
        return along_paths(chain(), batch_of(), paths).losses

    found = find_paths(losses, (8, LAYERS), SearchConfig(simulations=4, price=0.0))
    full = losses(np.full((8, LAYERS), RUN))
    assert (losses(found) <= full).all()


def test_focal_loss_without_gamma_and_weights_is_the_cross_entropy():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((5, 4, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(3, size=(5, 4)), jnp.int32)
    ones = jnp.ones(3, jnp.float32)
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(focal_loss(logits, labels, ones, gamma=0.0), wanted, rtol=1e-6)
    assert focal_loss(logits, labels, ones) < wanted
    weights = class_weights(np.repeat([0, 1, 2], [4399, 120956, 1457]))
    np.testing.assert_allclose(weights.mean(), 1.0, rtol=1e-6)
    raw = np.array([1.0 / (1.0 - 0.999**n) for n in (4399, 120956, 1457)])
    np.testing.assert_allclose(weights, raw / raw.mean(), rtol=1e-5)


def test_a_router_learns_paths_that_the_prompts_determine():
    rng = np.random.default_rng(2)
    windows = rng.standard_normal((64, 2, 8, 4)).astype(np.float32) + np.float32(0.2)
    kind = rng.integers(3, size=64)
    windows[np.arange(64), :, :, kind] += 3.0
    paths = np.stack([kind, (kind + 1) % 3], axis=1)
    router, losses = train_router(windows, paths, epochs=60)
    assert losses[-1] < 0.2 * losses[0]
    assert (np.asarray(path_logits(router, jnp.asarray(windows))).argmax(-1) == paths).mean() > 0.95


def test_routed_sequences_run_along_the_paths_of_the_logits():
    router = new_router(jax.random.key(0), LAYERS, MODEL.embed_dim)
    router = dataclasses.replace(router, b2=router.b2.at[:, RUN].set(1.0))
    usual = along_paths(chain(), batch_of(), np.full((8, LAYERS), RUN))
    np.testing.assert_array_equal(route_rows(chain(), batch_of(), router).losses, usual.losses)
    draws = np.random.default_rng(0).standard_normal(router.w2.shape).astype(np.float32)
    router = dataclasses.replace(router, w2=jnp.asarray(draws))
    found = route_rows(chain(), batch_of(), router)
    assert len(np.unique(found.paths)) > 1
    logits = path_logits(router, jnp.asarray(found.windows))
    np.testing.assert_array_equal(logits.argmax(-1), found.paths)
    np.testing.assert_array_equal(
        along_paths(chain(), batch_of(), found.paths).losses, found.losses
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0.5}, "search.budget=0.5 must lie between 1 and 2"),
        ({"simulations": 0}, "search.simulations=0 must be at least 1"),
        ({"price": -1.0}, "search.price=-1.0 must be 0 or more"),
    ],
)
def test_a_bad_search_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SearchConfig(**given)
