# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the schedules of a pipeline, and layouts of its weights, in closed form.

To compare another schedule: `choices` in `jaxmoe/planning/pipelines_compared.py`.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.pipelines import counts, idle_over_useful
from jaxmoe.planning.step_time import predict_time
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.training.pipeline import check_pipeline
from sharding import axes as ax
from sharding.pipeline import GPipeConfig, InterleavedConfig, PipelineOrder

MOST_TICKS = 40
"""Ticks of the longest timetable that is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCost:
    """Figures of one schedule on one device, in one step."""

    pipeline: PipelineOrder
    idle: float
    """Share of the time of the layers in which a stage waits."""
    inputs: int
    """Most inputs of groups of layers that a stage keeps."""
    memory: float
    """Bytes of the whole step."""
    sent: float
    """Bytes sent along the axis stage."""
    seconds: float
    """Predicted time of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCost:
    """Bytes of weights that a device sends in a step, gathered as planned or once a step."""

    always: float
    """Bytes sent with the layout of the plan."""
    once: float
    """Bytes sent with zero2."""
    memory: float
    """Bytes of the whole step with zero2."""


def choices(plan: StepPlan) -> list[StepPlan]:
    """Return the plan with every schedule to compare that its layers and micro-batches allow."""
    own = plan.execution.pipeline_order
    orders: list[PipelineOrder] = [GPipeConfig()]
    orders += [
        InterleavedConfig(chunks=chunks, weight_gradients=when)
        for when in ("at_once", "deferred")
        for chunks in (1, 2, 4)
    ]
    candidates = []
    for pipeline in [*orders, *([] if own in orders else [own])]:
        execution = dataclasses.replace(plan.execution, pipeline=pipeline)
        choice = dataclasses.replace(plan, execution=execution)
        try:
            check_pipeline(choice.model, execution, choice.accumulation)
            choice.gradients.check(choice)
        except ValueError:
            continue
        candidates.append(choice)
    return candidates


def compare_schedules(plan: StepPlan, chip: Chip) -> list[ScheduleCost]:
    """Return the figures of the schedules that fit a plan.

    Args:
        plan: Step on a mesh with stages.
        chip: Properties of each device.
    """
    rows = []
    for order in choices(plan):
        pipeline = order.execution.pipeline_order
        stages = order.execution.mesh.stage
        bubble = idle_over_useful(pipeline, stages, order.accumulation, order.paths)
        rows.append(
            ScheduleCost(
                pipeline=pipeline,
                idle=bubble / (1.0 + bubble),
                inputs=counts(pipeline, stages, order.accumulation, order.paths).inputs,
                memory=estimate_memory(order, chip.platform).total,
                sent=sum(each.bytes for each in step_traffic(order) if each.axes == (ax.STAGE,)),
                seconds=predict_time(order, chip).step,
            )
        )
    return rows


def compare_layouts(plan: StepPlan, chip: Chip) -> LayoutCost | None:
    """Return what gathering weights once a step saves; None if the plan does not gather more often.

    Args:
        plan: Step on a mesh with stages.
        chip: Properties of each device.
    """
    if plan.execution.state_layout.gathered == "step":
        return None
    zero2_plan = plan.on(dataclasses.replace(plan.execution, rules="zero2"))
    always = _weights(plan)
    once = _weights(zero2_plan)
    if always == 0.0:
        return None
    memory = estimate_memory(zero2_plan, chip.platform).total
    return LayoutCost(always=always, once=once, memory=memory)


def _weights(plan: StepPlan) -> float:
    return sum(traffic.bytes for traffic in step_traffic(plan) if traffic.reason == "weights")


def schedule_in_words(pipeline: PipelineOrder) -> str:
    """Return a schedule as `gpipe` or `interleaved x2, deferred`."""
    chunks = f" x{pipeline.chunks}" if pipeline.chunks > 1 else ""
    return pipeline.name + chunks + (", deferred" if pipeline.is_deferred else "")


def timetable(plan: StepPlan, width: int) -> str:
    """Return the timetable of a plan, each line cut to a width; empty if it has too many ticks.

    Args:
        plan: Step on a mesh with stages.
        width: Most characters of a line.
    """
    pipeline = plan.execution.pipeline_order
    stages = plan.execution.mesh.stage
    if counts(pipeline, stages, plan.accumulation, plan.paths).ticks > MOST_TICKS:
        return ""
    return cut(pipeline.schedule(stages, plan.accumulation, plan.paths).text(), width)


def cut(text: str, width: int) -> str:
    """Return the lines of a text, those that are longer than a width cut and marked with `...`."""
    return "\n".join(
        line if len(line) <= width else line[: max(width - 3, 0)] + "..."
        for line in text.splitlines()
    )
