# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures of a batch that is packed by level."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.contrib.levels.by_level import document_degrees
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.accumulation import level_of, level_tokens, split_rows
from jaxmoe.training.parts.base import StepPart

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import StepGradients
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step


def level_measures(
    batch: Batch, execution: ExecutionConfig, accumulation: int
) -> dict[str, Float[Array, ""]]:
    """Return the measures of a batch by name.

        micro_batches    that the step computed
        full             share of their places that hold a token
        share_<d>        share of the tokens whose documents are shared by d devices

    Args:
        batch: Batch of a step, with `level`.
        execution: Mesh and form of sequence parallelism.
        accumulation: Micro-batches of the batch, the unused ones included.
    """
    assert batch.level is not None  # as the caller has found
    fields = {"level": batch.level, "segment_ids": batch.segment_ids}
    parts = jax.tree.map(
        lambda rows: split_rows(jnp.asarray(rows), accumulation, execution.placement), fields
    )
    levels = level_of(parts["level"])
    tokens = level_tokens(parts["segment_ids"])
    total = jnp.maximum(jnp.sum(tokens), 1.0)
    num_used = jnp.sum(levels >= 0, dtype=jnp.float32)
    rows, length = parts["segment_ids"].shape[1:]
    measures = {"micro_batches": num_used, "full": total / (num_used * float(rows * length))}
    degrees = document_degrees(execution.sequence_parallel, execution.mesh.seq)
    for level, degree in enumerate(degrees):
        tokens_of_level = jnp.sum(jnp.where(levels == level, tokens, 0.0))
        measures[f"share_{degree}"] = tokens_of_level / total
    return measures


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LevelMeasures(StepPart):
    """Micro-batches and tokens by level, of batches packed by level."""

    name: ClassVar[str] = "level_measures"

    def update(
        self, step: Step, state: TrainState, batch: Batch, gradients: StepGradients
    ) -> StepGradients:
        """Return the gradients with `levels` among the measures."""
        del state
        levels = {}
        if batch.level is not None:
            levels = level_measures(batch, step.execution, step.accumulation)
        return gradients._replace(measures={**gradients.measures, "levels": levels})
