# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans on meshes with stages: counts, memory, traffic, FLOPs and the search."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from jaxmoe.models.config import DenseConfig, LayerConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.planning.compile_ahead import CompiledStep, compile_step
from jaxmoe.planning.hardware import CHIPS, parse_topology
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.pipelines import Counts, counts, idle_over_useful
from jaxmoe.planning.pipelines_compared import (
    compare_layouts,
    compare_schedules,
    schedule_in_words,
    timetable,
)
from jaxmoe.planning.search import Space, enumerate_meshes, search, stages_of
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import executed_flops, predict_time
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.training.pipeline import check_pipeline
from sharding.mesh import MeshConfig
from sharding.pipeline import GPipeConfig, InterleavedConfig, plan_slots
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

EIGHT_LAYERS = dataclasses.replace(WIDE, num_layers=8)
STAGES = MeshConfig(stage=4, data=2)


def staged_plan(model=EIGHT_LAYERS, mesh=STAGES, *, micro_batches=8, **fields):
    plan = plan_of(model, mesh, batch_size=64, length=64, **fields)
    return dataclasses.replace(plan, accumulation=micro_batches)


def bytes_of(plan):
    found = collections.defaultdict(float)
    for one in step_traffic(plan):
        found[one.reason] += one.bytes
    return found


@pytest.mark.parametrize(
    "pipeline, stages, micro_batches",
    [
        (InterleavedConfig(), 4, 37),
        (InterleavedConfig(chunks=2), 4, 48),
        (InterleavedConfig(chunks=4), 2, 30),
        (InterleavedConfig(chunks=2, weight_gradients="deferred"), 4, 48),
        (GPipeConfig(), 3, 41),
    ],
)
def test_counts_of_a_large_table_are_those_of_the_table(pipeline, stages, micro_batches):
    schedule = pipeline.schedule(stages, micro_batches)
    slots = plan_slots(schedule)
    runs = schedule.runs()
    assert counts(pipeline, stages, micro_batches) == Counts(
        ticks=len(schedule.ticks),
        forward=sum(run.length for run in runs if "F" in run.kinds),
        backward=sum(run.length for run in runs if "B" in run.kinds),
        inputs=slots.num_inputs,
        gradients=slots.num_gradients,
        heads=slots.num_heads,
        weights=sum(run.length for run in runs if schedule.kinds[-1] in run.kinds),
        deferred=slots.num_deferred,
        hops=1,
    )
    assert idle_over_useful(pipeline, stages, micro_batches) == pytest.approx(schedule.bubble())


def test_bytes_between_stages_by_hand():
    """Eight micro-batches on four stages: 11 ticks with F, 11 with B; four sums a micro-batch."""
    stream = 64 / 8 / 2 * 64 * 256 * 4
    sent = bytes_of(staged_plan())
    assert sent["activations"] == 22 * stream
    assert sent["vocabulary"] == pytest.approx(8 * 4 * 2 * 3 / 4 * stream)
    assert sent["chunks"] == 0
    two = staged_plan(pipeline=InterleavedConfig(chunks=2))
    staged = sum(row.size for row in two.table if row.declaration.is_stacked)
    cut = sum(
        row.size for row in two.table if row.declaration.is_stacked and "data" in str(row.spec)
    )
    held = (cut / 2 + staged - cut) / 4 * 4  # parameters on a device, in float32
    assert bytes_of(two)["chunks"] == pytest.approx(2 * 3 / 4 * held)
    assert bytes_of(two)["activations"] == (19 + 19) * stream


def test_zero2_gathers_once_a_step_and_fully_sharded_in_every_tick():
    once, always = staged_plan(rules="zero2"), staged_plan()
    layers = sum(
        row.size / 4 / 8
        for row in always.table
        if row.declaration.is_stacked and "data" in str(row.spec)
    )
    ends = 2 * 512 * 256 / 4  # this stage's embedding and head
    assert bytes_of(once)["weights"] == pytest.approx(4 / 2 * (8 * layers + ends))
    # Two layers of the stage in 11 ticks forward alone and 11 with the backward pass; the
    # embedding once and the head twice for each micro-batch.
    wanted = 4 / 2 * ((11 + 11) * 2 * 4 * layers + 8 * 3 * ends / 2)
    assert bytes_of(always)["weights"] == pytest.approx(wanted)


def test_flops_count_the_second_forward_pass_and_the_bubble():
    plan = staged_plan()
    whole = flops_per_token(plan.model, plan.table, 64) * plan.tokens
    head = 6.0 * 512 * 256 * plan.tokens
    assert executed_flops(Sizes.of(plan)) == pytest.approx(
        head + (whole - head) * 4 / 3 * (1 + 3 / 8)
    )
    full = Sizes.of(staged_plan(remat="full"))
    (layers,) = full.layout.flops.by_stack.values()
    last = layers.experts / 9 * plan.tokens  # the third product of experts is not repeated
    assert executed_flops(full) == pytest.approx(
        head + ((whole - head) * 5 / 3 - last) * (1 + 3 / 8)
    )


def test_layers_before_the_stages_are_computed_by_all_of_them():
    dense_first = dataclasses.replace(EIGHT_LAYERS, num_layers=9, dense_layers=(0,), dense_dim=64)
    plan, without = staged_plan(dense_first), staged_plan()
    rows = [row for row in plan.table if row.path.startswith("dense_blocks_0/")]
    products = sum(row.size for row in rows if row.declaration.role != "norm")
    mixing = EIGHT_LAYERS.kinds[0].mixer.flops_per_token(64)
    added = executed_flops(Sizes.of(plan)) - executed_flops(Sizes.of(without))
    assert added == pytest.approx(4 * 4 / 3 * (6.0 * products + mixing) * plan.tokens)
    assert estimate_memory(plan, "cpu").before > 0 == estimate_memory(plan, "cpu").after


def test_memory_keeps_inputs_and_one_group():
    one = estimate_memory(staged_plan(), "cpu")
    stream = 64 / 8 / 2 * 64 * 256 * 4
    assert one.streams == (7 + 1 + 1 + 1 + 2) * stream  # inputs, a gradient, unread slots, two sent
    more = estimate_memory(staged_plan(micro_batches=16), "cpu")
    assert more.streams == one.streams / 2 and more.gradients == one.gradients
    gpipe = estimate_memory(staged_plan(pipeline=GPipeConfig()), "cpu")
    assert gpipe.streams == (8 + 1 + 8 + 1 + 1 + 1 + 2) * stream
    assert gpipe.saved == one.saved
    halves = estimate_memory(staged_plan(pipeline=InterleavedConfig(chunks=2)), "cpu")
    assert halves.saved == one.saved / 2 and halves.copies > one.copies
    assert one.total == pytest.approx(sum(one.categories().values()))


def test_idle_ticks_take_time():
    fast = predict_time(staged_plan(micro_batches=16), CHIPS["v5e"]).compute
    assert predict_time(staged_plan(micro_batches=4), CHIPS["v5e"]).compute > 1.3 * fast
    two = staged_plan(micro_batches=4, pipeline=InterleavedConfig(chunks=2))
    assert predict_time(two, CHIPS["v5e"]).compute < 1.3 * fast


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, pipeline",
    [
        (MeshConfig(stage=4, data=2), InterleavedConfig()),
        (MeshConfig(stage=2, data=4), InterleavedConfig(chunks=2)),
        (MeshConfig(stage=4, data=2), GPipeConfig()),
    ],
)
def test_a_compiled_pipeline_needs_what_is_planned(mesh, pipeline):
    """Arguments exactly, bytes between stages too, temporaries within a third."""
    plan = staged_plan(mesh=mesh, pipeline=pipeline)
    compiled = compile_step(plan, parse_topology("cpu:8"))
    assert isinstance(compiled, CompiledStep) and compiled.traffic is not None
    memory = estimate_memory(plan, "cpu")
    assert memory.arguments == compiled.arguments
    assert memory.temporaries == pytest.approx(compiled.temporaries, rel=1 / 3)
    planned = bytes_of(plan)
    sent = {one.kind: one.wire_bytes for one in compiled.traffic if one.axes == ("stage",)}
    assert sent["collective-permute"] == planned["activations"]
    assert sent.get("all-to-all", 0.0) == planned["chunks"]


def test_the_search_tries_stages_where_nothing_fits_without():
    plan = plan_of(EIGHT_LAYERS, MeshConfig(), batch_size=64, length=64)
    meshes = list(enumerate_meshes(8, stages=[1, *stages_of(plan, 8)]))
    numbers = Space(has_micro_batches=True)
    found = search(plan, meshes, CHIPS["cpu"], space=numbers)
    assert found.fitting[0].mesh.stage == 1
    slow = dataclasses.replace(CHIPS["h100"], domain=2, far_bandwidth=1e8)
    assert search(plan, meshes, slow, space=numbers).fitting[0].mesh.stage == 4
    tight = dataclasses.replace(CHIPS["cpu"], memory=1)
    nothing = search(plan, meshes, tight)
    assert nothing.num_meshes > 20 and not nothing.fitting and nothing.closest is not None


def test_the_search_proposes_only_pipelines_that_train():
    far = dataclasses.replace(CHIPS["h100"], domain=2, far_bandwidth=1e8)
    plan = plan_of(
        EIGHT_LAYERS,
        MeshConfig(),
        batch_size=64,
        length=64,
        pipeline=InterleavedConfig(chunks=2),
    )
    tried = list(enumerate_meshes(8, stages=[1, *stages_of(plan, 8)]))
    found = search(plan, tried, far, space=Space(has_micro_batches=True), keep=50)
    meshes = {one.mesh for one in found.fitting}
    assert meshes and all(mesh.stage > 1 for mesh in meshes)  # chunks need stages
    for one in found.fitting:
        check_pipeline(one.plan.model, one.plan.execution, one.plan.accumulation)
    assert stages_of(plan, 8) == [2, 4]
    odd = dataclasses.replace(
        plan,
        model=dataclasses.replace(
            EIGHT_LAYERS, layers=(LayerConfig(), LayerConfig(feed_forward=DenseConfig()))
        ),
    )
    assert stages_of(odd, 8) == [2]  # four periods of two layers, in two chunks


def test_schedules_that_fit_are_compared():
    plan = staged_plan(micro_batches=8, model=EIGHT_LAYERS)
    found = {schedule_in_words(one.pipeline): one for one in compare_schedules(plan, CHIPS["h100"])}
    # Eight layers on four stages.
    both = ["interleaved", "interleaved x2"]
    assert list(found) == ["gpipe", *both, *(f"{name}, deferred" for name in both)]
    assert found["interleaved, deferred"].idle < found["interleaved"].idle
    assert found["interleaved, deferred"].seconds < found["interleaved"].seconds
    assert found["interleaved, deferred"].memory > found["interleaved"].memory
    idle = [round(one.idle, 4) for one in found.values()]
    deferred = [9 / 32, 9 / 64]  # (p - 1) (F + B) / (v m (F + B + W)) with B = 2 F, W = F
    assert idle == [
        round(3 / 11, 4),
        round(3 / 11, 4),
        round(3 / 19, 4),
        *(round(bubble / (1 + bubble), 4) for bubble in deferred),
    ]
    assert [one.inputs for one in found.values()] == [8, 7, 11, 7, 11]
    assert found["gpipe"].memory > found["interleaved"].memory
    assert found["interleaved x2"].sent > found["interleaved"].sent
    odd = dataclasses.replace(plan, accumulation=2)  # no multiple of four
    assert len(compare_schedules(odd, CHIPS["h100"])) == 3
    layouts = compare_layouts(plan, CHIPS["h100"])
    assert layouts is not None and layouts.once < layouts.always
    assert compare_layouts(staged_plan(rules="zero2"), CHIPS["h100"]) is None
    assert compare_layouts(staged_plan(mesh=MeshConfig(stage=8)), CHIPS["h100"]) is None


def test_the_timetable_is_cut_to_the_width_and_left_out_when_long():
    lines = timetable(staged_plan(), width=30).splitlines()
    assert len(lines) == 4 and all(len(line) == 30 for line in lines)
    assert lines[0].startswith("stage 0  F0 F1 F2 F3") and lines[0].endswith("...")
    assert "..." not in timetable(staged_plan(micro_batches=2), width=200)
    assert timetable(staged_plan(micro_batches=64), width=30) == ""
    rows = GPipeConfig().schedule(11, 2).text().splitlines()  # numbers of two digits align
    assert [row.index("F0") for row in (rows[0], rows[9], rows[10])] == [10, 37, 40]
