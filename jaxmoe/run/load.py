# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads a trained run: its configuration, data and the state of a checkpoint.

The weights may have been quantised since (`experiments.checkpoint convert`): there is no optimiser
state then, and the run serves inference only.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.data import DataError, SkippedRows, check_position
from jaxmoe.models.quantize import abstract_params
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.kept_tokenizer import own_data
from jaxmoe.training.state import TrainState, state_around
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import CacheFormat
from sharding.specs import named_shardings


def at_execution(
    config: PretrainConfig,
    path: str,
    mesh: MeshConfig | None = None,
    cache: CacheFormat = "compute",
) -> PretrainConfig:
    """Return the configuration of a trained run with another mesh or cache.

    Args:
        config: Configuration of the run.
        path: Run directory, for messages.
        mesh: Mesh to use; the one of the run when None.
        cache: Format of cached keys and values.

    Raises:
        ValueError: `cache` is given for a model that has no cache.
    """
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
    return dataclasses.replace(config, execution=execution)


def _assemble(config: PretrainConfig, directory: RunDirectory, needs_data: bool) -> Assembly:
    """Assemble a trained run with its own copy of the tokenizer.

    Raises:
        DataError: The data is needed and cannot be read.
    """
    try:
        return assemble(config, data=own_data(config, directory), needs_data=needs_data)
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
    directory = RunDirectory(path)
    config = at_execution(directory.load_config(PretrainConfig), path, mesh)
    return _assemble(config, directory, needs_data=False)


def load_run(
    path: str, step: int | None, mesh: MeshConfig | None = None, *, needs_data: bool = True
) -> tuple[Assembly, TrainState, int]:
    """Assemble a trained run and restore one of its checkpoints; writes nothing.

    Args:
        path: Run directory.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh to use; the one of the run when None.
        needs_data: Whether rows will be read; False reads the tokenizer alone.

    Returns:
        The assembly, the state, and the step of the checkpoint.

    Raises:
        ValueError: There is no run or no checkpoint, or the data differ from those of the training.
    """
    directory = RunDirectory(path)
    config = at_execution(directory.load_config(PretrainConfig), path, mesh)
    return restore_run(config, directory, step, needs_data=needs_data)


def restore_run(
    config: PretrainConfig,
    directory: RunDirectory,
    step: int | None,
    *,
    needs_data: bool = True,
) -> tuple[Assembly, TrainState, int]:
    """Like `load_run`, for a configuration that the caller has.

    Args:
        config: Configuration of the run.
        directory: Run directory.
        step: Step of the checkpoint; the newest when None.
        needs_data: Whether rows will be read; False reads the tokenizer alone.
    """
    assembly = _assemble(config, directory, needs_data)
    manager = CheckpointManager(directory.checkpoints_directory, is_writer=False)

    def check(manifest: CheckpointManifest) -> None:
        if not needs_data:
            return
        skipped = SkippedRows.from_json(manifest.data.get("skipped", []))
        loader = dataclasses.replace(assembly.loader, skipped=skipped)
        check_position(manifest.data, loader.position(manifest.step))

    try:
        if step is not None:
            check(manager.shared_manifest(step))
            return assembly, manager.restore(step, _target(assembly, manager, step)), step
        found = manager.restore_newest(_target(assembly, manager, None), check=check)
        if found is None:
            raise ValueError(
                f"{directory.path} has no checkpoint yet: train it first, or wait for one"
            )
        step, state = found
        return assembly, state, step
    finally:
        manager.close()


def _target(assembly: Assembly, manager: CheckpointManager, step: int | None) -> TrainState:
    """Return the state, or its shapes and shardings, that a checkpoint is restored to."""
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
        precision.mixed,
    )
    return dataclasses.replace(state, params=params)


def _is_imported(manager: CheckpointManager, step: int | None) -> bool:
    """Return whether a checkpoint lacks optimiser state, as one from Hugging Face does."""
    step = max(manager.shared_steps(), default=None) if step is None else step
    if step is None:
        return False
    return not any(path.startswith("opt_state") for path in manager.shared_manifest(step).arrays)


def check_trains(directory: RunDirectory, config: PretrainConfig) -> None:
    """Refuse to train a run that serves inference only.

    Args:
        directory: Run directory, new or not.
        config: Configuration of this start.

    Raises:
        ValueError: The directory holds imported or quantised weights, or the precision is one for
            inference.
    """
    config.execution.precision.check_trains()
    if not directory.has_config():
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
    """Return the format of quantised weights and cache as text; empty without any."""
    precision = assembly.execution.precision
    words = [] if precision.weights == "floating" else [f"weights={precision.weights}"]
    if precision.cache != "compute":
        taken = sum(
            stack.kind.mixer.cache_bytes_per_token(precision, layers=stack.num_layers)
            for stack in assembly.plan.model.stacks
        )
        words.append(f"cache={precision.cache} cache_bytes_per_token={taken}")
    return " ".join(words)
