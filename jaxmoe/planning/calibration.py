# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the temporaries of a deep model from two shallow ones that were compiled.

    temporaries(L) = a + b L

Layers of one kind are computed in a loop, so what a program holds grows by the same bytes with each
layer, once the peak is that of the layers. A loop of one iteration is no loop to the compiler, so
the shallow models have a few.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Temporaries of a step by number of layers."""

    depths: tuple[int, int]
    """Layers of the models that were compiled."""
    temporaries: tuple[int, int]
    """Their temporaries, bytes."""

    def at(self, layers: int) -> float:
        """Return the temporaries of a model with a number of layers.

        Args:
            layers: Number of layers.
        """
        (first, second), (low, high) = self.depths, self.temporaries
        return low + (high - low) / (second - first) * (layers - first)


def shallow_depths(model: ModelConfig, execution: ExecutionConfig) -> tuple[int, int] | None:
    """Return two numbers of layers that the model may be cut to; None if it is not deeper.

    Args:
        model: Model to cut.
        execution: Mesh with stages, whose chunks the layers must divide.
    """
    period = max(len(model.layers), 1)
    unit = period * execution.mesh.stage * execution.pipeline.chunks
    first = max(model.dense_layers, default=-1) + 1
    depths = first + 2 * unit, first + 4 * unit
    return depths if depths[1] < model.num_layers else None
