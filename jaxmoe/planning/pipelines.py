# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts what a pipeline repeats in a step: ticks, arrays kept, passes through each layer.

A stage recomputes the forward pass of a group of layers from the kept input, in every tick of B,
and does so on old values where it has no work. Deferred gradients of weights are computed where
there is work alone. With p stages, v chunks, m micro-batches and n layers in the staged scan, a
device passes through

    staged layers    (v m + p - 1) n / (p v)   times forward alone, as often forward and backward
    layers before    m of each                 forward alone, as often forward and backward
    layers after     m of each                 forward and backward

Counts are those of the schedule's table. They grow linearly with m once every stage is busy, so
those of a large table follow from two smaller ones. Where micro-batches leave out groups, the table
itself is counted, and each activation is sent to the next stage and to the one after it.

To add a count: a field of `Counts` and its value in `_count`, in `jaxmoe/planning/pipelines.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.stacks import Scan
from jaxmoe.training.pipeline.stages import ModelParts
from sharding.pipeline import Paths, PipelineOrder, plan_slots


class Counts(NamedTuple):
    """Numbers of a schedule table."""

    ticks: int
    forward: int
    """Ticks in which some stage does F."""
    backward: int
    """Ticks in which some stage does B."""
    inputs: int
    """Most inputs of groups that a stage keeps."""
    gradients: int
    """Most gradients that arrived from the next stage and wait."""
    heads: int
    """Most gradients of the head that wait."""
    weights: int
    """Ticks in which some stage computes gradients of weights: those of W, or of B."""
    deferred: int
    """Most W that wait on a stage."""
    hops: int
    """Stages to which each activation and each gradient is sent."""


class Passes(NamedTuple):
    """Passes of one device through some layers in a step: layers times repetitions."""

    forward: float
    """Forward alone."""
    trained: float
    """Forward, then backward."""
    weights: float
    """Gradients of the weights, which are part of the backward passes or deferred."""

    @property
    def time(self) -> float:
        """Time of the passes, in that of one forward."""
        return self.forward + 2 * self.trained + self.weights


@functools.lru_cache(maxsize=4096)  # a search asks for each of a few hundred many times
def counts(
    pipeline: PipelineOrder, stages: int, micro_batches: int, paths: Paths | None = None
) -> Counts:
    """Return the counts of a schedule.

    Args:
        pipeline: Schedule.
        stages: Stages of the pipeline.
        micro_batches: Micro-batches of a step.
        paths: Groups that each micro-batch passes through; None for all.

    Raises:
        ValueError: The schedule does not fit the micro-batches.
    """
    pipeline.check(stages, micro_batches)
    few = 4 * stages
    if micro_batches <= few + stages or paths is not None:
        return _count(pipeline, stages, micro_batches, paths)
    first = _count(pipeline, stages, few)
    two = _count(pipeline, stages, few + stages)
    more = micro_batches - few
    return Counts(*(a + (b - a) * more // stages for a, b in zip(first, two, strict=True)))


@functools.lru_cache(maxsize=1024)
def _count(
    pipeline: PipelineOrder, stages: int, micro_batches: int, paths: Paths | None = None
) -> Counts:
    schedule = pipeline.schedule(stages, micro_batches, paths)
    runs = schedule.runs()
    slots = plan_slots(schedule)
    return Counts(
        ticks=len(schedule.ticks),
        forward=sum(run.length for run in runs if "F" in run.kinds),
        backward=sum(run.length for run in runs if "B" in run.kinds),
        inputs=slots.num_inputs,
        gradients=slots.num_gradients,
        heads=slots.num_heads,
        weights=sum(run.length for run in runs if schedule.kinds[-1] in run.kinds),
        deferred=slots.num_deferred,
        hops=len(schedule.hops),
    )


def least_counts(pipeline: PipelineOrder, micro_batches: int) -> Counts:
    """Return counts that no schedule is below in which all micro-batches pass through all layers:
    each stage does as many F, B and W, and never waits.

    Args:
        pipeline: Schedule.
        micro_batches: Micro-batches of a step.
    """
    works = pipeline.chunks * micro_batches
    return Counts(
        ticks=works,
        forward=works,
        backward=works,
        inputs=0,
        gradients=0,
        heads=0,
        weights=works,
        deferred=0,
        hops=1,
    )


def idle_over_useful(
    pipeline: PipelineOrder, stages: int, micro_batches: int, paths: Paths | None = None
) -> float:
    """Return the time of idle ticks over that of useful ones; 0 with one stage.

    Args:
        pipeline: Schedule.
        stages: Stages of the pipeline.
        micro_batches: Micro-batches of a step.
        paths: Groups that each micro-batch passes through; None for all.
    """
    if stages == 1:
        return 0.0
    pipeline_counts = counts(pipeline, stages, micro_batches, paths)
    time = Passes(pipeline_counts.forward, pipeline_counts.backward, pipeline_counts.weights).time
    works = pipeline.chunks * micro_batches
    if paths is not None:
        works = sum(map(len, paths)) / stages
    return time / (4.0 * works) - 1.0


def passes(
    parts: ModelParts,
    execution: ExecutionConfig,
    accumulation: int,
    name: str,
    layers: int,
    pipeline_counts: Counts | None,
) -> Passes:
    """Return the passes of one device through the layers of one stack in a step.

    Args:
        parts: Parts of the model.
        execution: Mesh with stages, and schedule.
        accumulation: Micro-batches of a step.
        name: Name of the scan of the stack; another one for parameters outside of layers.
        layers: Layers of the stack in the whole model.
        pipeline_counts: Counts of the schedule; None without stages, where layers that a
            micro-batch leaves out are computed and masked.
    """
    once = float(accumulation * layers)
    if pipeline_counts is None:
        return Passes(0.0, once, once)
    if name == parts.staged.name:
        group = layers / (execution.mesh.stage * execution.pipeline_order.chunks)
        ticks = pipeline_counts.forward, pipeline_counts.backward, pipeline_counts.weights
        return Passes(*(number * group for number in ticks))
    return Passes(once if name in _names(parts.before) else 0.0, once, once)


def _names(scans: tuple[Scan, ...]) -> tuple[str, ...]:
    return tuple(scan.name for scan in scans)
