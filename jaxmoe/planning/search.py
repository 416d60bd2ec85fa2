# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches the meshes of a number of devices in closed form for the fastest that fit.

    enumerate   replica x data x expert x tensor = devices, and seq and stage where they may be
                above 1
    refuse      meshes that do not divide heads, experts, widths or the batch, and stages that
                do not divide the layers or the micro-batches; with the reason
    order       by predicted time, then keep the first that fit by predicted memory

Predicting time costs nothing, memory a tenth of a second, so memory is predicted in the order of
time until enough meshes fit; the first of them is the best of all. Pipette (DATE 2024) and
Galvatron (arXiv 2211.13878) prune a larger space by the same two estimates. Remat, chunks,
dispatcher and micro-batches are not changed; `remedies` lists changes to them that save memory.

To search another axis: `enumerate_meshes` in `jaxmoe/planning/search.py`.
To suggest another change: `remedies` in `jaxmoe/planning/search.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.sequences import check_rows
from jaxmoe.planning.abstract_step import StepPlan, abstract_state
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.memory_estimate import MemoryEstimate
from jaxmoe.planning.step_time import StepTime, predict_time
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.training.pipeline import check_pipeline
from jaxmoe.training.pipeline.stages import ModelParts
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.fold import MoEMesh
from sharding.mesh import MeshConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh with its predicted time and memory."""

    plan: StepPlan
    time: StepTime
    memory: MemoryEstimate

    @property
    def mesh(self) -> MeshConfig:
        """Sizes of the mesh axes."""
        return self.plan.execution.mesh

    def excess(self, chip: Chip) -> float:
        """Return the bytes missing on a device; negative if some are left."""
        return self.memory.total - chip.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search."""

    fitting: list[Candidate]
    """Candidates that fit, by predicted time; at most as many as requested."""
    closest: Candidate | None
    """Mesh that needs least memory if nothing fits; else None."""
    refused: dict[str, str]
    """Reason by mesh that does not divide."""
    num_meshes: int
    """Number of meshes considered."""


def enumerate_meshes(
    num_devices: int, seq: int | None = 1, stages: Sequence[int] = (1,)
) -> Iterator[MeshConfig]:
    """Yield every mesh of a number of devices.

    Args:
        num_devices: Number of devices, all of them used.
        seq: Size of the axis seq; None tries every divisor.
        stages: Sizes of the axis stage; those that do not divide the devices are left out.
    """
    for stage in stages:
        if num_devices % stage:
            continue
        number = num_devices // stage
        for length in _divisors(number) if seq is None else [seq]:
            if number % length:
                continue
            free = number // length
            for data in _divisors(free):
                for tensor in _divisors(free // data):
                    for expert in _divisors(free // data // tensor):
                        yield MeshConfig(
                            replica=free // data // tensor // expert,
                            stage=stage,
                            data=data,
                            expert=expert,
                            seq=length,
                            tensor=tensor,
                        )


def stages_of(plan: StepPlan, num_devices: int) -> list[int]:
    """Return the sizes above 1 of the axis stage that divide devices and layers, by size.

    Args:
        plan: Step to plan.
        num_devices: Number of devices.
    """
    length = ModelParts.of(plan.model).staged.length
    chunks = plan.execution.pipeline.chunks
    return [n for n in _divisors(num_devices) if n > 1 and length % (n * chunks) == 0]


def on_mesh(plan: StepPlan, mesh: MeshConfig, fold: MoEMesh | None = None) -> StepPlan:
    """Return the plan on another mesh.

    Args:
        plan: Step to plan.
        mesh: Mesh with every size filled in.
        fold: Mesh of the experts within it, if they have their own.

    Raises:
        ValueError: The mesh does not divide a parameter, the heads, the layers or the batch.
    """
    own = plan.on(dataclasses.replace(plan.execution, mesh=mesh, fold=fold))
    check_pipeline(own.model, own.execution, own.accumulation)
    if own.skipping is not None:
        own.skipping.check(own.model, own.execution, own.accumulation, own.accumulated_balance)
    sizes, rules = dict(own.mesh.shape), own.execution.axis_rules
    for layout in (rules, own.execution.state_layout.optimizer):
        own.table.check_divides(layout, sizes)
    length = (plan.sequence_length,)
    rules.check_divides("training.sequence_length", length, (ax.ACT_SEQ,), sizes)
    check_rows(plan.model.context, own.execution, plan.sequence_length, sizes)
    parts = mesh.batch_shards * plan.accumulation
    if plan.batch_size % parts:
        raise ValueError(
            f"training.batch_size={plan.batch_size} must be divisible by the {mesh.batch_shards}"
            " devices that share a batch (mesh replica x data x expert) times"
            f" training.accumulation={plan.accumulation}: choose a multiple of {parts}"
        )
    return own


def search_with_stages(
    plan: StepPlan,
    num_devices: int,
    chip: Chip,
    *,
    seq: int | None = 1,
    **options: Any,
) -> Found:
    """Return the fastest meshes that fit, with stages where they may help.

    Meshes with stages are tried if nothing fits without, or if the devices span several networks:
    a pipeline sends little between stages.

    Args:
        plan: Step to plan; its own mesh is ignored.
        num_devices: Number of devices, all of them used.
        chip: Properties of one device.
        seq: Size of the axis seq; None tries every divisor.
        options: Further arguments of `search`.
    """
    staged = list(enumerate_meshes(num_devices, seq, stages_of(plan, num_devices)))
    plain = list(enumerate_meshes(num_devices, seq))
    if chip.domain and num_devices > chip.domain:
        return search(plan, [*plain, *staged], chip, **options)
    found = search(plan, plain, chip, **options)
    if found.fitting or not staged:
        return found
    other = search(plan, staged, chip, **options)
    closest = [one for one in (found.closest, other.closest) if one is not None]
    return Found(
        fitting=other.fitting,
        closest=None if other.fitting else min(closest, key=_need, default=None),
        refused=found.refused | other.refused,
        num_meshes=found.num_meshes + other.num_meshes,
    )


def _need(candidate: Candidate) -> float:
    return candidate.memory.total


def search(
    plan: StepPlan,
    meshes: Sequence[MeshConfig],
    chip: Chip,
    *,
    keep: int = 3,
    fold: MoEMesh | None = None,
    searches_accumulation: bool = False,
) -> Found:
    """Return the fastest meshes that fit, in closed form.

    Args:
        plan: Step to plan; its own mesh is ignored.
        meshes: Meshes to choose from.
        chip: Properties of one device.
        keep: Largest number of meshes to return.
        fold: Mesh of the experts within each mesh.
        searches_accumulation: Whether to try every number of micro-batches that divides the batch,
            instead of the plan's own.
    """
    refused: dict[str, str] = {}
    timed: list[tuple[float, StepPlan, StepTime]] = []
    for mesh in meshes:
        try:
            options = _options(plan, mesh, fold, searches_accumulation)
        except ValueError as error:
            refused[mesh_in_words(mesh)] = str(error)
            continue
        for option in options:
            time = predict_time(option, chip)
            timed.append((time.step, option, time))
    timed.sort(key=lambda entry: entry[0])
    fitting: list[Candidate] = []
    others: list[Candidate] = []
    smallest = _smallest_steps([own for _, own, _ in timed])
    states: dict[MeshConfig, TrainState] = {}  # does not depend on the micro-batches

    def candidate_of(plan: StepPlan, time: StepTime) -> Candidate:
        mesh = plan.execution.mesh
        if mesh not in states:
            states[mesh] = abstract_state(plan, plan.mesh)
        memory = estimate_memory(plan, chip.platform, states[mesh])
        return Candidate(plan=plan, time=time, memory=memory)

    too_large: set[MeshConfig] = set()
    for _, own, time in timed:
        mesh = own.execution.mesh
        if mesh in too_large:
            continue
        candidate = candidate_of(own, time)
        if candidate.excess(chip) <= 0:
            fitting.append(candidate)
        else:
            others.append(candidate)
            if (least := smallest.pop(mesh, None)) is not None:
                least = candidate_of(least, predict_time(least, chip))
                if least.excess(chip) > 0:
                    too_large.add(mesh)
                    others.append(least)
        if len(fitting) == keep:
            break
    closest = min(others, key=_need, default=None)
    return Found(
        fitting=fitting,
        closest=None if fitting else closest,
        refused=refused,
        num_meshes=len(meshes),
    )


def _options(
    plan: StepPlan, mesh: MeshConfig, fold: MoEMesh | None, searches_accumulation: bool
) -> list[StepPlan]:
    """Return the plan on a mesh, with every number of micro-batches if they are searched.

    Raises:
        ValueError: See `on_mesh`.
    """
    if not searches_accumulation:
        return [on_mesh(plan, mesh, fold)]
    least = _fewest_micro_batches(mesh, plan.execution)
    first = least if plan.skipping is None else max(least, 2)
    own = on_mesh(dataclasses.replace(plan, accumulation=first), mesh, fold)
    numbers = _divisors(own.batch_size // mesh.batch_shards)
    return [
        dataclasses.replace(own, accumulation=n) for n in numbers if n % least == 0 and n >= first
    ]


def _fewest_micro_batches(mesh: MeshConfig, execution: ExecutionConfig) -> int:
    """Return the number whose multiples a step may have as micro-batches."""
    return mesh.stage if execution.pipeline.chunks > 1 else 1


def _smallest_steps(plans: Sequence[StepPlan]) -> dict[MeshConfig, StepPlan]:
    """Return the plan with most micro-batches of each mesh, which needs least memory."""
    found: dict[MeshConfig, StepPlan] = {}
    for plan in plans:
        other = found.get(plan.execution.mesh)
        if other is None or plan.accumulation > other.accumulation:
            found[plan.execution.mesh] = plan
    return found


def remedies(candidate: Candidate, chip: Chip) -> dict[str, float]:
    """Return flags that need less memory, each with the bytes that a device would need.

    Args:
        candidate: Mesh that does not fit.
        chip: Properties of one device.
    """
    plan, execution = candidate.plan, candidate.plan.execution
    changes: dict[str, StepPlan] = {}

    def execute(flag: str, **fields: object) -> None:
        changes[flag] = plan.on(dataclasses.replace(execution, **fields))

    if execution.remat in ("none", "dots"):
        execute("--execution.remat full", remat="full")
    if chip.platform != "cpu" and execution.remat != "offload":
        execute("--execution.remat offload", remat="offload")
    if chip.platform != "cpu" and execution.optimizer_memory == "device":
        execute("--execution.optimizer_memory host", optimizer_memory="host")
    if not execution.loss_chunk and plan.sequence_length > 512:
        execute("--execution.loss_chunk 512", loss_chunk=512)
    if execution.rules != "fully_sharded":
        execute("--execution.rules fully_sharded", rules="fully_sharded")
    if execution.precision.parameters == "float32":
        narrow = PrecisionPolicy(parameters="bfloat16", compute=execution.precision.compute)
        execute("--execution.precision.parameters bfloat16", precision=narrow)
    most = plan.batch_size // candidate.mesh.batch_shards
    unit = _fewest_micro_batches(candidate.mesh, execution)
    if more := [a for a in _divisors(most) if a > plan.accumulation and a % unit == 0]:
        flag = f"--training.accumulation {more[-1]}"
        changes[flag] = dataclasses.replace(plan, accumulation=more[-1])
    needs = {
        flag: estimate_memory(changed, chip.platform).total for flag, changed in changes.items()
    }
    return {flag: need for flag, need in needs.items() if need < candidate.memory.total}


def mesh_in_words(mesh: MeshConfig) -> str:
    """Return the mesh as `data=16 tensor=2`, or `one device` if every axis has size 1."""
    sizes = mesh.by_axis.items()
    return " ".join(f"{axis}={size}" for axis, size in sizes if size != 1) or "one device"


def mesh_flags(mesh: MeshConfig) -> list[str]:
    """Return the mesh as words of a command line."""
    named = {axis: size for axis, size in mesh.by_axis.items() if size != 1 or axis == ax.DATA}
    return [
        word for axis, size in named.items() for word in (f"--execution.mesh.{axis}", str(size))
    ]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(max(number, 1)) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
