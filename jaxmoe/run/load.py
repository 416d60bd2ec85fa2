# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads a trained run: its configuration, data and the state of a checkpoint.

The weights may have been quantised since (`jaxmoe checkpoint convert`): there is no optimiser
state then, and the run serves inference only. A directory of a Hugging Face model is opened as such
a run, at step 0, and nothing is written into it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.huggingface.hub import is_huggingface, model_directory
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.data import DataError, SkippedRows, check_position
from jaxmoe.models.weight_storage import weight_storage
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.saved import at_execution, huggingface_values, own_data, saved_config
from jaxmoe.run.provenance.warm_start import base_of
from jaxmoe.training.state import TrainState, state_around
from sharding.mesh import MeshConfig, named_shardings


def _assemble(
    config: PretrainConfig,
    directory: RunDirectory,
    needs_data: bool,
    devices: Sequence[jax.Device] | None = None,
) -> Assembly:
    """Assemble a trained run with its own copy of the tokenizer.

    Raises:
        DataError: The data is needed and cannot be read.
    """
    try:
        data = own_data(config, directory)
        return assemble(config, data=data, needs_data=needs_data, devices=devices)
    except DataError as error:
        what = "its data, which this command reads," if needs_data else "its tokenizer"
        raise DataError(
            f"run.directory={directory.path}: {what} cannot be read: {error}"
        ) from error


def assemble_run(path: str, mesh: MeshConfig | None = None) -> Assembly:
    """Assemble a trained run without its data; reads no checkpoint and writes nothing.

    Args:
        path: Run directory.
        mesh: Mesh to use; the one of the run when None.

    Raises:
        ValueError: There is no run.
    """
    config = at_execution(saved_config(path), path, mesh)
    return _assemble(config, RunDirectory(path), needs_data=False)


def load_run(
    path: str,
    step: int | None,
    mesh: MeshConfig | None = None,
    *,
    needs_data: bool = True,
    initial: str | None = None,
    keeps_blocks: bool = False,
) -> tuple[Assembly, TrainState, int]:
    """Assemble a trained run and restore one of its checkpoints; writes nothing.

    Args:
        path: Run directory; or directory, or name on the hub, of a Hugging Face model.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh to use; the one of the run when None.
        needs_data: Whether rows will be read; False reads the tokenizer alone.
        initial: Model that the adapter of the run was trained on, where it has moved.
        keeps_blocks: Whether weights stay in the format of the checkpoint, without expanding it.

    Returns:
        The assembly, the state, and the step of the checkpoint.

    Raises:
        ValueError: There is no run or no checkpoint, or the data differ from those of the training.
    """
    path = model_directory(path, "run.directory")
    config = at_execution(saved_config(path, initial), path, mesh)
    directory = RunDirectory(path)
    return restore_run(config, directory, step, needs_data=needs_data, keeps_blocks=keeps_blocks)


def restore_run(
    config: PretrainConfig,
    directory: RunDirectory,
    step: int | None,
    *,
    needs_data: bool = True,
    has_own_data: bool = True,
    keeps_blocks: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Assembly, TrainState, int]:
    """Like `load_run`, for a configuration that the caller has.

    Args:
        config: Configuration of the run.
        directory: Run directory.
        step: Step of the checkpoint; the newest when None.
        needs_data: Whether rows will be read; False reads the tokenizer alone.
        has_own_data: Whether the data must be those of the training.
        keeps_blocks: Whether weights stay in the format of the checkpoint, without expanding it.
        devices: Devices of the mesh; all of the job when None.
    """
    if is_huggingface(directory.path):
        if step:
            raise ValueError(
                f"run.step={step}: {directory.path} holds a Hugging Face model, which has no steps:"
                " leave it out"
            )
        return *_load_huggingface(config, directory.path, needs_data, devices), 0
    assembly = _assemble(config, directory, needs_data, devices)
    manager = CheckpointManager(
        directory.checkpoints_directory,
        is_writer=False,
        base=None if assembly.plan.model.adapter is None else base_of(assembly),
    )

    def check(manifest: CheckpointManifest) -> None:
        if not needs_data or not has_own_data:
            return
        skipped = SkippedRows.from_json(manifest.data.get("skipped", []))
        loader = dataclasses.replace(assembly.loader, skipped=skipped)
        check_position(manifest.data, loader.position(manifest.step))

    try:
        manifest = _manifest(manager, step)
        if manifest is not None and _has_workers(assembly, manifest):
            check(manifest)
            return assembly, _without_workers(assembly, manager, manifest.step), manifest.step
        if step is not None:
            check(manager.shared_manifest(step))
            state = manager.restore(step, _target(assembly, manager, step))
        else:
            restored = manager.restore_newest(_target(assembly, manager, None), check=check)
            if restored is None:
                raise ValueError(
                    f"{directory.path} has no checkpoint yet: train it first, or wait for one"
                )
            step, state = restored
        return assembly, state if keeps_blocks else _floating(assembly, state), step
    finally:
        manager.close()


def _load_huggingface(
    config: PretrainConfig,
    path: pathlib.Path,
    needs_data: bool,
    devices: Sequence[jax.Device] | None,
) -> tuple[Assembly, TrainState]:
    """Assemble the model of a directory and read its weights onto the mesh.

    Args:
        config: Configuration from `saved_config`, with any mesh.
        path: Directory of the model.
        needs_data: Whether rows will be read.
        devices: See `restore_run`.

    Returns:
        The assembly, and a state without an optimiser's.

    Raises:
        ValueError: The weights cannot be read, or do not fit the mesh.
    """
    assembly = assemble(config, needs_data=needs_data, devices=devices)
    execution = assembly.execution
    mesh = assembly.mesh
    params, router_state = huggingface_values(path, execution, mesh)
    key = jax.random.key(config.training.seed)
    with jax.set_mesh(mesh):
        state = state_around(assembly.plan.model, None, execution, params, key)
    if router_state:
        replicated = NamedSharding(mesh, PartitionSpec())
        state = dataclasses.replace(state, router_state=jax.device_put(router_state, replicated))
    return assembly, state


def _target(assembly: Assembly, manager: CheckpointManager, step: int | None) -> TrainState:
    """Return shapes and shardings to restore a checkpoint to, and small arrays as they are."""
    execution = assembly.execution
    plan = assembly.plan
    precision = execution.precision
    trains = precision.weights == "floating" or plan.model.adapter is not None
    if trains and not _is_imported(manager, step):
        return assembly.state_shapes()
    key = jax.random.key(plan.config.training.seed)
    with jax.set_mesh(assembly.mesh):
        state = jax.jit(lambda: state_around(plan.model, None, execution, {}, key))()
    if precision.weights == "floating":
        dtype = jax.numpy.dtype(precision.parameter_dtype)
        params = plan.table.tree(
            lambda row: jax.ShapeDtypeStruct(
                row.shape,
                row.stored_dtype(dtype),
                sharding=named_shardings(row.spec, assembly.mesh),
            )
        )
        return dataclasses.replace(state, params=params)
    manifest = _manifest(manager, step)
    if manifest is None:
        return state  # nothing to restore
    params = weight_storage(precision.weights).target(
        plan.table, execution, assembly.mesh, lambda: manifest.arrays
    )
    return dataclasses.replace(state, params=params)


def _floating(assembly: Assembly, state: TrainState) -> TrainState:
    """Return a state whose weights are those that the model computes with."""
    precision = assembly.execution.precision
    if precision.weights == "floating":
        return state
    table = assembly.plan.table
    dtype = precision.parameter_dtype
    storage = weight_storage(precision.weights)
    params = storage.floating(table, state.params, dtype, assembly.mesh)
    return dataclasses.replace(state, params=params)


def _is_imported(manager: CheckpointManager, step: int | None) -> bool:
    """Return whether a checkpoint lacks optimiser state, as one from Hugging Face does."""
    manifest = _manifest(manager, step)
    if manifest is None:
        return False
    return not any(path.startswith("opt_state") for path in manifest.arrays)


def _manifest(manager: CheckpointManager, step: int | None) -> CheckpointManifest | None:
    """Return the manifest of a step, or of the newest that has one to read."""
    return manager.newest_readable_manifest() if step is None else manager.shared_manifest(step)


def describe_precision(assembly: Assembly) -> str:
    """Return the format of quantised weights and cache as text; empty without any."""
    precision = assembly.execution.precision
    parts = [] if precision.weights == "floating" else [f"weights={precision.weights}"]
    if precision.cache != "compute":
        num_bytes = sum(
            stack.kind.mixer.cache_bytes_per_token(precision, layers=stack.num_calls)
            for stack in assembly.plan.model.stacks
        )
        parts.append(f"cache={precision.cache} cache_bytes_per_token={num_bytes}")
    return " ".join(parts)


def _has_workers(assembly: Assembly, manifest: CheckpointManifest) -> bool:
    """Return whether a checkpoint holds states of several workers."""
    part = assembly.workers.state_part
    return part is not None and any(name.startswith(f"parts/{part}/") for name in manifest.arrays)


def _without_workers(assembly: Assembly, manager: CheckpointManager, step: int) -> TrainState:
    """Return what all workers of a run have in common, without the state of each.

    Args:
        assembly: Plan and devices.
        manager: Checkpoints of the run.
        step: Step to read.
    """
    names = ("params", "router_state", "step", "rng", "skipped", "skipped_in_a_row")
    shapes = assembly.world_shapes()
    target = {name: getattr(shapes, name) for name in names}
    state = dataclasses.replace(assembly.new_world(), opt_state={}, **dict.fromkeys(names))
    return dataclasses.replace(state, **restore_part(manager.directory, target, step=step))
