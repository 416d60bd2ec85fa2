# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses how the workers of a run train: by parameters or gradients that they exchange."""

from __future__ import annotations

from typing import cast

from jaxmoe.parameters import ParameterTable
from jaxmoe.replicas import ReplicasKind
from jaxmoe.replicas.base import ReplicasBase
from jaxmoe.replicas.gradient_base import GradientBase
from jaxmoe.training.step import CheckedStep, Step
from jaxmoe.training.workers.gradient_state import GradientTraining
from jaxmoe.training.workers.gradient_step import make_gradient_step
from jaxmoe.training.workers.state import WorkerTraining
from jaxmoe.training.workers.step import make_worker_step


def workers_of_run(
    config: ReplicasKind,
    table: ParameterTable,
    step: Step,
    steps: int,
    island: int | None = None,
) -> WorkerTraining | None:
    """Return how workers train that exchange parameters; None for a run without such workers.

    Args:
        config: Method.
        table: Parameters.
        step: Step of one worker; every size of its mesh is filled in.
        steps: Steps of the run.
        island: Number of the one worker of this job; None if all workers are in it.

    Raises:
        ValueError: The method does not fit the mesh, or the adapter changes states itself.
    """
    if config.exchanges != "parameters":
        return None
    for part in step.chain:
        part.check_workers(config.name)
    return WorkerTraining.of(cast("ReplicasBase", config), table, step, steps, island)


def gradients_of_run(
    config: ReplicasKind, table: ParameterTable, step: Step, steps: int
) -> GradientTraining | None:
    """Return how workers exchange gradients; None for a run in which they do not.

    Args:
        config: Method.
        table: Parameters.
        step: Step of the whole batch; every size of its mesh is filled in.
        steps: Steps of the run.

    Raises:
        ValueError: The method does not fit the mesh.
    """
    if config.exchanges != "gradients":
        return None
    return GradientTraining.of(cast("GradientBase", config), table, step, steps)


def jitted_step(
    config: ReplicasKind,
    table: ParameterTable,
    step: Step,
    steps: int,
    island: int | None = None,
) -> CheckedStep:
    """Return the jitted step of a run, (state, batch) -> (state, metrics).

    Args:
        config: Method.
        table: Parameters.
        step: Ordinary step, or that of one worker.
        steps: Steps of the run.
        island: See `workers_of_run`; the exchanges of an island are not in its step.
    """
    if (workers := workers_of_run(config, table, step, steps, island)) is not None:
        return make_worker_step(workers, exchanges=island is None)
    gradients = gradients_of_run(config, table, step, steps)
    return step.jitted() if gradients is None else make_gradient_step(gradients)
