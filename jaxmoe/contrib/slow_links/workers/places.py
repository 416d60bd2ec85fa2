# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that a mesh and a layout have places for the workers of a method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxmoe import combinations
from jaxmoe.contrib.slow_links.fragments import SEPARATOR, Leaf
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.step import Step

if TYPE_CHECKING:
    from jaxmoe.contrib.slow_links.base import WorkersBase


def workers_of(config: WorkersBase, execution: ExecutionConfig, site: int | None = None) -> Workers:
    """Return the workers of a method that are in this job.

    Args:
        config: Method.
        execution: Execution with every size of the mesh filled in.
        site: Number of the one worker of this job; None if all workers are in it.

    Raises:
        ValueError: The mesh has places for another number of workers, or the layout of the state
            spans workers.
    """
    places = execution.mesh.replica
    number = config.num_workers(places) if site is None else 1
    if places not in (1, number):
        raise ValueError(
            f"execution.mesh.replica={places} must be replicas.workers={number}, or 1, which"
            " trains all workers on the same devices"
        )
    if number < 2 and site is None:
        raise ValueError(
            f"the number of workers of replicas {config.name!r} must be at least 2, and is"
            f" {number}: set execution.mesh.replica, or replicas.workers to train several on the"
            " same devices"
        )
    combinations.check(replicas=config, execution=execution)
    return Workers(number, places > 1)


def alone(step: Step) -> Step:
    """Return a step as one worker takes it, whose devices are those of one place of `replica`."""
    execution = step.execution
    return replace(step, execution=replace(execution, mesh=replace(execution.mesh, replica=1)))


def trained_leaves(table: ParameterTable) -> list[Leaf]:
    """Return what a method knows about the parameters that are trained."""
    return [
        Leaf(
            path=row.path.replace("/", SEPARATOR),
            shape=row.shape,
            axes=row.declaration.axes,
            role=row.declaration.role,
            is_stacked=row.declaration.is_stacked,
        )
        for row in table.trained_rows
    ]
