# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Progressive sparsification: schedule of K, active parameters, the model after the switch."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.models.transformer import Transformer, initial_router_state
from jaxmoe.routing import ProgressiveTopKConfig, SoftmaxGateConfig, SoftmaxTopKConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.models import BATCH, LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

ROUTER = ProgressiveTopKConfig(early_top_k=(3,), final_top_k=1, switch_step=5)
MODEL = dataclasses.replace(
    TINY,
    moe=dataclasses.replace(TINY.moe, router=ROUTER, top_k=3, gate=SoftmaxGateConfig()),
)


def test_sigma_schedule():
    config = ProgressiveTopKConfig(early_top_k=(8, 8, 4), final_top_k=1, switch_step=90)
    router = config.build(num_experts=8, top_k=8, embed_dim=4)
    layers = jnp.arange(5, dtype=jnp.int32)
    for step, wanted in (
        (0, [8, 8, 4, 1, 1]),
        (89, [8, 8, 4, 1, 1]),
        (90, [1] * 5),
        (1000, [1] * 5),
    ):
        assert jax.vmap(router.current_top_k, (None, 0))(jnp.int32(step), layers).tolist() == wanted


def counts_at(step):
    params = init_params(MODEL, jax.random.key(0))
    state = {"step": jnp.full((2,), step, jnp.int32)}
    tokens, _ = tokens_for(MODEL)
    apply = jax.jit(Transformer(MODEL).apply)
    return apply({"params": params}, tokens, router_state=state), params


@pytest.mark.parametrize(("step", "wanted"), [(0, (3, 1)), (4, (3, 1)), (5, (1, 1))])
def test_assignments_follow_the_schedule(step, wanted):
    """Active parameters follow it too."""
    output, _ = counts_at(step)
    assert output.statistics.counts.sum(-1).tolist() == [BATCH * LENGTH * k for k in wanted]
    table = parameter_table(MODEL)
    active = {k: table.active(k, MODEL.moe.num_experts) for k in (1, 3)}
    assert active[3] - active[1] == 2 * 2 * 3 * MODEL.embed_dim * MODEL.moe.expert_dim


def test_after_the_switch_equals_top_1():
    output, params = counts_at(7)
    plain = dataclasses.replace(
        MODEL, moe=dataclasses.replace(MODEL.moe, router=SoftmaxTopKConfig(), top_k=1)
    )
    tokens, _ = tokens_for(MODEL)
    wanted = jax.jit(Transformer(plain).apply)({"params": params}, tokens)
    assert_close(output.logits, wanted.logits, "end_to_end")
    np.testing.assert_array_equal(output.statistics.counts, wanted.statistics.counts)


def test_the_step_is_counted_in_the_state():
    router = ROUTER.build(num_experts=4, top_k=3, embed_dim=16)
    state = initial_router_state(MODEL)
    assert state["step"].tolist() == [0, 0]
    statistics = counts_at(0)[0].statistics
    for number in range(1, 4):
        state = jax.vmap(router.update, in_axes=(0, 0, None))(state, statistics, jnp.int32(9))
        assert state["step"].tolist() == [number] * 2


def test_bad_schedules_are_refused():
    text = "router.early_top_k[1]=0 must be at least 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        ProgressiveTopKConfig(early_top_k=(2, 0))
    with pytest.raises(ValueError, match="router.switch_step=-1 must be 0 or more"):
        ProgressiveTopKConfig(switch_step=-1)
