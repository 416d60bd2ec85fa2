# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that a mesh divides the batches, arrays, layers and experts of a run."""

from __future__ import annotations

import dataclasses

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layout import check_dispatcher
from jaxmoe.layers.sequences import check_rows
from jaxmoe.run.config import PretrainConfig, TrainingConfig
from jaxmoe.run.plan import Plan
from jaxmoe.training.batch_ramp import accumulation_of
from jaxmoe.training.pipeline import check_pipeline
from sharding import axes as ax
from sharding.mesh import MeshConfig, named_sizes


def check_mesh(plan: Plan, execution: ExecutionConfig, *, trains: bool) -> None:
    """Raise ValueError if a mesh does not divide batches, arrays, layers or experts.

    Args:
        plan: Plan of the run on this mesh.
        execution: Execution with every size of the mesh filled in.
        trains: Whether the run is trained on this mesh.
    """
    config, training, mesh_config = plan.config, plan.config.training, execution.mesh
    names, counts = named_sizes(mesh_config, execution.mesh_fold)
    sizes = dict(zip(names, counts, strict=True))
    for _, rows in training.batch_sizes.stages:
        number = accumulation_of(rows, training.batch_size, training.accumulation)
        check_pipeline(plan.model, execution, number)
        step = dataclasses.replace(plan.step_plan(execution), accumulation=number)
        step.gradients.check(step)
    _check_workers(config, mesh_config, trains=trains)
    if execution.mesh.stage > 1 and (every := config.watch.gradients_every):
        raise ValueError(
            f"watch.gradients_every={every} compares gradients of whole layers, and"
            f" execution.mesh.stage={execution.mesh.stage} separates them: set"
            " watch.gradients_every to 0"
        )
    for rules in execution.state_layout.rules:
        plan.table.check_divides(rules, sizes)
    length = (training.sequence_length,)
    execution.axis_rules.check_divides("training.sequence_length", length, (ax.ACT_SEQ,), sizes)
    check_rows(plan.model.context, execution, training.sequence_length, sizes)
    _check_batches(config, mesh_config)
    _check_experts(plan, execution, mesh_config.batch_shards, sizes)


def _check_batches(config: PretrainConfig, mesh_config: MeshConfig) -> None:
    """Refuse batches that devices and micro-batches do not divide."""
    training = config.training
    parts = mesh_config.batch_shards * training.accumulation
    if config.rl is not None and training.batch_size % (parts * config.rl.minibatches):
        raise ValueError(
            f"rl.prompts x rl.group = {training.batch_size} answers must be divisible by"
            f" rl.minibatches={config.rl.minibatches} times the {mesh_config.batch_shards} devices"
            " that share a batch (mesh replica x data x expert) times training.accumulation="
            f"{training.accumulation}: choose a multiple of {parts * config.rl.minibatches}"
        )
    if training.batch_size % parts:
        raise ValueError(
            f"training.batch_size={training.batch_size} must be divisible by the"
            f" {mesh_config.batch_shards} devices that share a batch (mesh replica x data x"
            f" expert) times training.accumulation={training.accumulation}: choose a multiple of"
            f" {parts}"
        )
    _check_ramp(training, mesh_config.batch_shards)
    if config.held_out_batch_size % mesh_config.batch_shards:
        raise ValueError(
            f"evaluation.batch_size={config.evaluation.batch_size} must be divisible by the"
            f" {mesh_config.batch_shards} devices that share a batch (mesh replica x data x"
            f" expert): choose a multiple of {mesh_config.batch_shards}"
        )


def _check_experts(
    plan: Plan, execution: ExecutionConfig, batch_shards: int, mesh: dict[str, int]
) -> None:
    """Refuse experts that the dispatcher cannot spread, in training or held-out batches."""
    training, config, model = plan.config.training, plan.config, plan.model
    update_rows = training.batch_size // (1 if config.rl is None else config.rl.minibatches)
    check_dispatcher(
        model.moe,
        execution,
        num_layers=model.num_moe_layers,
        vocab_size=model.vocab_size,
        sizes=mesh,
    )
    for kind in plan.model.kinds:
        for rows in (update_rows // training.accumulation, config.held_out_batch_size):
            kind.feed_forward.check_execution(
                execution,
                sequences=rows // batch_shards,
                length=training.sequence_length,
                mesh=mesh,
            )


def _check_ramp(training: TrainingConfig, batch_shards: int) -> None:
    """Refuse a batch of the ramp that devices and micro-batches do not divide."""
    for _, rows in training.batch_sizes.stages[:-1]:
        accumulation = accumulation_of(rows, training.batch_size, training.accumulation)
        if rows % (batch_shards * accumulation):
            raise ValueError(
                f"training.batch_ramp has batches of {rows} sequences (of training.batch_size="
                f"{training.batch_size}) in {accumulation} micro-batches, which the {batch_shards}"
                " devices that share a batch must divide: choose fewer training.batch_ramp.stages"
                " or a larger batch"
            )


def _check_workers(config: PretrainConfig, mesh: MeshConfig, *, trains: bool) -> None:
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
