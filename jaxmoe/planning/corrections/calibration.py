# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the temporaries of a deep model from a shallower one that was compiled.

    temporaries(L) = compiled(l) + closed form(L) - closed form(l)

Layers of one kind are computed in a loop whose body is `execution.unroll` iterations, and those
that are left over follow the loop. A program grows by the same bytes with each turn of the loop.
Models of other depths differ in their left-over layers, or have no loop: the compiler merges,
keeps and pads other arrays in them, and their temporaries lie on no line. So the shallow model has
as many layers left over as the deep one.

Bytes that are alive at once then grow linearly, but the compiler may change its program at some
depth, and temporaries also hold what its packing of arrays of unequal lives loses, 10 to 90% of
these, which grows unevenly. A line through two depths takes such a jump for the growth of a layer;
the closed form knows that growth, except in small models, whose layers grow by up to twice as much.
The shallow model has two thirds of the turns: compiling does not take longer for more turns, and it
may fit where the whole model does not.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig

_FEWEST_TURNS = 2
"""Turns of the shallowest loop; the compiler unrolls one of a single turn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """Temporaries of a step at one number of layers."""

    depth: int
    """Layers of the model that was compiled."""
    compiled: int
    """Its temporaries by the compiler, bytes."""
    closed: float
    """Its temporaries by the closed form, bytes."""

    def at(self, closed: float) -> float:
        """Return the temporaries of the model with more layers, bytes.

        Args:
            closed: Its temporaries by the closed form, bytes.
        """
        return self.compiled + closed - self.closed


def shallow_depth(model: ModelConfig, execution: ExecutionConfig) -> int | None:
    """Return the number of layers that the model is cut to; None if it is not deeper.

    Args:
        model: Model to cut.
        execution: Mesh with stages, whose chunks the layers must divide, and unrolling.
    """
    period = max(len(model.layers), 1)
    stages = execution.mesh.stage
    # Stages do not unroll.
    loop = execution.unroll_of(max(1, model.num_layers // period))
    turn = period * (stages * execution.pipeline_order.chunks if stages > 1 else loop)
    outside = max(model.dense_layers, default=-1) + 1
    outside += (model.num_layers - outside) % turn
    turns = (model.num_layers - outside) // turn
    depth = outside + max(_FEWEST_TURNS, 2 * turns // 3) * turn
    return depth if depth < model.num_layers else None
