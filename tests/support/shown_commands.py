# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a training command does, without compiling or training: its program, or the host's part.

A measure reads an assembled run on eight devices. Commands that do the same have the same value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shlex
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli import flags as cli
from experiments.finetune import finetune_config
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.contrib.offload.optimizer_files import OptimizerFiles
from jaxmoe.contrib.token_routes.token_shuffle import TokenTables
from jaxmoe.contrib.token_routes.token_tables import save_tables
from jaxmoe.data import Source
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.hooks import make_saving
from jaxmoe.run.parts import RunPart
from jaxmoe.run.supervision import Watches, library_supervision
from jaxmoe.training.stopwatch import START, Stopwatch

Measure = Callable[[Assembly, pathlib.Path], Any]


def parsed(command: str) -> PretrainConfig:
    """Return the configuration of a command, `pretrain ...` or `finetune ...` of the default model.

    Args:
        command: Name and flags.
    """
    name, *words = shlex.split(command)
    if name == "pretrain":
        return cli.parse(RECIPES, DEFAULT, words, name, "")[1]
    assert name == "finetune"
    start, base = finetune_config(None), parsed("pretrain")
    model = dataclasses.replace(base.model, adapter=start.model.adapter)
    return cli.parse_flags(dataclasses.replace(start, model=model, data=base.data), words, name, "")


@functools.cache
def _source(kind: str, command: str) -> Source:
    del kind  # one source for all commands with the same data
    return parsed(command).data.build(0)


def _assembled(command: str, directory: pathlib.Path, resources: contextlib.ExitStack) -> Assembly:
    """Return the run of a command on all devices.

    Args:
        command: Name and flags.
        directory: Directory of files that the run makes.
        resources: Receives what must be closed.
    """
    config = parsed(command)
    source = _source(str(config.data), command)
    assembly = assemble(config, trains=True, source=source)
    if config.execution.optimizer_memory == "files":
        supervision = resources.enter_context(library_supervision(config.timeouts))
        assembly = OptimizerFiles(config, RunDirectory(directory), supervision).prepare(assembly)
    return assembly


def value_of(measure: Measure, command: str, directory: pathlib.Path) -> str:
    """Return what a measure finds in the run of a command, as text.

    Args:
        measure: One of the functions below.
        command: Name and flags.
        directory: Directory of files that the run makes.
    """
    with contextlib.ExitStack() as resources:
        assembly = _assembled(command, directory, resources)
        return repr(measure(assembly, directory))


def program(assembly: Assembly, directory: pathlib.Path) -> str:
    """The StableHLO of the training step, as a hash."""
    del directory
    rows = assembly.plan.config.training.batch_size
    with jax.set_mesh(assembly.mesh):
        step: Any = assembly.workers.jit_step(assembly.step(assembly.micro_batches(rows)))
        traced = step.trace(assembly.state_shapes(), assembly.feed.batch(0))
        return hashlib.sha256(traced.lower().as_text().encode()).hexdigest()


def watched(assembly: Assembly, directory: pathlib.Path) -> dict[str, list[int]]:
    """The steps of the run after which devices are compared, by what compares them."""
    watches = _watches(assembly, directory)
    hooks = list(watches.hooks())
    for part in _parts(assembly, directory):
        hooks += part.hooks(assembly, watches)
    return {type(hook).__name__: _due(hook, assembly) for hook in hooks}


def snapshots(assembly: Assembly, directory: pathlib.Path) -> list[int]:
    """The steps of a supervised run after which the state is kept in memory."""
    hooks = []
    for part in _parts(assembly, directory):
        part.prepare(assembly)
        hooks += part.hooks(assembly, _watches(assembly, directory))
    return [step for hook in hooks for step in _due(hook, assembly)]


def _parts(assembly: Assembly, directory: pathlib.Path) -> list[RunPart]:
    """Return the parts of a run, which read nothing of their process."""
    config = assembly.plan.config
    run_directory = RunDirectory(directory)
    with library_supervision(config.timeouts) as supervision:
        return [part.build(run_directory, supervision) for part in config.parts]


def saves(assembly: Assembly, directory: pathlib.Path) -> list[tuple[int, bool]]:
    """The steps that are saved, and whether training goes on meanwhile."""
    del directory
    found = []
    manager: Any = types.SimpleNamespace(is_owed=lambda: False)
    hook: Any = make_saving(assembly, manager, _NOTHING)
    hook.save = lambda step, state, *, is_lazy: found.append((step, is_lazy))
    for step in _due(hook, assembly):
        hook.run(step, None)
    return found


def rows(assembly: Assembly, directory: pathlib.Path) -> tuple[int | None, bytes]:
    """The number of training rows, and the first batch."""
    del directory
    length = assembly.plan.config.training.sequence_length
    tokens = np.asarray(assembly.loader.batch(0).tokens)
    return assembly.source.num_rows("train", length), tokens.tobytes()


def layout(assembly: Assembly, directory: pathlib.Path) -> dict[str, str]:
    """The axes over which the vocabulary is cut."""
    del directory
    return {
        row.path: str(row.spec) for row in assembly.plan.table if "vocab" in row.declaration.axes
    }


def _watches(assembly: Assembly, directory: pathlib.Path) -> Watches:
    reporter: Any = types.SimpleNamespace(log_numbers=None, flush=None)
    return Watches(
        RunDirectory(directory), assembly, reporter, Stopwatch(START), 0, watchdog=_NOTHING
    )


_NOTHING: Any = types.SimpleNamespace(flush=None)


def _due(hook: Any, assembly: Assembly) -> list[int]:
    return [n for n in range(1, assembly.plan.config.training.steps + 1) if hook.is_due(n)]


def write_tables(path: pathlib.Path, devices: int) -> None:
    """Write a file of `--execution.dispatcher.token_tables` for the default model, drawn.

    Args:
        path: The file.
        devices: Devices that share the experts.
    """
    model, rng = parsed("pretrain").model, np.random.default_rng(0)
    assert model.moe is not None
    layers = model.num_moe_layers
    shapes = {"id": (layers, model.vocab_size), "next": (layers, devices)}
    arrays = {}
    for name, shape in shapes.items():
        arrays[f"{name}_device"] = jnp.asarray(rng.integers(devices, size=shape), "int32")
        arrays[f"{name}_confidence"] = jnp.asarray(rng.random(shape), "float32")
    save_tables(path, TokenTables(**arrays), model.moe.num_experts)


def write_texts(path: pathlib.Path, number: int = 4000) -> None:
    """Write documents of unequal lengths, a JSON object a line.

    Args:
        path: The file.
        number: Number of documents.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.5, 1.2, number).astype(int) + 2, 2000)
    texts = (" ".join(f"w{n}" for n in rng.integers(99, size=length)) for length in lengths)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
