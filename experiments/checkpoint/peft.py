# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts fine-tuned runs to adapters of PEFT, and such adapters to runs.

An imported adapter is a run at step 0 without an optimiser's state. Its checkpoint holds the
factors alone and names the model that was adapted, as one of `finetune` does.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from experiments.checkpoint.huggingface import ExportConfig, ImportConfig
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.checkpoint.huggingface import open_huggingface
from jaxmoe.checkpoint.huggingface.hub import is_huggingface, model_directory
from jaxmoe.checkpoint.huggingface.peft import write_peft
from jaxmoe.checkpoint.huggingface.peft_config import read_peft_fields
from jaxmoe.checkpoint.huggingface.peft_import import read_peft
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE
from jaxmoe.checkpoint.streaming import StoredArray, open_stored
from jaxmoe.run.assemble import Assembly, assemble, describe_devices
from jaxmoe.run.config import CheckpointConfig, InitialConfig, PretrainConfig, RunConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.plan import make_plan
from jaxmoe.run.provenance.saved import (
    at_execution,
    copy_tokenizer,
    keep_generation,
    new_run,
    own_data,
    saved_config,
)
from jaxmoe.run.provenance.warm_start import base_of
from jaxmoe.tracking.console import format_bytes
from jaxmoe.training.replicas import SynchronousConfig
from jaxmoe.training.state import TrainState, state_around

_PARAMS = "params/"


def export_adapter(
    source: str, step: int | None, target: pathlib.Path, export: ExportConfig
) -> str:
    """Write the adapter of a fine-tuned run as PEFT does.

    Args:
        source: Run directory.
        step: Step of the checkpoint; the newest undamaged one when None.
        target: Directory to make.
        export: Dtype of the tensors.

    Returns:
        A report for the user.

    Raises:
        ValueError: There is no run or checkpoint, it has no adapter with factors, training has
            moved the biases of its routers, or options are given that an adapter has no use for.
    """
    if export != ExportConfig(dtype=export.dtype):
        raise ValueError(
            "--to_huggingface peft takes --exported.dtype alone: leave the other options of"
            " --exported out"
        )
    directory = RunDirectory(source)
    config = directory.load_config(PretrainConfig)
    model = make_plan(config).model
    step, arrays = open_stored(directory.checkpoints_directory, step)
    params = {
        path.removeprefix(_PARAMS): array
        for path, array in arrays.items()
        if path.startswith(_PARAMS)
    }
    initial = config.checkpoint.initial_path
    _check_routers(source, arrays, initial)
    base = initial if initial is not None and is_huggingface(initial) else ""
    write_peft(target, model, params, base=base, dtype=export.dtype)
    size = sum(file.stat().st_size for file in target.iterdir())
    lines = [f"step {step} of {source} is in {target}: peft, {export.dtype}, {format_bytes(size)}"]
    if base:
        lines.append(f"it adapts {base}")
    else:
        lines.append(
            f"it adapts {initial}: convert that with --to_huggingface auto, and load this with"
            " PeftModel.from_pretrained(model, ...)"
        )
    return "\n".join(lines)


def _check_routers(source: str, arrays: Mapping[str, StoredArray], initial: str | None) -> None:
    """Raise if training has moved the biases of routers, which PEFT files do not hold."""
    state = {name: array for name, array in arrays.items() if name.startswith(f"{ROUTER_STATE}/")}
    if not state or initial is None:
        return
    if is_huggingface(initial):
        _, tensors = open_huggingface(initial)
        before = {row.path: tensors.read(row) for row in tensors.state_table}
    else:
        _, before = open_stored(RunDirectory(initial).checkpoints_directory)
    moved = [
        name
        for name, array in state.items()
        if name not in before or not np.array_equal(np.asarray(array), np.asarray(before[name]))
    ]
    if moved:
        raise ValueError(
            f"training {source} has moved the biases of its routers ({moved[0]}), and files of PEFT"
            f" hold the factors alone: fold the adapter (--fold True), then convert the folded run"
            " with --to_huggingface auto"
        )


def import_adapter(source: str, target: pathlib.Path, import_config: ImportConfig) -> str:
    """Convert an adapter of PEFT to a run.

    Args:
        source: Directory with adapter_config.json and adapter_model.safetensors.
        target: Run directory to make.
        import_config: Model that was adapted.

    Returns:
        A report for the user.

    Raises:
        ValueError: The model is not there or adapted itself, the adapter is none of LoRA or of
            another model, or options are given that an adapter has no use for.
    """
    if import_config != ImportConfig(base=import_config.base):
        raise ValueError(
            f"from_huggingface={source} is an adapter, whose run has the data of the model that it"
            " adapts: leave the options of --imported out, but --imported.base"
        )
    place = pathlib.Path(source)
    base = _base(source, import_config.base or read_peft_fields(place).base)
    saved = at_execution(saved_config(base), base, PretrainConfig().execution.mesh)
    if saved.model.adapter is not None:
        raise ValueError(
            f"imported.base={base} holds an adapter itself ({saved.model.adapter.name}): name the"
            " model that it adapts, or fold it first"
        )
    model = make_plan(saved).model

    def params() -> Any:
        return load_run(base, None, needs_data=False)[1].params

    adapter, arrays = read_peft(place, model, params)
    config = dataclasses.replace(
        saved,
        model=dataclasses.replace(saved.model, adapter=adapter),
        replicas=SynchronousConfig(),
        checkpoint=CheckpointConfig(initial=InitialConfig(path=base)),
        run=RunConfig(directory=str(target), name=target.name),
    )
    assembly = assemble(config, data=own_data(saved, RunDirectory(base)))
    trained = sum(x.size for path, x in arrays.items() if not path.endswith(":scale"))
    with new_run(target, config) as unfinished:
        copy_tokenizer(RunDirectory(base), unfinished)
        keep_generation(unfinished, config)
        save_checkpoint(
            unfinished.checkpoints_directory,
            _state(assembly, base, arrays),
            step=0,
            config=config,
            data=assembly.loader.position(0),
            base=base_of(assembly),
        )
        unfinished.write_environment(describe_devices(assembly.mesh.devices.flat))
        unfinished.write_summary(
            {
                "status": "imported",
                "format": "peft",
                "source": source,
                "base": base,
                "checkpoint_step": 0,
                "parameters_total": assembly.plan.table.total,
                "parameters_trained": trained,
            }
        )
    return (
        f"{source} ({adapter.words}; {trained:,} parameters) is in {target}, at step 0, without an"
        f" optimiser's state\nit adapts {base}"
    )


def _base(source: str, name: str | None) -> str:
    """Return the directory of the adapted model."""
    if name is None:
        raise ValueError(
            f"from_huggingface={source} names no model that it adapts: give --imported.base, a run"
            " directory or one of a Hugging Face model"
        )
    base = model_directory(name, "imported.base")
    if not is_huggingface(base) and not RunDirectory(base).has_config():
        raise ValueError(
            f"from_huggingface={source} adapts {name}, which is neither a run nor a Hugging Face"
            " model on this machine: say where it is with --imported.base"
        )
    return base


def _state(assembly: Assembly, base: str, arrays: dict[str, Any]) -> TrainState:
    """Return a state with the factors of an adapter, and the router state of its model."""
    execution = assembly.execution
    replicated = NamedSharding(assembly.mesh, PartitionSpec())
    dtype = jnp.dtype(execution.precision.parameter_dtype)
    params = {
        path: jax.device_put(jnp.asarray(value, dtype), replicated)
        for path, value in arrays.items()
    }
    key = jax.random.key(assembly.plan.config.training.seed)
    with jax.set_mesh(assembly.mesh):
        nested = traverse_util.unflatten_dict(params, sep="/")
        state = state_around(assembly.plan.model, None, execution, nested, key)
    if jax.tree.leaves(state.router_state):
        _, base_state, _ = load_run(base, None, needs_data=False)
        values = jax.device_put(base_state.router_state, replicated)
        state = dataclasses.replace(state, router_state=values)
    return state
