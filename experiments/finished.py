# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that has been trained, opened again: its config, data and newest state."""

from __future__ import annotations

import dataclasses

from experiments.assembly import Assembly, assemble
from experiments.config import PretrainConfig
from experiments.run_directory import RunDirectory
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.data import check_position
from jaxmoe.training.state import TrainState
from sharding.mesh import MeshConfig


def open_run(
    path: str, step: int | None, mesh: MeshConfig | None = None
) -> tuple[Assembly, TrainState, int]:
    """Assembles a run as it was trained and restores one of its checkpoints; writes nothing.

    Args:
        path: run directory.
        step: of the checkpoint; the newest when None.
        mesh: another mesh than that of the run.

    Raises:
        ValueError: no run or no checkpoint there, or other data than it was trained on.
    """
    directory = RunDirectory(path)
    config = directory.load_config(PretrainConfig)
    if mesh is not None:
        # A fold belongs to the mesh of the training.
        execution = dataclasses.replace(config.execution, mesh=mesh, fold=None)
        config = dataclasses.replace(config, execution=execution)
    assembly = assemble(config)
    manager = CheckpointManager(directory.checkpoints_directory, is_writer=False)
    try:
        step = manager.latest_step() if step is None else step
        if step is None:
            raise ValueError(f"{path} has no checkpoint yet: train it first, or wait for one")
        check_position(manager.manifest(step).data, assembly.loader.position(step))
        return assembly, manager.restore(step, assembly.new_state()), step
    finally:
        manager.close()
