# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that has been trained, opened again: its config, data and newest state.

The weights may have been quantised since (`experiments.checkpoint convert`): there is no state of
an optimiser then, and the run is for inference alone.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.data import SkippedRows, check_position
from jaxmoe.models.quantize import abstract_params
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.training.state import TrainState, state_around
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import CacheFormat, bytes_per_token
from sharding.specs import named_shardings


def assemble_run(
    path: str, mesh: MeshConfig | None = None, cache: CacheFormat = "compute"
) -> Assembly:
    """Assembles a run as it was trained; reads no checkpoint and writes nothing.

    Args:
        path: run directory.
        mesh: another mesh than that of the run.
        cache: what keys and values are rounded to.

    Raises:
        ValueError: no run there, or a cache for a model that has none.
    """
    config = RunDirectory(path).load_config(PretrainConfig)
    if cache != "compute" and not config.model.attention.is_causal:
        raise ValueError(
            f"cache={cache}: {path} holds a model that is not causal"
            " (model.attention.is_causal=False), which is computed without a cache: leave it out"
        )
    precision = dataclasses.replace(config.execution.precision, cache=cache)
    execution = dataclasses.replace(config.execution, precision=precision)
    if mesh is not None:
        # A fold belongs to the mesh of the training.
        execution = dataclasses.replace(execution, mesh=mesh, fold=None)
    return assemble(dataclasses.replace(config, execution=execution))


def load_run(
    path: str, step: int | None, mesh: MeshConfig | None = None, cache: CacheFormat = "compute"
) -> tuple[Assembly, TrainState, int]:
    """Assembles a run as it was trained and restores one of its checkpoints; writes nothing.

    Args:
        path: run directory.
        step: of the checkpoint; the newest when None.
        mesh: another mesh than that of the run.
        cache: what keys and values are rounded to.

    Raises:
        ValueError: no run or no checkpoint there, other data than it was trained on, or a cache
            for a model that has none.
    """
    assembly = assemble_run(path, mesh, cache)
    checkpoints = RunDirectory(path).checkpoints_directory
    manager = CheckpointManager(checkpoints, is_writer=False)

    def check(manifest: CheckpointManifest) -> None:
        skipped = SkippedRows.from_json(manifest.data.get("skipped", []))
        loader = dataclasses.replace(assembly.loader, skipped=skipped)
        check_position(manifest.data, loader.position(manifest.step))

    try:
        if step is not None:
            check(manager.shared_manifest(step))
            return assembly, manager.restore(step, _target(assembly, manager, step)), step
        found = manager.restore_newest(_target(assembly, manager, None), check=check)
        if found is None:
            raise ValueError(f"{path} has no checkpoint yet: train it first, or wait for one")
        step, state = found
        return assembly, state, step
    finally:
        manager.close()


def _target(assembly: Assembly, manager: CheckpointManager, step: int | None) -> TrainState:
    """What a checkpoint of the run is restored to."""
    execution, plan = assembly.execution, assembly.plan
    precision = execution.precision
    if precision.weights == "floating" and not _is_imported(manager, step):
        return assembly.new_state()
    key = jax.random.key(plan.config.training.seed)
    with jax.set_mesh(assembly.mesh):
        state = jax.jit(lambda: state_around(plan.model, None, execution, {}, key))()
    if precision.weights == "floating":
        dtype = jax.numpy.dtype(precision.parameter_dtype)
        params = plan.table.tree(
            lambda row: jax.ShapeDtypeStruct(
                row.shape, dtype, sharding=named_shardings(row.spec, assembly.mesh)
            )
        )
        return dataclasses.replace(state, params=params)
    params = abstract_params(
        plan.table,
        precision.weights,
        precision.parameter_dtype,
        execution.axis_rules,
        assembly.mesh,
    )
    return dataclasses.replace(state, params=params)


def _is_imported(manager: CheckpointManager, step: int | None) -> bool:
    """Whether a checkpoint has no state of an optimiser: it came from Hugging Face."""
    step = max(manager.shared_steps(), default=None) if step is None else step
    if step is None:
        return False
    return not any(path.startswith("opt_state") for path in manager.shared_manifest(step).arrays)


def check_trains(directory: RunDirectory, config: PretrainConfig) -> None:
    """Refuses to train what is for inference.

    Args:
        directory: of the run that is to begin or to continue.
        config: of this start.

    Raises:
        ValueError: a converted run lives there, or the precision is one for inference.
    """
    config.execution.precision.check_trains()
    if not directory.config_file.exists():
        return
    if (directory.summary() or {}).get("status") == "imported":
        raise ValueError(
            f"run.directory={directory.path} holds weights that were imported, without an"
            " optimiser's state: choose another directory with --run.directory"
        )
    weights = directory.config_json().get("execution", {}).get("precision", {}).get("weights")
    if weights not in (None, "floating"):
        raise ValueError(
            f"run.directory={directory.path} holds a run whose weights were rounded to {weights},"
            " for inference: train the one that it came from, or choose another directory with"
            " --run.directory"
        )


def describe_precision(assembly: Assembly) -> str:
    """What is quantised, and what the cache then takes; empty where nothing is."""
    precision, attention = assembly.execution.precision, assembly.plan.model.attention
    words = [] if precision.weights == "floating" else [f"weights={precision.weights}"]
    if precision.cache != "compute":
        taken = bytes_per_token(
            num_layers=assembly.plan.model.num_layers,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            form=precision.cache,
            dtype=precision.compute_dtype,
        )
        words.append(f"cache={precision.cache} cache_bytes_per_token={taken}")
    return " ".join(words)
