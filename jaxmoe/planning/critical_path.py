# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the time of a pipeline's layers against the critical path of 1F1B (Pipette, DATE 2024).

With p stages, m micro-batches, F and B the seconds of a stage's layers for one micro-batch and s
those of an activation or gradient on its way to the next stage,

    ticks          (m + p - 1) (F + s) + (m + p - 1) (B + s)
    critical path  m / p (p (F + B) + 2 (p - 1) s) + (p - 1) (F + B)      m >= p
                   p (F + B) + 2 (p - 1) s + (m - 1) (F + B)              m < p

Ticks are those of the executed program, whose stages compute and send together. On the critical
path a stage has p micro-batches under way, which wait for one round trip. Pipette counts whole
groups of p micro-batches; here a part of a group counts as its share. Both have the same bubble,
and differ by the sends alone, by less than 5% where 2 s is below 7.5% of F + B.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.pipelines import counts
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import seconds_of
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.training.pipeline.stages import ModelParts
from sharding.pipeline import PipelineOrder


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage for one micro-batch."""

    forward: float
    """Forward pass of the stage's layers (F)."""
    backward: float
    """Backward pass with what it recomputes (B)."""
    send: float
    """One activation or gradient to the next stage (s)."""


def stage_times(plan: StepPlan, chip: Chip) -> StageTimes:
    """Return the times of a stage of a plan with one chunk, communication in layers left out.

    Args:
        plan: Step on a mesh with stages.
        chip: Properties of each device.
    """
    sizes = Sizes.of(plan)
    pipeline_counts = counts(
        plan.execution.pipeline_order, plan.execution.mesh.stage, plan.accumulation
    )
    (sent,) = [traffic for traffic in step_traffic(plan) if traffic.reason == "activations"]
    rate = chip.flops * chip.efficiency * plan.mesh.size
    forward = backward = 0.0
    for stack in ModelParts.of(plan.model).staged.stacks:
        flops = sizes.layout.flops.by_stack[stack.path]
        seconds = plan.tokens / plan.accumulation / rate
        forward += flops.total / 3 * seconds
        backward += (flops.total + flops.again(sizes.remat(stack))) * seconds
    ticks = pipeline_counts.forward + pipeline_counts.backward
    return StageTimes(
        forward=forward, backward=backward, send=seconds_of(sent, sizes.mesh, chip) / ticks
    )


def tick_seconds(
    pipeline: PipelineOrder, stages: int, micro_batches: int, times: StageTimes
) -> float:
    """Return the seconds of the ticks of a schedule with one chunk.

    Args:
        pipeline: Schedule.
        stages: Stages of the pipeline (p).
        micro_batches: Micro-batches of a step (m).
        times: Seconds of one stage.
    """
    pipeline_counts = counts(pipeline, stages, micro_batches)
    forward = times.forward + times.send
    backward = times.backward + times.send
    return pipeline_counts.forward * forward + pipeline_counts.backward * backward


def critical_seconds(stages: int, micro_batches: int, times: StageTimes) -> float:
    """Return the seconds of the critical path of 1F1B.

    Args:
        stages: Stages of the pipeline (p).
        micro_batches: Micro-batches of a step (m).
        times: Seconds of one stage.
    """
    seconds = times.forward + times.backward
    round_trip = stages * seconds + 2 * (stages - 1) * times.send
    if micro_batches < stages:
        return round_trip + (micro_batches - 1) * seconds
    return micro_batches / stages * round_trip + (stages - 1) * seconds
