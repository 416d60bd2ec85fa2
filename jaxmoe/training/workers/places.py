# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that a mesh and a layout have places for the workers of a method."""

from __future__ import annotations

from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.replicas.base import WorkersBase
from jaxmoe.replicas.fragments import Leaf
from sharding.workers import Workers


def workers_of(config: WorkersBase, execution: ExecutionConfig) -> Workers:
    """Return the workers of a method.

    Args:
        config: Method.
        execution: Execution with every size of the mesh filled in.

    Raises:
        ValueError: The mesh has places for another number of workers, or the layout of the state
            spans workers.
    """
    places = execution.mesh.replica
    number = places if config.workers is None else config.workers
    if places not in (1, number):
        raise ValueError(
            f"execution.mesh.replica={places} must be replicas.workers={number}, or 1, which"
            " trains all workers on the same devices"
        )
    if number < 2:
        raise ValueError(
            f"replicas {config.name!r} needs at least 2 workers, there is {number}: set"
            " execution.mesh.replica, or replicas.workers to train several on the same devices"
        )
    if execution.mesh.stage > 1:
        raise ValueError(
            f"execution.mesh.stage={execution.mesh.stage} with replicas {config.name!r}: a"
            " worker cannot be a pipeline yet: set execution.mesh.stage to 1"
        )
    if execution.rules in ("hybrid", "hierarchical"):
        raise ValueError(
            f"execution.rules={execution.rules} shares the state of all replicas out, and with"
            f" replicas {config.name!r} each has its own: choose fully_sharded or zero2"
        )
    return Workers(number, places > 1)


def trained_leaves(table: ParameterTable) -> list[Leaf]:
    """Return what a method knows about the parameters that are trained."""
    return [
        Leaf(
            path=row.path,
            shape=row.shape,
            axes=row.declaration.axes,
            role=row.declaration.role,
            is_stacked=row.declaration.is_stacked,
        )
        for row in table.trained_rows
    ]
