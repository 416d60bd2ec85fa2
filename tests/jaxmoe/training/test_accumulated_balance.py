# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The balance loss of a batch that is seen in parts: `buffer`, `two_pass`, and what has no parts.

SGD of rate 1 without clipping: what the parameters move is the gradient. Everything but the balance
losses has weight 0 in these batches, so that nothing hides them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.routing import LoadBalanceConfig, QuantileConfig, RouterZConfig, SoftmaxTopKConfig
from tests.support.models import TINY
from tests.support.one_step import batch, params_of, step_once
from tests.support.tolerances import assert_close

PARTS = 4


def model_with(*balancers):
    return dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, balancers=balancers))


GLOBAL = model_with(LoadBalanceConfig(coefficient=1.0), RouterZConfig(coefficient=0.1))
MICRO = model_with(LoadBalanceConfig(coefficient=1.0, scope="micro_batch"))
ROWS = model_with(LoadBalanceConfig(coefficient=1.0, scope="sequence"))
COUNTED = dataclasses.replace(
    GLOBAL,
    moe=dataclasses.replace(GLOBAL.moe, router=SoftmaxTopKConfig(bias=QuantileConfig(num_bins=20))),
)
"""Integer histograms are among its statistics."""


def one_step(model, parts, form="buffer", mesh=None):
    """(losses, gradient, load) of one step whose tokens have no loss of their own."""
    done = step_once(model, batch(loss_weight=0.0), parts=parts, form=form, mesh=mesh)
    return done["losses"], done["gradient"], done["load"]


@functools.cache
def undivided(model):
    return one_step(model, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        GLOBAL,
        pytest.param(ROWS, marks=pytest.mark.large),
        pytest.param(COUNTED, marks=pytest.mark.large),
    ],
    ids=["global", "sequence", "counted"],
)
def test_two_passes_are_one_large_batch(model):
    """Value and gradient, although the micro-batches differ in load and in number of tokens."""
    assert_close(one_step(model, PARTS, "two_pass"), undivided(model), "end_to_end")


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "parts"), [("data4_tensor2", 2), ("data2", PARTS)])
def test_two_passes_on_a_mesh(mesh, parts):
    assert_close(one_step(GLOBAL, parts, "two_pass", mesh), undivided(GLOBAL), "end_to_end")


def micro_statistics(model, params):
    """Statistics of each micro-batch: rows i, i + PARTS, ..."""
    whole = batch(loss_weight=0.0)
    for part in range(PARTS):
        rows = slice(part, None, PARTS)
        output = forward(
            model,
            ExecutionConfig(),
            params,
            jnp.asarray(whole.tokens[rows]),
            segment_ids=jnp.asarray(whole.segment_ids[rows]),
            train=True,
        )
        yield output.statistics


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [GLOBAL, pytest.param(MICRO, marks=pytest.mark.large)], ids=["buffer", "micro_batch"]
)
def test_one_pass_by_hand(model):
    """`buffer` takes the load of the micro-batches so far, `micro_batch` that of each alone."""

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def by_hand(params):
        counts, values = jnp.zeros(()), {}
        for statistics in micro_statistics(model, params):
            counts = counts + statistics.counts if model is GLOBAL else statistics.counts
            share = jax.lax.stop_gradient(counts / counts.sum(-1, keepdims=True))
            probs = statistics.prob_sum / statistics.num_tokens[:, None]
            terms = {"load_balance": TINY.moe.num_experts * jnp.sum(share * probs)}
            if model is GLOBAL:
                terms["router_z"] = 0.1 * jnp.sum(statistics.z_sum / statistics.num_tokens)
            for name, term in terms.items():
                values[name] = values.get(name, 0.0) + term / PARTS
        return sum(values.values()), values

    (_, losses), gradient = by_hand(params_of(model))
    got_losses, got_gradient, _ = one_step(model, PARTS)
    assert_close((got_losses, got_gradient), (losses, gradient), "end_to_end")


@pytest.mark.slow
def test_the_forms_differ():
    """Otherwise the tests above would show nothing."""
    values = [
        float(losses["load_balance"])
        for losses, *_ in (
            undivided(GLOBAL),
            one_step(GLOBAL, PARTS),
            one_step(MICRO, PARTS),
            undivided(ROWS),
        )
    ]
    assert np.abs(np.diff(np.sort(values))).min() > 1e-3
