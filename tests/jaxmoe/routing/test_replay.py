# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded experts: every router of the registry replays them, or refuses in words."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.loop import LoopConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import ROUTERS, SoftmaxGateConfig, SoftmaxTopKConfig
from jaxmoe.routing.replay import REPLAYED, check_replayed
from jaxmoe.routing.telemetry import summarise
from tests.support.models import TINY
from tests.support.routers import (
    CASES,
    EXPERTS,
    LENGTH,
    ROUTER_CASES,
    TOKENS,
    Case,
    build,
    drawn,
    given,
    initial,
)
from tests.support.tolerances import assert_close

ROWS: list[Any] = CASES
REPLAYING = [row for row in ROWS if row.values[0].config.traits.can_replay]
FIRST = {name: cases[0] for name, cases in ROUTER_CASES.items()}


@functools.partial(jax.jit, static_argnames="case")
def replay(case, params, state, x, replayed, weights):
    """(gradient of a weighted sum of gates in params and x, output) of a training call."""

    def loss(params, x):
        mask = jnp.arange(TOKENS) != 3
        inputs = dataclasses.replace(given(x, mask=mask), replayed=replayed)
        output = build(case).route(params, state, inputs, train=True, key=jax.random.key(3))
        return jnp.sum(weights * jnp.exp(output.selection.scores)), output

    return jax.grad(loss, (0, 1), has_aux=True)(params, x)


def weights_of(case):
    drawn_ = np.random.default_rng(5).normal(size=TOKENS * case.top_k)
    return jnp.asarray(drawn_, jnp.float32)


@pytest.mark.parametrize("case", REPLAYING)
def test_replay_of_the_own_choice_is_bitwise_neutral(case):
    """In scores, statistics, and the gradients of parameters and activations; free tokens too."""
    arguments = (case, *initial(case), drawn(1))
    wanted, output = replay(*arguments, None, weights_of(case))
    own = output.selection.expert_ids.reshape(TOKENS, -1)
    for record in (own, own.at[::3, 0].set(-1), jnp.full_like(own, EXPERTS).at[3].set(-1)):
        grads, found = replay(*arguments, record, weights_of(case))
        extra = dict(found.statistics.extra)
        replayed, same = np.asarray(extra.pop(REPLAYED))
        statistics = dataclasses.replace(found.statistics, extra=extra)
        jax.tree.map(
            np.testing.assert_array_equal,
            (grads, found.selection, statistics),
            (wanted, output.selection, output.statistics),
        )
        ids = np.asarray(record)
        is_given = (ids >= 0).all(1) & (np.arange(TOKENS) != 3)
        assert replayed == same == ((ids < EXPERTS) & is_given[:, None]).sum()


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_every_router_replays_or_refuses(case):
    """The counts of a replay are those of the record, whatever the router would choose."""
    if not case.config.traits.can_replay:
        parts = {"router": case.config, "balancers": (), "gate": SoftmaxGateConfig()}
        sighted = dataclasses.replace(TINY.attention, is_causal=False)
        assert TINY.moe is not None
        moe = dataclasses.replace(TINY.moe, **parts)
        model = dataclasses.replace(TINY, attention=sighted, moe=moe)
        with pytest.raises(ValueError, match=f"model.moe.router={case.config.name} cannot replay"):
            check_replayed(model, np.zeros((1, 1, 2, 2), np.int32))
        return
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(EXPERTS)[: case.top_k] for _ in range(TOKENS)])
    _, output = replay(case, *initial(case), drawn(1), jnp.asarray(ids), weights_of(case))
    found = np.asarray(output.selection.expert_ids).reshape(TOKENS, -1)
    is_real = np.arange(TOKENS) != 3
    np.testing.assert_array_equal(found[is_real], ids[is_real])
    assert (found[3] == EXPERTS).all()
    counts = np.bincount(ids[is_real].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(output.statistics.counts, counts)
    scalars = summarise(jax.tree.map(lambda leaf: leaf[None], output.statistics))
    assert scalars["replayed"] == 1.0 and 0.0 < scalars["replay_changed"] < 1.0


def test_scores_of_replayed_experts_are_those_of_the_router():
    """Also over the chosen experts alone, and with an empty slot among them."""
    for softmax in ("before", "after"):
        case = Case(config=SoftmaxTopKConfig(softmax=softmax))
        params, state = initial(case)
        ids = np.tile([[5, 0], [1, EXPERTS]], (TOKENS // 2, 1))
        _, output = replay(case, params, state, drawn(1), jnp.asarray(ids), weights_of(case))
        logits = np.asarray(drawn(1), np.float64) @ np.asarray(params["weight"], np.float64)
        logits = np.concatenate([logits, np.full((TOKENS, 1), -np.inf)], axis=1)
        chosen = np.take_along_axis(logits, ids, axis=1)
        over = logits if softmax == "before" else chosen
        wanted = chosen - np.log(np.exp(over).sum(1, keepdims=True))
        found = np.asarray(output.selection.scores).reshape(TOKENS, -1)
        keep = np.arange(TOKENS) != 3
        assert_close(found[keep], wanted[keep].astype(np.float32), "matmul")


def test_records_of_another_shape_are_refused():
    right = np.zeros((2, LENGTH, 2, 2), np.uint8)
    check_replayed(TINY, right)
    with pytest.raises(ValueError, match="2 MoE layers, 2 experts per token"):
        check_replayed(TINY, right[:, :, :1])
    with pytest.raises(ValueError, match="dtype float32"):
        check_replayed(TINY, right.astype(np.float32))
    with pytest.raises(ValueError, match="without MoE layers"):
        check_replayed(ModelConfig(moe=None), right)
    with pytest.raises(ValueError, match="model.loop.times=2"):
        check_replayed(dataclasses.replace(TINY, loop=LoopConfig()), right)
    assert set(FIRST) == set(ROUTERS)
