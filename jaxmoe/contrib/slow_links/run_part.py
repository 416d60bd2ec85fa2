# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Restores checkpoints of runs whose workers communicate rarely, and describes such runs.

A run continues with another number of workers as well: each new worker begins with the parameters
that the world sees and the optimiser of worker i mod R of the checkpoint; messages under way and
errors that codecs had kept are dropped. Moments of which each worker has those of its own rows
begin anew: with other workers the rows are others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.contrib.slow_links.cost import cost
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.workers.gradient_state import GradientTraining
from jaxmoe.contrib.slow_links.workers.local import WORKERS, local_of, with_local
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import ConfiguredPart
from jaxmoe.run.restore import Place, PlacedSource, Search, StartingPoint
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.state_tree import SEPARATOR, flatten, unpack
from jaxmoe.training.state import TrainState

logger = logging.getLogger(__name__)

_LOCAL = f"parts/{WORKERS}/"


class ReplicasPart(ConfiguredPart):
    """Restores checkpoints of other numbers of workers, and describes the workers of a run."""

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        super().__init__(config, directory, supervision)
        self._description: str | None = None

    def sources(self) -> Sequence[PlacedSource]:
        """Return the newest checkpoint, where it has another number of workers."""
        return ((Place.CHECKPOINT, _from_other_workers),)

    def heading(self, assembly: Assembly) -> Sequence[str]:
        """Return method, number of workers and bytes."""
        return (f"replicas {describe_workers(assembly)}",)

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Note the workers of the mesh."""
        del step, state, watches
        self._description = describe_workers(assembly)

    def rows(self) -> Mapping[str, Any]:
        """Return the description."""
        return {"replicas": self._description}


def _from_other_workers(search: Search) -> StartingPoint | None:
    """Return the newest checkpoint if it has another number of workers than the run."""
    newest = search.checkpoints.latest_step()
    if newest is None or not search.is_start:
        return None
    state = with_other_workers(search.assembly, search.checkpoints, newest, search.shapes)
    if state is None:
        return None
    search.continuation.check_own(search.checkpoints.shared_manifest(newest))
    return search.with_data(newest, state, f"step {newest}, with other workers")


def with_other_workers(
    assembly: Assembly, manager: CheckpointManager, step: int, shapes: TrainState
) -> TrainState | None:
    """Return a checkpoint's state for another number of workers; None where the number is equal.

    Args:
        assembly: Plan and devices of this start.
        manager: Checkpoints of the run.
        step: Step to read.
        shapes: Shapes and shardings of a new state of this start.
    """
    manifest = manager.shared_manifest(step)
    name = f"{_LOCAL}skipped"
    if WORKERS not in shapes.parts or name not in manifest.arrays:
        return None
    (before,), number = manifest.arrays[name]["shape"], local_of(shapes).skipped.shape[0]
    if before == number:
        return None
    logger.warning(
        "the checkpoint of step %d has %d workers, and this run %d: each begins with the common"
        " parameters, and what was under way between workers is dropped",
        step,
        before,
        number,
    )

    def save(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, *leaf.sharding.spec[1:])
        where = NamedSharding(assembly.mesh, spec) if assembly.mesh.size > 1 else None
        shape = manifest.arrays.get(path, {}).get("shape", (before, *leaf.shape[1:]))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=where)

    names = ("opt_state", "router_state", "recent_norms")
    saved_arrays = _as_saved({name: getattr(local_of(shapes), name) for name in names})
    shapes_by_path = {path: save(path, leaf) for path, leaf in saved_arrays.items()}
    fields = ("params", "opt_state", "router_state", "step", "rng", "skipped", "skipped_in_a_row")
    target = {name: getattr(shapes, name) for name in fields}
    # The optimiser of a worker begins anew where the saved one does not fit.
    field_names = (name for name in fields if name != "opt_state")
    state = dataclasses.replace(assembly.new_world(), **dict.fromkeys(field_names))
    target_arrays = target | traverse_util.unflatten_dict(shapes_by_path, sep=SEPARATOR)
    restored = restore_part(manager.directory, target_arrays, step=step)
    source_workers = jnp.arange(number) % before
    local = _as_saved(restored.pop("parts")[WORKERS])
    with jax.set_mesh(assembly.mesh):
        outer = restored.pop("opt_state")
        worker_state = assembly.workers.begin(dataclasses.replace(state, **restored))
        mine = _as_saved({name: getattr(local_of(worker_state), name) for name in names})
        for path, like in saved_arrays.items():
            if local[path].shape[1:] == like.shape[1:]:
                mine[path] = jax.device_put(local[path][source_workers], like.sharding)
    packed = traverse_util.unflatten_dict(mine, sep=SEPARATOR)["parts"][WORKERS]
    parts = unpack(packed, {name: getattr(local_of(worker_state), name) for name in names})
    worker_state = with_local(worker_state, dataclasses.replace(local_of(worker_state), **parts))
    return dataclasses.replace(worker_state, opt_state=outer)


def _as_saved(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `WorkerStates` by the paths of a checkpoint."""
    return flatten({"parts": {WORKERS: fields}})


def sent_per_step(assembly: Assembly) -> float:
    """Return the bytes that a worker sends in a step, as a mean over the steps.

    Without workers: those of a synchronous run, whose gradients are reduced over mesh.replica.
    """
    workers = _num_workers(assembly)
    training = assembly.workers.training
    if isinstance(training, GradientTraining):
        return training.method.step_bytes(list(training.leaves.values()), workers)
    if isinstance(training, WorkerTraining):
        return cost(training.method, list(training.leaves.values()), workers).step
    return synchronous_bytes(assembly, assembly.execution.mesh.replica)


def synchronous_bytes(assembly: Assembly, workers: int) -> float:
    """Return the bytes that each of several workers sends in an all-reduce of the gradients."""
    numbers = sum(row.size for row in assembly.plan.table.trained_rows)
    return 2 * (workers - 1) / workers * 4 * numbers


def describe_workers(assembly: Assembly) -> str | None:
    """Return method, number of workers, timing and bytes of a run; None without workers."""
    training = assembly.workers.training
    if training is None:
        return None
    number = _num_workers(assembly)
    often = "gradients in every step"
    if isinstance(training, WorkerTraining):
        often = _timing_in_words(training.method.timing)
    is_alone = training.workers.is_spread or assembly.job is not None
    where = "" if is_alone else " on the same devices"
    synchronous = synchronous_bytes(assembly, number)
    return (
        f"{number}{where}, {assembly.plan.config.replicas.name}: {often};"
        f" {sent_per_step(assembly) / 1e6:.3g} MB a step and worker (synchronous"
        f" {synchronous / 1e6:.3g} MB)"
    )


def _num_workers(assembly: Assembly) -> int:
    if assembly.job is not None:
        return assembly.job[1]
    return assembly.plan.config.replicas.num_workers(assembly.execution.mesh.replica)


def _timing_in_words(timing: ExchangeTiming) -> str:
    parts = f"{timing.fragments} fragments" if timing.fragments > 1 else "all parameters"
    often = "every step" if timing.every == 1 else f"every {timing.every} steps"
    late = f", merged {timing.delay} step{'s' * (timing.delay > 1)} later" if timing.delay else ""
    last = timing.last
    if last is not None and last < timing.offset(0):
        return f"{parts} once, after the last step, as replicas.every={timing.every} is longer"
    in_turn = all(timing.sends(part, last) for part in range(timing.fragments))
    end = "" if last is None or (in_turn and not timing.delay) else ", and all after the last step"
    return f"{parts} {often}{late}{end}"
