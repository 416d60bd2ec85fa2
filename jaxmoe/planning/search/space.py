# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the choices beside the mesh that a search tries, none of which changes the loss.

    rules         layout of parameters, gradients and optimiser state
    dispatchers   how rows reach experts, where the mesh or the fold spreads experts
    folds         experts spread over other axes than mesh.expert (arXiv 2504.14960)
    pipelines     schedule and chunks, on meshes with stages
    remats        values that the backward pass recomputes
    micro-batches every number that divides the batch

One choice of the first four is an arrangement of a mesh. Within an arrangement the search varies
remat and micro-batches until the step fits. Layers with experts and dense ones have each their
remat, which is Galvatron's inner choice (arXiv 2211.13878).

To search another choice: a field of `Space` and its loop in `arrangements`, in
`jaxmoe/planning/search/space.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator

from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.search.meshes import LaidOut, Tables, divisors, with_execution
from jaxmoe.planning.step_time import least_time_record
from jaxmoe.training.pipeline.stages import ModelParts
from sharding.expert_parallel import (
    AllGatherConfig,
    AllToAllConfig,
    Dispatcher,
    LocalConfig,
)
from sharding.fold import MoEMesh
from sharding.mesh import MeshConfig
from sharding.pipeline import InterleavedConfig, PipelineOrder
from sharding.state_layouts import StateLayoutName

RematPair = tuple[Remat, Remat | None]
"""Remat of the layers with experts, and of dense ones where it is another."""
_ACROSS_REPLICAS = ("hybrid", "hierarchical", "nested")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Choices that a search may change; an empty tuple keeps the plan's own."""

    rules: tuple[StateLayoutName, ...] = ()
    """Layouts of the training state."""
    dispatchers: tuple[Dispatcher, ...] = ()
    """Dispatchers; those that do not spread experts are for meshes that do not either."""
    pipelines: tuple[PipelineOrder | None, ...] = ()
    """Schedules of meshes with stages; None for the default one."""
    remats: tuple[Remat, ...] = ()
    """Remat choices of each kind of layer, the fastest first."""
    has_folds: bool = False
    """Whether experts may be spread over other axes than mesh.expert."""
    has_micro_batches: bool = False
    """Whether the number of micro-batches may change."""


EVERYTHING = Space(
    rules=("fully_sharded", "zero2", "zero1", *_ACROSS_REPLICAS),
    dispatchers=(
        LocalConfig(),
        AllToAllConfig(),
        AllToAllConfig(experts_keep="inputs"),
        AllGatherConfig(),
    ),
    pipelines=(None, *(InterleavedConfig(chunks=chunks) for chunks in (2, 4))),
    remats=("none", "dots", "kernels", "attention", "full"),
    has_folds=True,
    has_micro_batches=True,
)
"""Every choice that a search knows. GPipe takes the time of one chunk and more memory."""


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A mesh with everything chosen but remat and micro-batches."""

    plan: StepPlan
    """Plan with the first remat and the fewest micro-batches."""
    remats: tuple[RematPair, ...]
    """Remat choices: the fastest, which needs most memory, first, the slowest last."""
    numbers: tuple[int, ...]
    """Numbers of micro-batches, the fewest first."""

    @functools.cached_property
    def record(self) -> tuple[Hashable, ...]:
        """What arrangements have in common whose plans take the same time at least."""
        return least_time_record(self.plan.execution)

    def at(self, number: int, remat: int) -> StepPlan:
        """Return the plan with a number of micro-batches and a remat, both by their index."""
        execution, (routed, dense) = self.plan.execution, self.remats[remat]
        if (execution.remat, execution.remat_dense) == (routed, dense):
            plan = self.plan
        else:
            changed = dataclasses.replace(execution, remat=routed, remat_dense=dense)
            plan = dataclasses.replace(self.plan, execution=changed)
        if plan.accumulation == self.numbers[number]:
            return plan
        return dataclasses.replace(plan, accumulation=self.numbers[number])

    @property
    def num_starts(self) -> int:
        """Numbers of micro-batches, from the fewest, of which any may be the fastest."""
        return len(self.numbers) if self.plan.execution.mesh.stage > 1 else 1

    @property
    def smallest(self) -> StepPlan:
        """Plan that needs least memory."""
        return self.at(len(self.numbers) - 1, len(self.remats) - 1)


def arrangements(
    plan: StepPlan,
    mesh: MeshConfig,
    space: Space,
    fold: MoEMesh | None = None,
    tables: Tables | None = None,
) -> Iterator[Arrangement | ValueError]:
    """Yield every arrangement of a mesh, or the error of one that does not divide.

    Args:
        plan: Step to plan; its own mesh is ignored.
        mesh: Mesh with every size filled in.
        space: Choices to try.
        fold: Layout of the experts on the mesh, if it is not searched.
        tables: What `LaidOut.of` shares between meshes.
    """
    base = plan.execution
    rules = _rules(mesh, space) or (base.rules,)
    pipelines = _pipelines(plan, mesh, space)
    spreads = list(_spreads(plan, mesh, space, fold))
    remats = _remats(plan, space)
    layouts: dict[tuple[StateLayoutName, MoEMesh | None], LaidOut] = {}

    def laid_out(plan: StepPlan, execution: ExecutionConfig) -> LaidOut:
        key = execution.rules, execution.fold  # on one mesh nothing else is read
        if key not in layouts:
            layouts[key] = LaidOut.of(plan, execution, tables)
        return layouts[key]

    for rule, pipeline, (dispatcher, own_fold) in itertools.product(rules, pipelines, spreads):
        layout = layouts.get((rule, own_fold))
        if layout is not None and layout.refusal is not None:
            yield layout.refusal
            continue
        try:
            execution = dataclasses.replace(
                base,
                mesh=mesh,
                fold=own_fold,
                rules=rule,
                pipeline=pipeline,
                dispatcher=dispatcher,
                remat=(space.remats or (base.remat,))[0],
                remat_dense=None if space.remats else base.remat_dense,
            )
            yield _arrangement(
                plan, execution, remats, laid_out, has_numbers=space.has_micro_batches
            )
        except ValueError as error:
            yield error


def _arrangement(
    plan: StepPlan,
    execution: ExecutionConfig,
    remats: tuple[RematPair, ...],
    laid_out: Callable[[StepPlan, ExecutionConfig], LaidOut],
    *,
    has_numbers: bool,
) -> Arrangement:
    """Return one arrangement of a plan, with its execution.

    Raises:
        ValueError: See `with_execution`.
    """
    remats = remats or ((execution.remat, execution.remat_dense),)
    if not has_numbers:
        changed = with_execution(plan, execution, laid_out)
        return Arrangement(changed, remats, (changed.accumulation,))
    unit = fewest_micro_batches(execution)
    first = unit if plan.gradients.paths(2) is None else max(unit, 2)
    changed = with_execution(plan, execution, laid_out, accumulation=first)
    numbers = divisors(changed.batch_size // execution.mesh.batch_shards)
    fitting = tuple(n for n in numbers if n % unit == 0 and n >= first)
    return Arrangement(changed, remats, fitting)


def _remats(plan: StepPlan, space: Space) -> tuple[RematPair, ...]:
    """Return a remat for all layers, and where the model has both kinds one for each; dense layers,
    which are few beside others, have no other of their own than those below."""
    alike: list[RematPair] = [(remat, None) for remat in space.remats]
    if len({kind.feed_forward.is_routed for kind in plan.model.kinds}) < 2:
        return tuple(alike)
    of_dense: list[Remat] = [remat for remat in space.remats if remat in ("none", "dots", "full")]
    mixed: list[RematPair] = [(a, b) for a in space.remats for b in of_dense if a != b]
    return (*alike[:1], *mixed, *alike[1:])


def _pipelines(plan: StepPlan, mesh: MeshConfig, space: Space) -> tuple[PipelineOrder | None, ...]:
    """Return the pipelines whose chunks divide the layers; the first, whose refusal says why, where
    none does."""
    if mesh.stage == 1 or not space.pipelines:
        return (plan.execution.pipeline,)
    length = ModelParts.of(plan.model).staged.length
    dividing = tuple(
        order
        for order in space.pipelines
        if length % (mesh.stage * (1 if order is None else order.chunks)) == 0
    )
    return dividing or space.pipelines[:1]


def _rules(mesh: MeshConfig, space: Space) -> tuple[StateLayoutName, ...]:
    """Return the layouts that differ on a mesh."""
    if mesh.batch_shards * mesh.seq == 1:
        return space.rules[:1]
    return tuple(
        rules for rules in space.rules if mesh.replica > 1 or rules not in _ACROSS_REPLICAS
    )


def _spreads(
    plan: StepPlan, mesh: MeshConfig, space: Space, fold: MoEMesh | None
) -> Iterator[tuple[Dispatcher, MoEMesh | None]]:
    """Yield the dispatchers and folds of a mesh.

    Experts on the axis expert that are gathered for use are those on the axis data: of the two
    the search tries the second.
    """
    own = plan.execution.dispatcher
    folds = [fold]
    if space.has_folds and fold is None and mesh.expert == 1 and mesh.tensor * mesh.seq > 1:
        devices = mesh.data * mesh.seq * mesh.tensor
        folds += [MoEMesh(expert=size) for size in divisors(devices)[1:]]
    is_routed = plan.model.num_moe_layers > 0
    for one in folds:
        if not space.dispatchers:
            if one is fold or own.traits.spreads_experts:
                yield own, one
            continue
        is_spread = mesh.expert > 1 or (one is not None and one.expert * one.expert_tensor > 1)
        if is_spread and not is_routed:
            continue
        for dispatcher in space.dispatchers:
            if dispatcher.traits.spreads_experts == is_spread:
                yield dispatcher, one


def fewest_micro_batches(execution: ExecutionConfig) -> int:
    """Return the number whose multiples a step may have as micro-batches."""
    return execution.mesh.stage if execution.pipeline_order.chunks > 1 else 1
