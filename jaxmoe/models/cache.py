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

    Raises:
        ValueError: `execution.cache_reading` selects pages that a mixer does not have.
    """
    check_reading(model, execution)
    slots = num_slots(execution, length)
    return {
        stack.path: stack.kind.mixer.initial_cache(
            execution, layers=stack.num_calls, batch=batch * model.rows_per_sequence, slots=slots
        )
        for stack in model.stacks
    }


def check_reading(model: ModelConfig, execution: ExecutionConfig) -> None:
    """Refuse to select parts of caches that are read as a whole.

    Args:
        model: Layers that have a cache.
        execution: Part of the cache that is read.

    Raises:
        ValueError: A mixer that attends has no pages, or no mixer attends.
    """
    mixers = [kind.mixer for kind in model.kinds]
    attending = [mixer for mixer in mixers if not mixer.is_recurrent]
    for mixer in attending or mixers:
        execution.cache_reading.check(mixer.name, can_select=mixer.can_select_pages)


def num_slots(execution: ExecutionConfig, length: int) -> int:
    """Return the slots of a cache for a number of positions.

    Args:
        execution: Placement of the cache, and part of it that is read.
        length: Positions that it can hold at least.
    """
    shards = axis_devices(execution.placement, ax.ACT_CACHE)
    return execution.cache_reading.num_slots(length, shards)


def bytes_read(model: ModelConfig, execution: ExecutionConfig, length: int) -> int:
    """Return the bytes of keys and values that one generated token of one sequence reads.

    Args:
        model: Layers that have a cache.
        execution: Precision and placement of the cache, and part of it that is read.
        length: Positions that the cache can hold at least.
    """
    slots = num_slots(execution, length)
    precision = execution.precision
    return sum(
        execution.cache_reading.bytes_read(
            slots,
            bytes_per_token=mixer.cache_bytes_per_token(precision, layers=stack.num_calls),
            num_layers=stack.num_calls,
            key_features=mixer.key_features,
        )
        for stack in model.stacks
        for mixer in (stack.kind.mixer,)
    )


def axis_devices(placement: Placement, name: str) -> int:
    """Return the devices over which a logical axis is spread on the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in placement.mesh_axes(name))
