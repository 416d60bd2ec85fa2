# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Batches packed by level: loss and gradients equal one device, in one program for all steps."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import init_params
from jaxmoe.contrib.levels import (
    BucketsConfig,
    LevelCost,
    LevelPacking,
    MilpConfig,
    Room,
    ZonesConfig,
)
from jaxmoe.contrib.levels.by_level import LevelsConfig
from jaxmoe.contrib.levels.measures import level_measures
from jaxmoe.data import Batch
from jaxmoe.data.loader import _batch_of
from jaxmoe.data.source import Row
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import adamw
from jaxmoe.planning.hlo import collectives
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.sequence_parallel import RingConfig
from tests.support.hlo_branches import branch_collectives
from tests.support.meshes import mesh_of
from tests.support.models import TINY as TWO_LAYERS
from tests.support.tolerances import assert_close

TINY = dataclasses.replace(TWO_LAYERS, num_layers=1)
TOKENS, RANKS = 8, 4
LENGTH = TOKENS * RANKS
ROOM = Room(tokens=TOKENS, degrees=(1, 2, 4), rows=2)
COST = LevelCost(pair=1e-3, other=0.05, rings=(0.0, 0.01, 0.2), near_level=1)
ACCUMULATION = 2
ASSIGNERS = {"buckets": BucketsConfig(), "milp": MilpConfig(), "zones": ZonesConfig()}
ONE = ExecutionConfig(mesh=MeshConfig(data=1))
SPREAD = ExecutionConfig(mesh=MeshConfig(data=2, seq=RANKS), sequence_parallel=LevelsConfig())


def rows_of(seed):
    """Rows of whole documents and padding."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ROOM.rows * ACCUMULATION):
        lengths = rng.lognormal(2.0, 0.9, size=40).astype(int).clip(2, LENGTH + 1)
        lengths = lengths[np.cumsum(lengths) <= LENGTH + 1]
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids = np.pad(ids, (0, LENGTH + 1 - len(ids))).astype(np.int32)
        tokens = rng.integers(TINY.vocab_size, size=LENGTH + 1).astype(np.int32)
        rows.append(Row(np.where(ids == 0, 0, tokens).astype(np.int32), ids))
    return rows


@functools.cache
def packed(name, seed):
    packing = LevelPacking(
        assigner=ASSIGNERS[name], room=ROOM, cost=COST, accumulation=ACCUMULATION
    )
    return packing.batch(rows_of(seed), process_index=0, process_count=1)


@functools.cache
def compute(execution, accumulation, *, is_levelled):
    """Loss and gradients of a batch; the state is the same on every mesh."""

    one_step = Step(
        model=TINY,
        optimizer=adamw(1e-2),
        execution=execution,
        accumulation=accumulation,
        accumulated_balance="two_pass",
    )

    def both(state, batch):
        _, summed = batch_gradients(one_step, state, batch)
        return summed.loss, summed.losses, summed.statistics, summed.grads

    mesh = mesh_of(execution)
    state = init_state(TINY, adamw(1e-2), jax.random.key(0), execution=execution, mesh=mesh)
    step = jax.jit(both)

    def run(batch):
        if not is_levelled:
            batch = dataclasses.replace(batch, level=None)
        with jax.set_mesh(mesh):
            return jax.device_get(step(state, jax.tree.map(jnp.asarray, batch)))

    run.step = step
    return run


MICRO_BATCHES = ROOM.buffer(ACCUMULATION)


@pytest.mark.slow
def test_loss_and_gradients_equal_one_device_for_every_assigner_in_one_program():
    on_mesh = compute(SPREAD, MICRO_BATCHES, is_levelled=True)
    alone = compute(ONE, 1, is_levelled=False)
    levels = set()
    for name in ASSIGNERS:
        for seed in range(3):
            batch = packed(name, seed)
            levels |= {(name, seed, level) for level in batch.level.tolist()}
            found, wanted = on_mesh(batch), alone(batch)
            assert_close(found[0], wanted[0], "end_to_end")
            assert_close(found[1], wanted[1], "end_to_end")
            assert_close(found[2].counts, wanted[2].counts, "end_to_end")
            assert_close(found[3], wanted[3], "end_to_end")
    assert on_mesh.step._cache_size() == 1
    assert {level for _, _, level in levels} == {-1, 0, 1, 2}
    for seed in range(3):  # the documents decide the loss, not the rows they are in
        plain = compute(ONE, 1, is_levelled=False)(_batch_of(rows_of(seed)))[0]
        assert_close(plain, alone(packed("milp", seed))[0], "end_to_end")


@pytest.mark.slow
def test_unused_micro_batches_are_not_computed():
    """A batch with tokens in a micro-batch of level -1 has the loss of the others."""
    batch = packed("buckets", 0)
    run = compute(ONE, MICRO_BATCHES, is_levelled=True)
    wanted = run(batch)
    used = int((batch.level.reshape(-1, MICRO_BATCHES)[0] >= 0).sum())
    assert 0 < used < MICRO_BATCHES
    spoilt = batch.tokens.copy()
    spoilt[used::MICRO_BATCHES] = 1
    found = run(dataclasses.replace(batch, tokens=spoilt))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_nothing_but_attention_depends_on_the_level():
    """Zeppelin's remapping between attention and the other layers is the identity: a program by
    level has the collectives of a ring, with the branches in the place of the ring's."""

    def forward(form):
        execution = dataclasses.replace(SPREAD, sequence_parallel=form)
        mesh = mesh_of(execution)
        params = init_params(TINY, jax.random.key(0))
        batch = jax.tree.map(jnp.asarray, packed("buckets", 0))

        def loss(params, batch):
            return forward_and_nll(TINY, execution, params, batch)[0]

        with jax.set_mesh(mesh):
            return jax.jit(loss).lower(params, batch).as_text("hlo")

    def counted(found):
        return collections.Counter((one.kind, one.result_bytes) for one in found)

    by_level = forward(LevelsConfig())
    branches = branch_collectives(by_level)
    assert [len(branch) > 0 for branch in branches] == [False, True, True]
    wanted = counted(collectives(forward(RingConfig())))
    for branch in branches:
        wanted += counted(branch)
    found = counted(collectives(by_level)) + counted(branches[-1])
    assert found == wanted


def test_measures_count_micro_batches_and_shares():
    batch = packed("milp", 1)
    found = {name: float(x) for name, x in level_measures(batch, SPREAD, MICRO_BATCHES).items()}
    levels = batch.level.reshape(-1, MICRO_BATCHES)[0]
    real = (batch.segment_ids != 0).reshape(ROOM.rows, MICRO_BATCHES, -1).sum(axis=(0, 2))
    assert found["micro_batches"] == (levels >= 0).sum()
    assert found["full"] == pytest.approx(real.sum() / ((levels >= 0).sum() * ROOM.rows * LENGTH))
    for level, degree in enumerate(ROOM.degrees):
        assert found[f"share_{degree}"] == pytest.approx(real[levels == level].sum() / real.sum())


def test_a_level_without_documents_raises():
    batch = packed("buckets", 0)
    bare = Batch(
        tokens=batch.tokens,
        targets=batch.targets,
        loss_weights=batch.loss_weights,
        level=batch.level,
    )
    with pytest.raises(ValueError, match=r"batch\.level needs batch\.segment_ids"):
        compute(ONE, 1, is_levelled=True)(bare)
