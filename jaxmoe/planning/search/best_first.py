# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches meshes and arrangements in closed form for the fastest that fit, in the order of time.

Predicting time costs a millisecond, memory up to a tenth of a second, so memory is predicted in the
order of time. Without stages a step is no faster with more micro-batches, and on no mesh with a
remat that recomputes more; so each arrangement begins with the fewest micro-batches and the fastest
remat, and the others enter the queue when that one leaves it. The first plans that leave the
queue and fit are therefore the best of all. Pipette (DATE 2024) and Galvatron (arXiv 2211.13878)
prune a larger space by the same two estimates.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmoe.execution import Remat
from jaxmoe.planning.abstract_step import StepPlan, abstract_state
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.memory import MemoryEstimate, estimate_memory
from jaxmoe.planning.search.meshes import mesh_in_words
from jaxmoe.planning.search.space import Arrangement, Space, arrangements
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import StepTime, predict_time
from jaxmoe.training.state import TrainState
from sharding.fold import MoEMesh
from sharding.mesh import MeshConfig

Factors = Mapping[Remat, float]
"""Compiled temporaries over those of the closed form, by remat; 1 where unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with its predicted time and memory."""

    plan: StepPlan
    time: StepTime
    memory: MemoryEstimate
    factor: float = 1.0
    """Compiled temporaries over those of the closed form, as far as known."""

    @property
    def mesh(self) -> MeshConfig:
        """Sizes of the mesh axes."""
        return self.plan.execution.mesh

    @property
    def need(self) -> float:
        """Bytes that a device needs."""
        return self.memory.arguments + self.factor * self.memory.temporaries

    def excess(self, chip: Chip) -> float:
        """Return the bytes missing on a device; negative if some are left."""
        return self.need - chip.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    fitting: list[Candidate]
    """Fastest plan of each arrangement that fits, by predicted time; at most as many as
    requested."""
    faster: list[Candidate]
    """Plans that are faster than the first of `fitting` and do not fit, one of an arrangement."""
    closest: Candidate | None
    """Plan that needs least memory if nothing fits; else None."""
    refused: dict[str, str]
    """Reason by mesh of which no arrangement divides."""
    num_meshes: int
    """Number of meshes considered."""
    num_arrangements: int
    """Number of their arrangements that divide."""


@dataclasses.dataclass
class _BestFirstSearch:
    """State of one search."""

    chip: Chip
    factors: Factors
    states: dict[tuple[Any, ...], TrainState] = dataclasses.field(default_factory=dict)

    def candidate(self, plan: StepPlan, time: StepTime) -> Candidate:
        """Return a plan with its memory."""
        execution = plan.execution
        key = (execution.mesh, execution.rules, execution.fold)  # what the state depends on
        if key not in self.states:
            self.states[key] = abstract_state(plan, plan.mesh)
        memory = estimate_memory(plan, self.chip.platform, self.states[key])
        factor = self.factors.get(execution.remat, 1.0)
        return Candidate(plan=plan, time=time, memory=memory, factor=factor)

    def smallest(self, arrangement: Arrangement) -> Candidate:
        """Return the plan of an arrangement that needs least memory."""
        return self.candidate(arrangement.smallest, predict_time(arrangement.smallest, self.chip))


def search(
    plan: StepPlan,
    meshes: Sequence[MeshConfig],
    chip: Chip,
    *,
    keep: int = 5,
    fold: MoEMesh | None = None,
    space: Space | None = None,
    factors: Factors | None = None,
) -> SearchResult:
    """Return the fastest plans that fit, in closed form.

    Args:
        plan: Step to plan; its own mesh is ignored.
        meshes: Meshes to choose from.
        chip: Properties of one device.
        keep: Largest number of arrangements to return.
        fold: Layout of the experts on each mesh, if it is not searched.
        space: Choices beside the mesh; None keeps all of the plan's.
        factors: Compiled temporaries over those of the closed form, by remat.
    """
    refused: dict[str, str] = {}
    kept_arrangements: list[Arrangement] = []
    for mesh in meshes:
        all_arrangements = list(arrangements(plan, mesh, space or Space(), fold))
        dividing = [
            arrangement for arrangement in all_arrangements if isinstance(arrangement, Arrangement)
        ]
        if not dividing and all_arrangements:
            refused[mesh_in_words(mesh)] = str(all_arrangements[0])
        kept_arrangements += dividing
    searching = _BestFirstSearch(chip, factors or {})
    fitting: list[Candidate] = []
    faster: dict[int, Candidate] = {}
    for place, candidate in _by_time(kept_arrangements, searching):
        if candidate.excess(chip) <= 0:
            fitting.append(candidate)
            if len(fitting) == keep:
                break
        elif not fitting:
            faster.setdefault(place, candidate)
    fitting.sort(key=lambda one: (float(f"{one.time.step:.6g}"), one.need))
    closest = None if fitting else _closest(kept_arrangements, searching)
    return SearchResult(
        fitting=fitting,
        faster=list(faster.values()) if fitting else [],
        closest=closest,
        refused=refused,
        num_meshes=len(meshes),
        num_arrangements=len(kept_arrangements),
    )


def _by_time(
    entries: Sequence[Arrangement], searching: _BestFirstSearch
) -> Iterator[tuple[int, Candidate]]:
    """Yield plans with the place of their arrangement, by predicted time.

    An arrangement ends with its first plan that fits. One that can never fit is not gone through.
    """
    chip = searching.chip
    serial = itertools.count()
    queue: list[tuple[float, int, int, int, int, StepTime]] = []

    def push(place: int, number: int, remat: int) -> None:
        time = predict_time(entries[place].at(number, remat), chip)
        heapq.heappush(queue, (time.step, next(serial), place, number, remat, time))

    for place, arrangement in enumerate(entries):
        # With stages more micro-batches may be faster: each number is a start of its own.
        has_order = arrangement.plan.execution.mesh.stage == 1
        for number in range(1 if has_order else len(arrangement.numbers)):
            push(place, number, 0)
    finished: set[int] = set()
    possible: set[int] = set()
    while queue:
        _, _, place, number, remat, time = heapq.heappop(queue)
        if place in finished:
            continue
        arrangement = entries[place]
        if place not in possible and least_bytes(arrangement.plan) > chip.available:
            finished.add(place)
            continue
        candidate = searching.candidate(arrangement.at(number, remat), time)
        yield place, candidate
        if candidate.excess(chip) <= 0:
            finished.add(place)
            continue
        if place not in possible:
            if searching.smallest(arrangement).excess(chip) > 0:
                finished.add(place)
                continue
            possible.add(place)
        if remat:
            continue
        for index in range(1, len(arrangement.remats)):
            push(place, number, index)
        if arrangement.plan.execution.mesh.stage == 1 and number + 1 < len(arrangement.numbers):
            push(place, number + 1, 0)


def _closest(entries: Sequence[Arrangement], searching: _BestFirstSearch) -> Candidate | None:
    """Return the plan that needs least memory."""
    closest: Candidate | None = None
    for least, _, arrangement in sorted(
        (least_bytes(arrangement.plan), i, arrangement) for i, arrangement in enumerate(entries)
    ):
        if closest is not None and least >= closest.need:
            break
        candidate = searching.smallest(arrangement)
        if closest is None or candidate.need < closest.need:
            closest = candidate
    return closest


def least_bytes(plan: StepPlan) -> float:
    """Return bytes that a device needs at least: parameters and their gradients.

    Args:
        plan: Step to plan.
    """
    sizes = Sizes.of(plan)
    width = jnp.dtype(plan.execution.precision.parameter_dtype).itemsize
    return sum(sizes.local(row) * (width + 4 * (not row.is_frozen)) for row in plan.table)
