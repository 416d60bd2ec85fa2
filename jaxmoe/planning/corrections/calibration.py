# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the temporaries of a deep model from two shallow ones that were compiled.

    temporaries(L) = a + b L

Layers of one kind are computed in a loop whose body is `execution.unroll` iterations, and those
that are left over follow the loop. A program grows by the same bytes with each turn of the loop.
Models of other depths differ in their left-over layers, or have no loop: the compiler merges,
keeps and pads other arrays in them, and their temporaries lie on no line. So the shallow models
have as many layers left over as the deep one.

Bytes that are alive at once grow linearly then, to a per mille. Temporaries also hold what the
compiler's packing of arrays of unequal lives loses, 10 to 90% of these, which grows unevenly. So
the shallow models are not very shallow: they have a third and two thirds of the turns, at least 2
and 4. Compiling does not take longer for more turns.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig

_FEWEST_TURNS = 2
"""Turns of the shallowest loop; the compiler unrolls one of a single turn."""


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
        execution: Mesh with stages, whose chunks the layers must divide, and unrolling.
    """
    period = max(len(model.layers), 1)
    stages = execution.mesh.stage
    # Stages do not unroll.
    turn = period * (stages * execution.pipeline.chunks if stages > 1 else execution.unroll)
    outside = max(model.dense_layers, default=-1) + 1
    outside += (model.num_layers - outside) % turn
    few = max(_FEWEST_TURNS, (model.num_layers - outside) // turn // 3)
    depths = outside + few * turn, outside + 2 * few * turn
    return depths if depths[1] < model.num_layers else None
