# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of a model for decoding: one per stack of layers, of the kind that its mixer has.

They travel in the carry of the loop over layers, where each layer writes its part in place: see
`jaxmoe.layers.records.Stream.cache`.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from sharding import axes as ax
from sharding.constrain import Placement

Cache = dict[str, Any]
"""The mixers' caches by path of the stack (`LayerStack.path`), each with a leading dimension of its
layers."""


def initial_cache(
    model: ModelConfig, execution: ExecutionConfig, *, batch: int, length: int
) -> Cache:
    """Return an empty cache, cut as the mesh is.

    Args:
        model: Layers that have a cache.
        execution: Precision and placement of the cache.
        batch: Sequences.
        length: Positions that it can hold at least.
    """
    shards = axis_devices(execution.placement, ax.ACT_CACHE)
    slots = -(-length // shards) * shards
    return {
        stack.path: stack.kind.mixer.initial_cache(
            execution, layers=stack.num_calls, batch=batch * model.num_streams, slots=slots
        )
        for stack in model.stacks
    }


def axis_devices(placement: Placement, name: str) -> int:
    """Return the devices over which a logical axis is spread on the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in placement.mesh_axes(name))
