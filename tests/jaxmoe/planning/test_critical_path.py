# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Time of a pipeline by its ticks, by Pipette's formula, and by simulating 1F1B."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from experiments.plan.pipeline_part import pipeline_part
from jaxmoe.models.flops import flops_per_token
from jaxmoe.planning.critical_path import (
    StageTimes,
    critical_seconds,
    stage_times,
    tick_seconds,
)
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.search import Candidate
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import executed_flops, predict_time
from sharding.mesh import MeshConfig
from sharding.pipeline import GPipeConfig, InterleavedConfig
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

SECONDS = st.floats(1e-3, 10.0)


def simulated(stages, micro_batches, times):
    """Seconds of 1F1B: each stage does its works in order, as soon as their inputs are there."""
    works = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        order = [("F", micro) for micro in range(ahead)]
        for micro in range(micro_batches):
            later = micro + ahead
            order += [("F", later)] * (later < micro_batches) + [("B", micro)]
        works.append(order)
    done, free, places = {}, [0.0] * stages, [0] * stages
    while any(place < 2 * micro_batches for place in places):
        for stage in range(stages):
            while places[stage] < 2 * micro_batches:
                kind, micro = works[stage][places[stage]]
                before = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= before < stages:
                    if (kind, before, micro) not in done:
                        break
                    ready = done[kind, before, micro] + times.send
                took = times.forward if kind == "F" else times.backward
                free[stage] = max(free[stage], ready) + took
                done[kind, stage, micro] = free[stage]
                places[stage] += 1
    return max(free)


@st.composite
def drawn(draw, most):
    """Stages, micro-batches in whole groups or fewer than stages, and times of a stage."""
    stages = draw(st.integers(2, 8))
    few, groups = st.integers(1, stages), st.integers(1, 8).map(lambda n: n * stages)
    forward, backward = draw(SECONDS), draw(SECONDS)
    send = draw(st.floats(0.0, most)) * (forward + backward)
    times = StageTimes(forward=forward, backward=backward, send=send)
    return stages, draw(few | groups), times


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(given=drawn(most=0.0375), pipeline=st.sampled_from(["gpipe", "interleaved"]))
def test_ticks_take_the_time_of_the_critical_path(given, pipeline):
    """Within 5% where two sends take up to 7.5% of the compute; never less time."""
    config = {"gpipe": GPipeConfig(), "interleaved": InterleavedConfig()}[pipeline]
    stages, micro_batches, times = given
    ticks = tick_seconds(config, stages, micro_batches, times)
    critical = critical_seconds(stages, micro_batches, times)
    assert critical * (1 - 1e-9) <= ticks <= 1.05 * critical


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(given=drawn(most=0.5))
def test_ticks_differ_from_the_critical_path_by_sends_alone(given):
    stages, micro_batches, times = given
    ticks = tick_seconds(InterleavedConfig(), stages, micro_batches, times)
    critical = critical_seconds(stages, micro_batches, times)
    sends = 2 * (micro_batches + stages - 1)
    sends -= 2 * (stages - 1) * max(1.0, micro_batches / stages)
    assert ticks - critical == pytest.approx(sends * times.send, rel=1e-6, abs=1e-9 * ticks)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(given=drawn(most=0.0375))
def test_critical_path_is_that_of_the_simulated_pipeline(given):
    """Exactly without sends; with short ones within 5%."""
    stages, micro_batches, times = given
    critical = critical_seconds(stages, micro_batches, times)
    assert simulated(stages, micro_batches, times) == pytest.approx(critical, rel=0.05)
    still = dataclasses.replace(times, send=0.0)
    wanted = simulated(stages, micro_batches, still)
    assert critical_seconds(stages, micro_batches, still) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_times_of_a_stage_are_those_of_the_predicted_step(remat):
    """Ticks without sends are the compute of the layers in stages; the rest is the head's."""
    model = dataclasses.replace(WIDE, num_layers=8)
    plan = plan_of(model, MeshConfig(stage=4, data=2), batch_size=64, length=64, remat=remat)
    plan, chip = dataclasses.replace(plan, accumulation=8), CHIPS["v5e"]
    times = stage_times(plan, chip)
    ticks = tick_seconds(plan.execution.pipeline_order, 4, 8, dataclasses.replace(times, send=0.0))
    (stack,) = model.stacks
    sizes = Sizes.of(plan)
    outside = flops_per_token(model, plan.table, plan.sequence_length)
    outside -= sizes.layout.flops.by_stack[stack.path].total
    layers = executed_flops(sizes) - outside * plan.tokens
    assert ticks == pytest.approx(layers / 8 / (chip.flops * chip.efficiency), rel=1e-9)
    time = predict_time(plan, chip)
    assert times.send * 2 * (8 + 3) == pytest.approx(time.communication["activations over stage"])
    candidate = Candidate(plan=plan, time=time, memory=estimate_memory(plan, "tpu"))
    assert "on the critical path of 1F1B" in pipeline_part(candidate, chip)
