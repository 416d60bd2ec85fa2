# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses configurations that the workers of a run cannot train."""

from __future__ import annotations

import jax

from jaxmoe.islands.config import VARIABLE, IslandConfig
from jaxmoe.run.config import PretrainConfig
from jaxmoe.training.batch_ramp import accumulation_of
from sharding.mesh import MeshConfig


def check_island(config: PretrainConfig, island: IslandConfig, mesh: MeshConfig) -> None:
    """Refuse what a run whose replicas are jobs of their own cannot do."""
    where = f"{VARIABLE} makes this run island {island.member} of {island.of}"
    if config.replicas.exchanges != "parameters":
        raise ValueError(
            f"{where}, and replicas {config.replicas.name!r} exchanges {config.replicas.exchanges}:"
            " choose replicas:diloco"
        )
    if mesh.replica > 1 or jax.process_count() > 1:
        raise ValueError(
            f"{where}, and an island is one worker in one process: execution.mesh.replica="
            f"{mesh.replica} must be 1, and {jax.process_count()} processes must be 1"
        )
    parts = island.of * config.training.accumulation
    if config.training.batch_size % (parts * mesh.batch_shards):
        raise ValueError(
            f"{where}: training.batch_size={config.training.batch_size} must be divisible by the"
            f" islands times micro-batches times devices that share a batch"
            f" ({parts * mesh.batch_shards})"
        )
    if config.checkpoint.recompute:
        raise ValueError(
            f"{where}, and checkpoint.recompute={config.checkpoint.recompute} repeats steps with"
            " their exchanges: set checkpoint.recompute to 0"
        )


def check_workers(config: PretrainConfig, mesh: MeshConfig, *, trains: bool) -> None:
    """Refuse batches that workers cannot share, and features that need one state.

    Args:
        config: Configuration of a run.
        mesh: Mesh with every size filled in.
        trains: Whether the run is trained on this mesh.
    """
    replicas, training = config.replicas, config.training
    if replicas.exchanges == "nothing":
        return
    number = replicas.num_workers(mesh.replica)
    if config.data.packs_levels:
        raise ValueError(
            f"data.packing levels packs the batch of all devices, and replicas {replicas.name!r}"
            f" gives each of {number} workers a batch of its own: set data.packing to best_fit"
        )
    devices = mesh.batch_shards // mesh.replica if trains else 1
    for _, rows in training.batch_sizes.stages:
        accumulation = accumulation_of(rows, training.batch_size, training.accumulation)
        if rows % (number * accumulation * devices):
            shared = f" times the {devices} devices that share the rows of a worker"
            raise ValueError(
                f"training.batch_size={rows} must be divisible by the {number} workers of replicas"
                f" {replicas.name!r} times training.accumulation={accumulation}"
                f"{shared * (devices > 1)}: choose a multiple of"
                f" {number * accumulation * devices}"
            )
    if config.checkpoint.on_lost_stage == "average":
        raise ValueError(
            "checkpoint.on_lost_stage=average weighs layers by the gradients of one model, and"
            f" replicas {replicas.name!r} trains {number}: set checkpoint.on_lost_stage to fail"
        )
    if every := config.watch.gradients_every:
        raise ValueError(
            f"watch.gradients_every={every} compares gradients of equal parameters, and workers of"
            f" replicas {replicas.name!r} have their own: set watch.gradients_every to 0"
        )
