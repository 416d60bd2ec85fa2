# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps of workers that communicate rarely: states, local steps, exchanges, metrics."""

from typing import cast

from jaxmoe.parameters import ParameterTable
from jaxmoe.replicas import ReplicasConfig
from jaxmoe.replicas.base import ReplicasBase
from jaxmoe.training.step import CheckedStep, TrainStep
from jaxmoe.training.workers.state import WorkerStates as WorkerStates
from jaxmoe.training.workers.state import WorkerTraining as WorkerTraining
from jaxmoe.training.workers.step import make_worker_step as make_worker_step


def training_of(
    config: ReplicasConfig,
    table: ParameterTable,
    step: TrainStep,
    island: int | None = None,
    *,
    steps: int,
) -> WorkerTraining | None:
    """Return how the workers of a run train; None for ordinary steps.

    Args:
        config: Method.
        table: Parameters.
        step: Step of one worker; every size of its mesh is filled in.
        island: Number of the one worker of this job; None if all workers are in it.
        steps: Steps of the run.

    Raises:
        ValueError: The method does not fit the mesh.
    """
    if config.exchanges == "nothing":
        return None
    return WorkerTraining.of(cast("ReplicasBase", config), table, step, island, steps=steps)


def jitted_step(
    config: ReplicasConfig,
    table: ParameterTable,
    step: TrainStep,
    island: int | None = None,
    *,
    steps: int,
) -> CheckedStep:
    """Return the jitted step of a run, (state, batch) -> (state, metrics).

    Args:
        config: Method.
        table: Parameters.
        step: Ordinary step, or that of one worker.
        island: See `training_of`; the exchanges of an island are not in its step.
        steps: Steps of the run.
    """
    training = training_of(config, table, step, island, steps=steps)
    if training is None:
        return step.jitted()
    return make_worker_step(training, exchanges=island is None)
