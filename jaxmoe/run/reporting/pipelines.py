# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes the pipeline of a run, for header, `describe` and report.html."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmoe.configs import from_json
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.estimators.base import LayerPaths
from jaxmoe.training.estimators.skipping import Skipping
from jaxmoe.training.pipeline.stages import ModelParts

_MOST_TICKS = 200
"""Ticks of the longest timetable in a report."""


def pipeline_in_words(
    model: ModelConfig,
    execution: ExecutionConfig,
    accumulation: int,
    *,
    stages: int | None = None,
    paths: LayerPaths | None = None,
) -> str:
    """Return the layers of a stage, the idle share and the inputs that a stage keeps.

    Args:
        model: Model with the layers.
        execution: Schedule, and mesh with stages.
        accumulation: Micro-batches of a step.
        stages: Stages of the mesh in use; when None those of the execution.
        paths: Groups of layers that each micro-batch passes through; None for all in order.
    """
    stages = stages or execution.mesh.stage
    chunks = execution.pipeline_order.chunks
    schedule = execution.pipeline_order.schedule(stages, accumulation, paths and paths.groups_of)
    scan = ModelParts.of(model).staged
    num_outside = model.num_layers - scan.num_layers
    number = scan.num_layers // (stages * chunks)
    layers = f"{number} layer{'s' * (number > 1)}"
    if chunks > 1:
        layers = f"{chunks} chunks of {layers}"
    plural = "s" * (num_outside > 1)
    extra = (
        f", {num_outside} layer{plural} with the embedding or the head on every stage"
        if num_outside
        else ""
    )
    deferred = " with deferred weight gradients" * execution.pipeline_order.is_deferred
    return (
        f"{stages} with {layers} each{extra}; {execution.pipeline_order.name}{deferred},"
        f" {accumulation} micro-batches: {schedule.idle_share:.0%} of the time idle, at most"
        f" {max(schedule.kept())} inputs kept"
    )


def pipeline_of_report(stages: int, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return words and timetable of the pipeline of a recorded run.

    Args:
        stages: Stages of the mesh of the run, at least 2.
        config: Configuration of the run as JSON.
    """
    execution = from_json(ExecutionConfig, config["execution"])
    model = from_json(ModelConfig, config["model"])
    accumulation = config["training"]["accumulation"]
    saved = config["training"].get("skipping")
    paths = None
    if saved is not None:
        paths = from_json(Skipping, saved).gradients.paths(accumulation)
    sentence = pipeline_in_words(model, execution, accumulation, stages=stages, paths=paths)
    schedule = execution.pipeline_order.schedule(stages, accumulation, paths and paths.groups_of)
    text = schedule.text() if len(schedule.ticks) <= _MOST_TICKS else ""
    return f"Stages: {sentence}.", text
