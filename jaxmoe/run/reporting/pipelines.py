# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes the pipeline of a run, and layers left out, for header, `describe` and report.html."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmoe.configs import from_json
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.pipeline.skipping import SkippingConfig
from jaxmoe.training.pipeline.stages import ModelParts

_MOST_TICKS = 200
"""Ticks of the longest timetable in a report."""


def pipeline_in_words(
    model: ModelConfig,
    execution: ExecutionConfig,
    accumulation: int,
    *,
    stages: int | None = None,
    skipping: SkippingConfig | None = None,
) -> str:
    """Return the layers of a stage, the idle share and the inputs that a stage keeps.

    Args:
        model: Model with the layers.
        execution: Schedule, and mesh with stages.
        accumulation: Micro-batches of a step.
        stages: Stages of the mesh in use; when None those of the execution.
        skipping: Layers that micro-batches leave out, or None.
    """
    stages, chunks = stages or execution.mesh.stage, execution.pipeline.chunks
    paths = None if skipping is None else skipping.paths(accumulation)
    schedule = execution.pipeline.schedule(stages, accumulation, paths)
    scan = ModelParts.of(model).staged
    others = model.num_layers - scan.num_layers
    number = scan.num_layers // (stages * chunks)
    layers = f"{number} layer{'s' * (number > 1)}"
    if chunks > 1:
        layers = f"{chunks} chunks of {layers}"
    plural = "s" * (others > 1)
    extra = (
        f", {others} layer{plural} with the embedding or the head on every stage" if others else ""
    )
    deferred = " with deferred weight gradients" * execution.pipeline.is_deferred
    return (
        f"{stages} with {layers} each{extra}; {execution.pipeline.name}{deferred}, {accumulation}"
        f" micro-batches: {schedule.idle_share:.0%} of the time idle, at most"
        f" {max(schedule.kept())} inputs kept"
    )


def saved_by_skipping(
    skipping: SkippingConfig, execution: ExecutionConfig, accumulation: int
) -> float:
    """Return the share of the layers' time that the timetable saves; 0 without stages.

    Args:
        skipping: Layers that micro-batches leave out.
        execution: Schedule, and mesh with every size filled in.
        accumulation: Micro-batches of a step.
    """
    stages, paths = execution.mesh.stage, skipping.paths(accumulation)
    if stages == 1 or paths is None:
        return 0.0
    tables = [execution.pipeline.schedule(stages, accumulation, some) for some in (paths, None)]
    partial, whole = (table.seconds() for table in tables)
    return 1.0 - partial / whole


def skipping_in_words(
    skipping: SkippingConfig, execution: ExecutionConfig, accumulation: int
) -> str:
    """Return what micro-batches leave out or swap, and the time that this saves.

    Args:
        skipping: Layers that micro-batches leave out.
        execution: Schedule, and mesh with every size filled in.
        accumulation: Micro-batches of a step.
    """
    saved = saved_by_skipping(skipping, execution, accumulation)
    words = f"{skipping.share_left_out:.0%} of {skipping.groups} groups of layers"
    if skipping.order != "ascending":
        words = f"{words}, {skipping.order} in half of the micro-batches"
    if execution.mesh.stage == 1:
        return f"{words}, masked: no time saved without stages"
    return f"{words}: {abs(saved):.0%} {'less' if saved >= 0 else 'more'} time in layers planned"


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
    skipping = None if saved is None else from_json(SkippingConfig, saved)
    words = pipeline_in_words(model, execution, accumulation, stages=stages, skipping=skipping)
    paths = None if skipping is None else skipping.paths(accumulation)
    schedule = execution.pipeline.schedule(stages, accumulation, paths)
    text = schedule.text() if len(schedule.ticks) <= _MOST_TICKS else ""
    return f"Stages: {words}.", text
