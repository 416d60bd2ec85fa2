# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled steps on stages: what travels between devices, products, memory by micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.planning.hlo import collectives
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.pipeline import GPipeConfig, InterleavedConfig, plan_slots
from sharding.regions import region
from tests.support.meshes import mesh_of
from tests.support.one_step import SGD
from tests.support.products import products

MODEL = ModelConfig(
    vocab_size=2048,
    num_layers=4,
    embed_dim=64,
    dense_dim=96,
    moe=None,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8, qk_norm="none"),
)
STAGES, LENGTH = 4, 128
MESH = MeshConfig(stage=STAGES, data=2)
ACTIVATION = 4 * LENGTH * MODEL.embed_dim
"""Bytes of the stream of a micro-batch on a device, which has one row."""
CHUNKS = 4
LOGITS = 4 * LENGTH * MODEL.vocab_size // STAGES // CHUNKS
"""Bytes of the logits that exist at one time on a device."""
VOCABULARY = 4 * MODEL.embed_dim * MODEL.vocab_size // STAGES
"""Bytes of the head of a stage, and of its part of the embedding."""


def _lowered(
    pipeline,
    parts,
    mesh_config=MESH,
    model=MODEL,
    skipping=None,
    *,
    rules="data_parallel",
    **fields,
):
    """A lowered step with one row of each micro-batch on a device."""
    execution = ExecutionConfig(mesh=mesh_config, pipeline=pipeline, rules=rules, **fields)
    mesh = mesh_of(execution)
    make = functools.partial(init_state, model, SGD, jax.random.key(0), execution=execution)
    state = make(mesh=mesh)
    tokens = np.zeros((mesh_config.data * parts, LENGTH), np.int32)
    rows = Batch(tokens=tokens, targets=tokens, loss_weights=np.ones(tokens.shape, np.float32))
    step = make_train_step(
        model,
        SGD,
        execution=execution,
        accumulation=parts,
        clip=None,
        gradients=None if skipping is None else skipping.gradients,
    )
    with jax.set_mesh(mesh):
        return step.lower(state, global_batch(rows, mesh))


@functools.cache
def _compiled(pipeline, parts, skipping=None):
    """The same compiled, with the loss in chunks."""
    return _lowered(pipeline, parts, skipping=skipping, loss_chunk=LENGTH // CHUNKS).compile()


def permutes_of(pipeline, parts, skipping=None):
    """Executions and bytes of the permutes of a step, on one device."""
    found = [
        one
        for one in collectives(_compiled(pipeline, parts, skipping).as_text())
        if one.kind == "collective-permute"
    ]
    assert all(one.result_bytes == ACTIVATION for one in found)
    assert {pair for one in found for pair in one.groups} <= {
        (a, b) for a in range(8) for b in range(8) if a != b and (a - b) % 2 == 0
    }
    return sum(one.trip_count for one in found)


def expected_permutes(pipeline, parts):
    runs = pipeline.schedule(STAGES, parts).runs()
    return sum(run.length * len(run.kinds) for run in runs)


def test_one_activation_is_permuted_for_each_kind_of_work_in_a_tick():
    assert permutes_of(InterleavedConfig(), 8) == expected_permutes(InterleavedConfig(), 8)


@pytest.mark.slow
def test_no_collective_has_the_size_of_logits():
    """Those of a chunk exist at one time; gradients of parameters are larger."""
    found = collectives(_compiled(InterleavedConfig(), 8).as_text())
    sizes = {one.result_bytes for one in found}
    assert LOGITS not in sizes and max(sizes) < CHUNKS * LOGITS


@pytest.mark.slow
def test_gradients_of_head_and_embedding_are_reduced_once_for_a_micro_batch():
    """A branch counts in each turn of its loop: once in each tick, for any chunks of the loss."""
    found = collectives(_compiled(InterleavedConfig(), 8).as_text())
    times = [one.trip_count for one in found if one.result_bytes == VOCABULARY]
    assert sum(times) == expected_permutes(InterleavedConfig(), 8)


@pytest.mark.slow
def test_weights_of_chunks_move_between_stages_before_they_are_gathered():
    """Shards of parameters to their stages, and of gradients back: a half of each by all-to-all."""
    mesh = MeshConfig(stage=2, data=4)
    lowered = _lowered(InterleavedConfig(chunks=2), 2, mesh, rules="zero2")
    found = collectives(lowered.compile().as_text())
    moved = sum(one.result_bytes for one in found if one.kind == "all-to-all")
    matrices = 4 * MODEL.num_layers * MODEL.embed_dim * (4 * 4 * 8 + 3 * 96)
    gains = 4 * MODEL.num_layers * 2 * MODEL.embed_dim
    assert 0 < moved <= 2 * (matrices // (2 * 4) + gains // 2)


@pytest.mark.slow
def test_gpipe_permutes_as_often():
    assert permutes_of(GPipeConfig(), 8) == expected_permutes(GPipeConfig(), 8)


@pytest.mark.slow
def test_memory_grows_with_micro_batches_in_gpipe_only():
    def temporaries(pipeline, parts):
        return _compiled(pipeline, parts).memory_analysis().temp_size_in_bytes

    few, many = (temporaries(InterleavedConfig(), parts) for parts in (8, 16))
    assert many - few < ACTIVATION, (few, many)
    few, many = (temporaries(GPipeConfig(), parts) for parts in (8, 16))
    assert many - few >= 2 * 8 * ACTIVATION, (few, many)


LINEAR = 2 * LENGTH * MODEL.embed_dim * (4 * 4 * 8 + 3 * 96)
"""Operations of the products by weights of a layer, forward, for a micro-batch of one row."""
SCORES = 2 * 2 * LENGTH * LENGTH * 4 * 8
"""Operations of the scores of a layer, and of the sums of values, likewise."""
WORK = {
    "F": LINEAR + SCORES,
    # Forward again, then the gradients of both factors. Attention computes its scores once more,
    # and for each row the sum of result times gradient.
    "B": LINEAR + SCORES + 2 * LINEAR + 5 * SCORES // 2 + 2 * LENGTH * 4 * 8,
}
HEAD = 3 * 2 * LENGTH * MODEL.embed_dim * MODEL.vocab_size
"""Operations of the head for a micro-batch: forward, and both gradients."""


@functools.cache
def _executed(pipeline, stages, parts):
    """Products of the layers, and of the head, that a device executes in a lowered step."""
    lowered = _lowered(pipeline, parts, MeshConfig(stage=stages))
    found = products(lowered.as_text("hlo"))
    vocabulary = {MODEL.vocab_size, MODEL.vocab_size // stages}
    head = [one for one in found if one.sizes & vocabulary]
    return [one for one in found if not one.sizes & vocabulary], head


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("pipeline", "stages", "parts"),
    [
        (InterleavedConfig(), 4, 8),
        pytest.param(InterleavedConfig(chunks=2), 2, 4, marks=pytest.mark.slow),
        pytest.param(GPipeConfig(), 4, 6, marks=pytest.mark.slow),
        pytest.param(InterleavedConfig(weight_gradients="deferred"), 4, 8, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "two chunks", "gpipe", "deferred"],
)
def test_executed_products_are_those_of_the_schedule(pipeline, stages, parts):
    """Each slot of a tick once, and so 1 + bubble times those that are needed."""
    schedule, (layers, head) = pipeline.schedule(stages, parts), _executed(pipeline, stages, parts)
    runs = schedule.runs()
    ticks = {kind: sum(run.length for run in runs if kind in run.kinds) for kind in "FBW"}
    work = dict(WORK)
    if ticks["W"]:
        work |= {"B": WORK["B"] - LINEAR, "W": LINEAR}
    of_group = MODEL.num_layers // schedule.num_groups
    executed = sum(one.total for one in layers)
    assert executed == of_group * sum(work[kind] * ticks[kind] for kind in work)
    needed = parts * MODEL.num_layers * (WORK["F"] + WORK["B"]) / stages
    bubble = schedule.bubble(WORK["F"], WORK["B"], LINEAR)
    assert executed / needed == pytest.approx(1 + bubble, rel=1e-12)
    assert all(one.is_in_branch for one in head) and not any(one.is_in_branch for one in layers)
    assert sum(one.total for one in head) == ticks["F"] * HEAD // stages
    assert (plan_slots(schedule).leaves[0] >= 0).sum() == parts, "executions of that branch"


@pytest.mark.slow
def test_products_without_stages_are_those_of_one_backward_pass():
    """So that a stage executes 1 + bubble times its part of them and of one more forward pass."""
    layers, head = _executed(InterleavedConfig(), 1, 8)
    assert sum(one.total for one in layers) == 8 * MODEL.num_layers * WORK["B"]
    assert sum(one.total for one in head) == 8 * HEAD


def test_the_border_of_a_region_moves_nothing():
    execution = ExecutionConfig(mesh=MESH)
    mesh = mesh_of(execution)
    spec = PartitionSpec("stage", "data", None)
    x = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))

    def double(x):
        return 2 * x

    def product(x):
        whole = jax.sharding.reshard(x, PartitionSpec(None, None, None))
        return whole + 1

    with jax.set_mesh(mesh):
        texts = [
            jax.jit(region(function, axis="stage", out_specs=out)).lower(x).compile().as_text()
            for function, out in ((double, spec), (product, PartitionSpec("stage", None, None)))
        ]
    assert collectives(texts[0]) == []
    (gather,) = collectives(texts[1])
    assert gather.kind == "all-gather" and len(gather.groups[0]) == 2
