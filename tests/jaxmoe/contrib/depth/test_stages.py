# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers left out, and n residual streams, on a mesh with stages: gradients, plans, reports."""

import dataclasses

import pytest

from jaxmoe.contrib.depth.hyper_connections import HyperResidualConfig
from jaxmoe.contrib.depth.paths import choose_paths
from jaxmoe.contrib.depth.skipping import PartialBackprop, SkippingConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.pipelines import counts, idle_over_useful
from jaxmoe.planning.pipelines_compared import compare_schedules
from jaxmoe.planning.step_time import predict_time
from sharding import MeshConfig
from sharding.expert_parallel import AllToAllConfig
from sharding.pipeline import InterleavedConfig
from tests.jaxmoe.planning.test_pipeline_plans import bytes_of, staged_plan
from tests.jaxmoe.run.test_pipeline_report import report
from tests.jaxmoe.training.pipeline.test_compiled import STAGES, expected_permutes, permutes_of
from tests.jaxmoe.training.pipeline.test_gradients import (
    AROUND,
    DENSE_FIRST,
    Row,
    check_row,
    with_method,
)

HALF = SkippingConfig(groups=2, ratio=0.5)
"""Each micro-batch passes through one of two stages."""

ROWS = {
    "skipping": Row(mesh=MeshConfig(stage=2, data=2), skipping=HALF),
    "skipping, four stages": Row(mesh=MeshConfig(stage=4, data=2), skipping=SkippingConfig()),
    "skipping, experts, bias": Row(
        model=with_method("loss_free"),
        parts=2,
        mesh=MeshConfig(stage=2, data=2, expert=2),
        execution={"dispatcher": AllToAllConfig(), "remat": "full"},
        skipping=HALF,
    ),
    "skipping, two chunks": Row(
        mesh=MeshConfig(stage=2, data=2, tensor=2),
        execution={"pipeline": InterleavedConfig(chunks=2), "rules": "zero2"},
        skipping=SkippingConfig(never=(0,)),
    ),
    "skipping, noise and carried logits": Row(
        model=dataclasses.replace(with_method("moe_plus_plus"), num_layers=4),
        mesh=MeshConfig(stage=4, data=2),
        skipping=SkippingConfig(),
    ),
    "skipping, MoE layers around the stages": pytest.param(
        Row(model=AROUND, mesh=MeshConfig(stage=2, data=2), skipping=HALF),
        marks=pytest.mark.large,
    ),
    "hyper-connections": Row(
        model=dataclasses.replace(DENSE_FIRST, residual=HyperResidualConfig(streams=2)),
        mesh=MeshConfig(stage=2, data=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_gradients_equal_those_without_stages(row):
    check_row(row)


@pytest.mark.slow
def test_a_partial_pipeline_permutes_over_both_hops_of_fewer_ticks():
    skipping = SkippingConfig()
    runs = InterleavedConfig().schedule(STAGES, 8, skipping.paths(8)).runs()
    expected = 2 * sum(run.length * len(run.kinds) for run in runs)
    assert permutes_of(InterleavedConfig(), 8, skipping) == expected
    assert expected < 2 * expected_permutes(InterleavedConfig(), 8)


def test_counts_of_a_partial_table():
    """Each array is sent over two hops, and there are fewer ticks."""
    paths = choose_paths(4, 37, 0.25)
    schedule = InterleavedConfig().schedule(4, 37, paths)
    found, whole = (counts(InterleavedConfig(), 4, 37, some) for some in (paths, None))
    assert found.ticks == len(schedule.ticks) < whole.ticks
    assert (found.hops, whole.hops) == (2, 1)
    bubble = idle_over_useful(InterleavedConfig(), 4, 37, paths)
    assert bubble == pytest.approx(schedule.bubble())


def test_a_plan_knows_what_micro_batches_leave_out():
    whole = staged_plan()
    partial = dataclasses.replace(
        whole, gradients=PartialBackprop(skipping=SkippingConfig(groups=4))
    )
    found = counts(InterleavedConfig(), 4, whole.accumulation, partial.paths)
    ticks = found.forward + found.backward
    assert bytes_of(partial)["activations"] == 2 * ticks / 22 * bytes_of(whole)["activations"]
    times = [predict_time(plan, CHIPS["h100"]).step for plan in (partial, whole)]
    assert times[0] < times[1]
    (only,) = compare_schedules(partial, CHIPS["h100"])
    assert (only.pipeline, only.inputs) == (InterleavedConfig(), found.inputs)


def test_the_report_shows_the_schedule_of_what_is_left(tmp_path):
    page = report(tmp_path, MeshConfig(stage=4, data=-1), skipping=SkippingConfig())
    assert "\nstage 3  .  .  F0+B0 F1+B1 F2+B2 ." in page


@pytest.mark.parametrize(
    ("skipping", "stages", "words"),
    [
        (SkippingConfig(groups=8), 8, "25% of 8 groups of layers: 20% less time in layers planned"),
        (
            SkippingConfig(groups=8, never=(0, 7)),
            8,
            "25% of 8 groups of layers: 0% less time in layers planned",
        ),
        (SkippingConfig(), 1, "25% of 4 groups of layers, masked: no time saved without stages"),
        (
            SkippingConfig(ratio=0.0, order="swapped_ends"),
            4,
            "0% of 4 groups of layers, swapped_ends in half of the micro-batches: 1% more time in"
            " layers planned",
        ),
        (SkippingConfig(ratio=0.1), 4, "0% of 4 groups of layers: 0% less time in layers planned"),
    ],
)
def test_what_is_left_out_in_words(skipping, stages, words):
    execution = ExecutionConfig(mesh=MeshConfig(stage=stages))
    assert skipping.describe(execution, 64) == words
