# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the run directory of a converted model, and folds the adapter of a fine-tuned run."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.evaluate import FinishedRunConfig
from jaxmoe.adapters import Adapter, fold_adapters
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.checkpoint.manifest import read_manifest
from jaxmoe.run.assemble import Assembly, describe_devices
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import copy_tokenizer, new_run, saved_config
from jaxmoe.training.parts.adapter_rule import AdapterRule
from jaxmoe.training.state import TrainState


def fold_run(run: FinishedRunConfig, target: pathlib.Path, bits: float | None = None) -> str:
    """Write a fine-tuned run with plain weights, and return a report for the user.

    Args:
        run: Fine-tuned run.
        target: Run directory to make.
        bits: Largest mean of the bits of layers, for an adapter trained for several; None for
            those that it has.

    Raises:
        ValueError: The run has no adapter, its base is quantised, or bits are given for an adapter
            without a choice.
    """
    source = run.directory
    assembly, state, step = load_run(
        source, run.step, run.mesh, needs_data=False, initial=run.initial
    )
    run_config = assembly.plan.config
    if (adapter := run_config.model.adapter) is None:
        raise ValueError(
            f"run.directory={source} has no adapter, its weights are plain: leave out --fold"
        )
    if (weights := run_config.execution.precision.weights) != "floating":
        raise ValueError(
            f"run.directory={source} adapts weights in {weights}, to which nothing can be added:"
            " use it as it is, or adapt the run that they were rounded from"
        )
    layers = run_config.model.layer_numbers
    with jax.set_mesh(assembly.mesh):
        given_params = state.params
        if bits is not None:
            chosen = _within(adapter, bits)
            given_params = chosen.begin(given_params, layers, jax.random.key(0))
        params = jax.jit(lambda params: fold_adapters(params, adapter, layers))(given_params)
    # On the mesh of the other arrays, as a checkpoint requires.
    params = jax.device_put(params, NamedSharding(assembly.mesh, PartitionSpec()))
    state = dataclasses.replace(state, params=params, opt_state={})
    model = dataclasses.replace(run_config.model, adapter=None)
    checkpoint = dataclasses.replace(run_config.checkpoint, initial=None)
    # The optimiser of the adapter may lack the groups of the others.
    initial = run_config.checkpoint.initial_path
    optimizer = run_config.optimizer if initial is None else saved_config(initial).optimizer
    config = dataclasses.replace(
        run_config, model=model, checkpoint=checkpoint, optimizer=optimizer
    )
    summary = {
        "status": "converted",
        "format": "folded",
        "source": source,
        "checkpoint_step": step,
        "adapter": adapter.name,
        "parameters_total": assembly.plan.table.total,
    }
    write_converted(target, RunDirectory(source), state, step, config, assembly, summary)
    return f"{adapter.words}: added to the weights\nstep {step} of {source} is in {target}"


def _within(adapter: Adapter, bits: float) -> Any:
    """Return an adapter with another mean of the bits of its layers."""
    if "mean_bits" not in adapter.late_fields:
        raise ValueError(
            f"fold_bits={bits:g} chooses the bits of layers, which adapter:{adapter.name} does not"
            " train for: leave it out"
        )
    changes: dict[str, Any] = {"mean_bits": bits}
    return dataclasses.replace(adapter, **changes)


def write_converted(
    target: pathlib.Path,
    source: RunDirectory,
    state: TrainState,
    step: int,
    config: PretrainConfig,
    assembly: Assembly,
    summary: dict[str, Any],
) -> None:
    """Write the run directory, with the data position and the tokenizer of the source."""
    manifest = read_manifest(source.checkpoints_directory / str(step))
    # Of the training, as the state of the optimiser is.
    left_out = {AdapterRule.name, *(part.name for part in config.training.step_parts)}
    parts = {name: part for name, part in state.parts.items() if name not in left_out}
    state = dataclasses.replace(state, parts=parts)
    with new_run(target, config) as unfinished:
        copy_tokenizer(source, unfinished)
        save_checkpoint(
            unfinished.checkpoints_directory,
            state,
            step=step,
            config=config,
            data=manifest.data,
        )
        unfinished.write_environment(describe_devices(assembly.mesh.devices.flat))
        unfinished.write_summary(summary)
