# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Train steps on recorded experts: the gradient, micro-batches, remat, meshes, stages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.execution import ExecutionConfig
from jaxmoe.routing import HashConfig, SoftmaxGateConfig
from jaxmoe.routing.replay import EXPERTS, REPLAYED
from jaxmoe.routing.telemetry import summarise
from jaxmoe.routing.telemetry.recording import record_router, recorded_ids
from jaxmoe.training.loss import forward_and_nll
from sharding import MeshConfig
from sharding.expert_parallel import AllToAllConfig
from sharding.sequence_parallel import RingConfig
from tests.support.models import BATCH, FULL, LENGTH
from tests.support.one_step import batch, params_of, step_once
from tests.support.tolerances import assert_close

LAYERS, TOP_K, NUM = 2, 2, 4


def with_record(record):
    """The rows of a step, with the experts of every token."""
    return dataclasses.replace(batch(), extra={EXPERTS: record})


@functools.cache
def foreign():
    """A choice that no router has made."""
    rng = np.random.default_rng(4)
    drawn = rng.permuted(np.tile(np.arange(NUM), (BATCH, LENGTH, LAYERS, 1)), axis=-1)
    return drawn[..., :TOP_K].astype(np.int16)


@functools.cache
def others():
    """A choice that no router has made; some tokens are free in the second layer."""
    record = foreign().copy()
    record[::3, 1, 1, 0] = -1
    return record


RECORDING = dataclasses.replace(FULL, moe=record_router(FULL.moe, BATCH * LENGTH))


@jax.jit
def _pass(params, rows):
    def loss_of(params):
        nll, output = forward_and_nll(RECORDING, ExecutionConfig(), params, rows, train=True)
        loss = nll / jnp.sum(rows.loss_weights)
        aside = {"loss": loss, "losses": output.losses, "statistics": output.statistics}
        return loss + sum(output.losses.values()), aside

    (total, aside), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    return aside | {"total": total, "gradient": gradient}


def passed(rows, params=None):
    """Loss, gradient and statistics of a training pass that records its experts."""
    return _pass(params_of(FULL) if params is None else params, jax.tree.map(jnp.asarray, rows))


def ids_of(found):
    """Experts of every token of a pass, [B S L K]; E where there is padding."""
    ids = recorded_ids(found["statistics"]).transpose(1, 0, 2)
    return ids.reshape(BATCH, LENGTH, LAYERS, TOP_K)


@functools.cache
def plain():
    return passed(batch())


def own():
    return ids_of(plain()).astype(np.int16)


def test_replay_of_the_own_choice_changes_no_bit():
    """Neither of the loss nor of any gradient, beside the same program with every token free.

    The program without a record is another one, whose products may be fused in another order.
    """
    found, free = (passed(with_record(ids)) for ids in (own(), np.full_like(own(), -1)))
    counted, none = (results["statistics"].extra.pop(REPLAYED) for results in (found, free))
    np.testing.assert_array_equal(counted, np.full((LAYERS, 2), (own() < NUM)[:, :, 0].sum()))
    assert not none.any()
    jax.tree.map(np.testing.assert_array_equal, found, free)
    assert_close(found, plain(), "elementwise")


def test_experts_of_a_replay_are_those_of_the_record():
    """And so are the loads; what the router itself would have chosen is measured."""
    rows = with_record(others())
    found, is_real = passed(rows), rows.segment_ids != 0
    ids, is_free = ids_of(found), (others() < 0).any(-1)
    is_given = is_real[:, :, None] & ~is_free
    np.testing.assert_array_equal(ids[is_given], others()[is_given])
    assert (ids[is_real] < NUM).all() and (ids[~is_real] == NUM).all()
    counts = [np.bincount(ids[:, :, i].ravel(), minlength=NUM + 1)[:NUM] for i in range(LAYERS)]
    np.testing.assert_array_equal(found["statistics"].counts, counts)
    scalars = summarise(found["statistics"])
    assert_close(scalars["replayed"], np.float32(is_given[is_real].mean()), "matmul")


def test_share_that_differs_without_replay_is_reported():
    """With the record of other parameters, whose choice the report knows without a second pass."""
    moved = jax.tree.map(lambda leaf: 1.1 * leaf + 0.05 * jnp.sin(37.0 * leaf), params_of(FULL))
    record = ids_of(passed(batch(), moved)).astype(np.int16)
    scalars = summarise(passed(with_record(record))["statistics"])
    is_real = batch().segment_ids != 0
    first = [ids[is_real][:, 0] for ids in (record, own())]  # nothing is replayed before it
    changed = 1.0 - (first[0][:, :, None] == first[1][:, None, :]).any(-1).mean()
    assert 0.0 < changed < 1.0 and 0.0 < scalars["replay_changed"] < 1.0
    statistic = passed(with_record(record))["statistics"].extra[REPLAYED][0]
    assert_close(1.0 - statistic[1] / statistic[0], np.float32(changed), "matmul")


def test_gradient_of_the_router_equals_finite_differences():
    """Each token keeps its experts whatever the router's parameters are."""
    rows = with_record(foreign())
    flat: dict[str, Any] = traverse_util.flatten_dict(params_of(FULL), sep="/")
    (path,) = (name for name in flat if name.endswith("router/weight"))

    def at(weight):
        return passed(rows, traverse_util.unflatten_dict(flat | {path: weight}, sep="/"))

    weight = flat[path]
    gradients: dict[str, Any] = traverse_util.flatten_dict(at(weight)["gradient"], sep="/")
    gradient = gradients[path]
    assert np.abs(gradient).max() > 1e-3
    rng, size = np.random.default_rng(0), 0.05
    for _ in range(3):
        way = jnp.asarray(rng.normal(size=weight.shape), jnp.float32)
        totals = {n: float(at(weight + n * size * way)["total"]) for n in (-2, -1, 1, 2)}
        slope = (8 * (totals[1] - totals[-1]) - (totals[2] - totals[-2])) / (12 * size)
        wanted = float(jnp.sum(gradient * way))
        assert abs(slope - wanted) < 2e-3 * max(abs(wanted), 0.1), (slope, wanted)


EXECUTIONS = {
    "accumulated": (2, ExecutionConfig(mesh=MeshConfig(data=1))),
    "data2_expert2": (1, ExecutionConfig(mesh=MeshConfig(data=2, expert=2))),
    "sharded_accumulated_remat": (
        2,
        ExecutionConfig(mesh=MeshConfig(data=2, expert=2), remat="full"),
    ),
    "expert_all_to_all": (
        1,
        ExecutionConfig(mesh=MeshConfig(data=2, expert=2), dispatcher=AllToAllConfig()),
    ),
    "seq3_zigzag": (
        1,
        ExecutionConfig(
            mesh=MeshConfig(data=2, seq=3),
            rules="data_parallel",
            sequence_parallel=RingConfig(layout="zigzag"),
        ),
    ),
    "remat": (1, ExecutionConfig(mesh=MeshConfig(data=1), remat="full")),
    "stages": (2, ExecutionConfig(mesh=MeshConfig(stage=2, data=2))),
}
FAST = ("accumulated",)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in EXECUTIONS],
)
def test_a_replayed_step_is_the_same_on_every_execution(name):
    parts, execution = EXECUTIONS[name]
    form = "two_pass" if parts > 1 else "buffer"
    given = {"parts": parts, "form": form, "execution": execution}
    found, wanted = step_once(FULL, with_record(others()), **given), passed(with_record(others()))
    counts = wanted["statistics"].counts
    assert_close(found["load"], counts / counts.sum(-1, keepdims=True), "elementwise")
    names = ("loss", "gradient", "losses")
    assert_close({n: found[n] for n in names}, {n: wanted[n] for n in names}, "end_to_end")


def test_routers_that_cannot_replay_are_refused():
    assert FULL.moe is not None
    parts = {"router": HashConfig(), "balancers": (), "gate": SoftmaxGateConfig()}
    moe = dataclasses.replace(FULL.moe, **parts)
    with pytest.raises(ValueError, match="model.moe.router=hash cannot replay"):
        step_once(dataclasses.replace(FULL, moe=moe), with_record(others()))
