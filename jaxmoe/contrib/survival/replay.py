# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the batch of a refused step: loss and gradient of the batch, of its rows and arrays.

The parameters are those of a checkpoint, not of the step: if nothing is wrong here, the state
of the step was, or the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.data import Batch
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import assemble_run, load_run
from jaxmoe.run.rollback import DumpedBatch, dumped_steps, read_batch
from jaxmoe.state_tree import flatten
from jaxmoe.training.guard import norm_limit
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import TrainState
from sharding.distributed import batch_part, global_batch
from sharding.mesh import MeshConfig


def replay_run(
    path: str,
    *,
    refused_step: int | None = None,
    step: int | None = None,
    mesh: MeshConfig | None = None,
) -> dict[str, Any]:
    """Replay a refused step of a run and write bad_data/replay<step>/summary.json.

    Args:
        path: Run directory.
        refused_step: Refused step; the first of those refused last when None.
        step: Step of the checkpoint; the newest before the refused step when None, and the initial
            state if there is none.
        mesh: Mesh to use; the one of the run when None.

    Returns:
        The fields of `replay`, `refused_step`, `checkpoint_step` and `status`.

    Raises:
        ValueError: There is no run, no such checkpoint, or no dumped batch.
    """
    directory = RunDirectory(path)
    dumped = _dump(directory, refused_step)
    assembly, state, step = _load(path, dumped.step, step, mesh)
    findings = {"refused_step": dumped.step, "checkpoint_step": step, "status": "done"}
    with jax.set_mesh(assembly.mesh):
        findings |= replay(assembly, state, dumped)
    if jax.process_index() == 0:
        target = directory.bad_data_directory / f"replay{dumped.step}"
        RunDirectory(target).write_summary(findings)
    return findings


def replay(assembly: Assembly, state: TrainState, dumped: DumpedBatch) -> dict[str, Any]:
    """Compute loss and gradient of a batch, of each of its rows, and by array.

    Args:
        assembly: Plan, devices and data of the run; its mesh is current.
        state: State whose parameters are used.
        dumped: Batch of the refused step.

    Returns:
        `loss`, `grad_norm`, `not_finite`; `judged_norm`, without embeddings, and its `norm_limit`;
        `arrays` and `rows`, worst first.
    """
    guard = assembly.plan.config.training.step_guard
    limit = float(norm_limit(state.recent_norms, guard.max_norm_ratio))
    table = assembly.plan.table
    embeddings = {row.path for row in table if row.declaration.role == "embedding"}
    # Random numbers of a step follow from its number.
    number = jax.device_put(jnp.int32(dumped.step - 1), state.step.sharding)
    state = dataclasses.replace(state, opt_state=(), step=number)
    measure = _measure(assembly, dumped.batch.tokens.shape[0])

    def measure_replay(batch: Batch) -> tuple[float, dict[str, tuple[float, int]]]:
        loss, arrays = jax.device_get(
            measure(state, global_batch(_own_part(batch, assembly.mesh), assembly.mesh))
        )
        return float(loss), {path: (float(n), int(bad)) for path, (n, bad) in arrays.items()}

    loss, arrays = measure_replay(dumped.batch)
    rows = []
    for place, row in enumerate(dumped.rows.tolist()):
        alone, its_arrays = measure_replay(_repeat(dumped.batch, place))
        rows.append({"row": row, "place": place, "loss": alone, **_total(its_arrays)})
    suspects = [
        {"array": path, "grad_norm": norm, "not_finite": bad}
        for path, (norm, bad) in arrays.items()
    ]
    return {
        "loss": loss,
        **_total(arrays),
        "judged_norm": math.hypot(
            *(norm for path, (norm, _) in arrays.items() if path not in embeddings)
        ),
        "norm_limit": limit,
        "arrays": sorted(suspects, key=_suspicion, reverse=True),
        "rows": sorted(rows, key=_suspicion, reverse=True),
    }


def _dump(directory: RunDirectory, step: int | None) -> DumpedBatch:
    """Return the batch of a refused step; the first of the last consecutive ones by default."""
    steps = dumped_steps(directory)
    if step is None and not steps:
        raise ValueError(
            f"run.directory={directory.path} has no {directory.bad_data_directory.name}: no step"
            " of it was refused so often that the run went back or ended"
        )
    if step is None:
        step = next(number for number in reversed(steps) if number - 1 not in steps)
    return read_batch(directory, step)


def _load(
    path: str, refused: int, step: int | None, mesh: MeshConfig | None
) -> tuple[Assembly, TrainState, int]:
    """Return the run with the state of a checkpoint, and its step."""
    checkpoints = RunDirectory(path).checkpoints_directory
    if step is None and checkpoints.is_dir():
        manager = CheckpointManager(checkpoints, is_writer=False)
        before = (number for number in manager.shared_steps() if number < refused)
        step = max(before, default=None)
        manager.close()
    if step is not None:
        return load_run(path, step, mesh, needs_data=False)
    assembly = assemble_run(path, mesh)
    return assembly, assembly.new_state(), 0


def _measure(assembly: Assembly, num_rows: int) -> Callable[[TrainState, Batch], Any]:
    """Compile loss and, for each array of the gradient, its norm and number of bad values."""
    step = assembly.step(assembly.micro_batches(num_rows)).without(WorkerLosses.name)

    def measure(state: TrainState, batch: Batch) -> Any:
        summed = step.gradients.compute(step, state, batch).summed
        return summed.loss, {
            path: (jnp.linalg.norm(g.astype(jnp.float32)), jnp.sum(~jnp.isfinite(g)))
            for path, g in flatten(summed.grads).items()
        }

    return jax.jit(measure)


def _repeat(batch: Batch, place: int) -> Batch:
    """Return a batch with one row in all places, so that no other row affects its numbers."""
    return jax.tree.map(lambda array: np.repeat(array[place][None], len(array), 0), batch)


def _own_part(batch: Batch, mesh: Mesh) -> Batch:
    """Return the part of a batch that this process puts on the devices."""
    index, count = batch_part(mesh)
    return jax.tree.map(lambda array: np.split(array, count)[index], batch)


def _total(arrays: dict[str, tuple[float, int]]) -> dict[str, Any]:
    return {
        "grad_norm": math.hypot(*(norm for norm, _ in arrays.values())),
        "not_finite": sum(bad for _, bad in arrays.values()),
    }


def _suspicion(row: dict[str, Any]) -> tuple[float, ...]:
    """Return a sort key that is higher for what is not finite, then for larger numbers."""
    numbers = [row.get("loss", 0.0), row["grad_norm"]]
    finite = [x if math.isfinite(x) else math.inf for x in numbers]
    return (float(row["not_finite"] > 0 or not all(map(math.isfinite, numbers))), *finite)
