# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches meshes and arrangements in closed form for the fastest that fit, in the order of time.

Predicting time costs a fraction of a millisecond, memory up to a tenth of a second. So plans enter
the queue with what they take at least, for products and for messages that a step waits for; what
their parameters add at least follows when a plan's turn comes, then the time (`bounds.py`), and the
memory in the order of the times. What several plans have in common is computed once. Without stages
a step is no faster with more micro-batches, and on no mesh with a remat that recomputes more; so
each arrangement begins with the fewest micro-batches and the fastest remat, and the others enter
when that one leaves the queue. The first plans that leave it and fit are therefore the best of all.
Pipette (DATE 2024) and Galvatron (arXiv 2211.13878) prune a larger space by the same two estimates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.execution import Remat
from jaxmoe.planning.abstract_step import StepPlan, abstract_state
from jaxmoe.planning.device_layout import DeviceLayout, TokenFlops
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.memory import estimate_memory, least_memory
from jaxmoe.planning.memory_estimate import MemoryEstimate
from jaxmoe.planning.search.bounds import ParameterSeconds
from jaxmoe.planning.search.meshes import Tables, mesh_in_words
from jaxmoe.planning.search.space import Arrangement, RematPair, Space, arrangements
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import StepTime, least_time, time_of
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
    """Plans that are faster than the first of `fitting` and do not fit, one of an arrangement, by
    predicted time: those that need least memory, at most as many as requested."""
    closest: Candidate | None
    """Plan that needs least memory if nothing fits; else None."""
    refused: dict[str, str]
    """Reason by mesh of which no arrangement divides."""
    num_meshes: int
    """Number of meshes considered."""
    num_arrangements: int
    """Number of their arrangements that divide."""


_Seconds = dict[tuple[int, RematPair], float]
"""Seconds by the number of micro-batches and the remat."""
_ANY = -1
"""Stands for every number of micro-batches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LeastTimes:
    """Seconds that plans of an arrangement take at least, each computed once for all arrangements
    that have it in common."""

    arrangement: Arrangement
    chip: Chip
    layout: DeviceLayout
    products: _Seconds
    """Shared by arrangements with the same `Arrangement.record`."""
    unhidden: _Seconds
    """Shared by arrangements with the same layout and pipeline."""
    parameters: Callable[[Sizes], ParameterSeconds]
    """Those of the layout, from the sizes of a plan with it."""

    def least_time(self, number: int, remat: int) -> float:
        """Return seconds that a plan takes at least; see `Arrangement.at`."""
        key = self.arrangement.numbers[number], self.arrangement.remats[remat]
        if key not in self.products:
            self.products[key] = least_time(self._sizes(number, remat), self.chip)
        return self.products[key]

    def floor(self) -> float:
        """Return seconds that a plan takes at least, whatever the number of micro-batches: with the
        fastest remat, stages that never wait and the messages of the fewest micro-batches."""
        plan = self.arrangement.plan
        if plan.gradients.paths(2) is not None:
            return 0.0  # micro-batches leave out layers
        key = _ANY, self.arrangement.remats[0]
        if key not in self.products:
            sizes = Sizes.on(self.layout, self.arrangement.at(0, 0), never_waits=True)
            self.products[key] = least_time(sizes, self.chip)
        return self.products[key]

    def parameter_time(self, number: int, remat: int) -> float:
        """Return seconds that a plan waits for its parameters at least."""
        key = self.arrangement.numbers[number], self.arrangement.remats[remat]
        if key not in self.unhidden:
            sizes = self._sizes(number, remat)
            self.unhidden[key] = self.parameters(sizes).unhidden(sizes, self.chip)
        return self.unhidden[key]

    def _sizes(self, number: int, remat: int) -> Sizes:
        return Sizes.on(self.layout, self.arrangement.at(number, remat))


@dataclasses.dataclass
class _BestFirstSearch:
    """State of one search."""

    chip: Chip
    factors: Factors
    flops: TokenFlops
    states: dict[tuple[Any, ...], TrainState] = dataclasses.field(default_factory=dict)
    moments: dict[str, int] | None = None
    """Result of `_moments`, the same for all plans; None until it is needed."""
    layouts: dict[tuple[Hashable, ...], DeviceLayout] = dataclasses.field(default_factory=dict)
    products: dict[Hashable, _Seconds] = dataclasses.field(default_factory=dict)
    unhidden: dict[Hashable, _Seconds] = dataclasses.field(default_factory=dict)
    parameters: dict[Hashable, ParameterSeconds] = dataclasses.field(default_factory=dict)

    def layout(self, plan: StepPlan) -> DeviceLayout:
        """Return the layout of a plan, which plans share that differ in nothing that it reads."""
        key = DeviceLayout.record(plan.execution)
        if key not in self.layouts:
            self.layouts[key] = DeviceLayout(plan=plan, flops=self.flops)
        return self.layouts[key]

    def sizes(self, plan: StepPlan) -> Sizes:
        """Return the sizes of a plan."""
        return Sizes.on(self.layout(plan), plan)

    def bounds(self, arrangement: Arrangement) -> _LeastTimes:
        """Return the bounds of an arrangement, whose numbers others share."""
        execution = arrangement.plan.execution
        layout = DeviceLayout.record(execution)
        return _LeastTimes(
            arrangement=arrangement,
            chip=self.chip,
            layout=self.layout(arrangement.plan),
            products=self.products.setdefault(arrangement.record, {}),
            unhidden=self.unhidden.setdefault((layout, execution.pipeline), {}),
            parameters=functools.partial(self._parameters_of, layout),
        )

    def _parameters_of(self, layout: Hashable, sizes: Sizes) -> ParameterSeconds:
        if layout not in self.parameters:
            self.parameters[layout] = ParameterSeconds.of(sizes, self.chip)
        return self.parameters[layout]

    def candidate(self, plan: StepPlan, time: StepTime) -> Candidate:
        """Return a plan with its memory."""
        execution = plan.execution
        key = (execution.mesh, execution.rules, execution.fold)  # what the state depends on
        if key not in self.states:
            self.states[key] = abstract_state(plan, plan.mesh)
        sizes = self.sizes(plan)
        memory = estimate_memory(plan, self.chip.platform, self.states[key], sizes)
        factor = self.factors.get(execution.remat, 1.0)
        return Candidate(plan=plan, time=time, memory=memory, factor=factor)

    def least_need(self, sizes: Sizes) -> float:
        """Return bytes that a device needs at least; no state is traced for them."""
        if self.moments is None:
            self.moments = _moments(sizes.plan)
        memory = least_memory(sizes, self.chip.platform)
        factor = self.factors.get(sizes.plan.execution.remat, 1.0)
        moments = 0
        if sizes.plan.execution.optimizer_memory == "device":
            moments = sum(sizes.parameters[path].moment * n for path, n in self.moments.items())
        return memory.arguments + moments + factor * memory.temporaries

    def may_fit(self, sizes: Sizes) -> bool:
        """Return whether a step fits, by what it needs at least."""
        return self.least_need(sizes) <= self.chip.available


def _moments(plan: StepPlan) -> dict[str, int]:
    """Return the bytes of optimiser state per value of a parameter, by its path: in arrays with the
    shape of the parameter, which are laid out as the rules of the optimiser say."""
    state = abstract_state(plan, plan.mesh)
    shapes = {row.path: row.shape for row in plan.table.trained_rows}
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]:
        keys = [str(getattr(entry, "key", "")) for entry in path]
        names = ("/".join(keys[start:]) for start in range(len(keys)))
        name = next((name for name in names if shapes.get(name) == leaf.shape), None)
        if name is not None:
            found[name] = found.get(name, 0) + leaf.dtype.itemsize
    return found


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Put the collection of cycles off: a search keeps all that it makes, which Python would go
    through again and again, for a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
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
    tables: Tables = {}
    for mesh in meshes:
        all_arrangements = list(arrangements(plan, mesh, space or Space(), fold, tables))
        dividing = [
            arrangement for arrangement in all_arrangements if isinstance(arrangement, Arrangement)
        ]
        if not dividing and all_arrangements:
            refused[mesh_in_words(mesh)] = str(all_arrangements[0])
        kept_arrangements += dividing
    searching = _BestFirstSearch(chip, factors or {}, TokenFlops.of(plan))
    fitting: list[Candidate] = []
    faster: dict[int, tuple[StepPlan, StepTime]] = {}
    for place, one, time in _by_time(kept_arrangements, searching):
        if isinstance(one, Candidate):
            fitting.append(one)
            if len(fitting) == keep:
                break
        elif not fitting:
            faster.setdefault(place, (one, time))
    fitting.sort(key=lambda one: (float(f"{one.time.step:.6g}"), one.need))
    closest = None if fitting else _closest(kept_arrangements, searching)
    return SearchResult(
        fitting=fitting,
        faster=_smallest(list(faster.values()), searching, keep) if fitting else [],
        closest=closest,
        refused=refused,
        num_meshes=len(meshes),
        num_arrangements=len(kept_arrangements),
    )


def _by_time(
    entries: Sequence[Arrangement], searching: _BestFirstSearch
) -> Iterator[tuple[int, StepPlan | Candidate, StepTime]]:
    """Yield plans with the place of their arrangement, by predicted time; those that fit with their
    memory.

    With stages more micro-batches may be faster, so that each number is a start of its own; they
    enter when the turn of what all of them take at least has come. An arrangement ends with its
    first plan that fits. One whose smallest plan needs too much at least is not gone through.
    """
    chip = searching.chip
    bounds = [searching.bounds(arrangement) for arrangement in entries]
    numbers = [range(entry.num_starts) for entry in entries]
    ranks = list(itertools.accumulate(map(len, numbers), initial=0))  # of the first start
    serial = itertools.count(ranks[-1])
    queue: list[tuple[float, int, int, int, int, StepTime | None]] = []

    def push(place: int, number: int, remat: int, rank: int) -> None:
        """Enter a plan by what it takes at least; when its turn comes what its parameters add is
        bounded, and when it comes again its time is predicted."""
        least = bounds[place].least_time(number, remat)
        heapq.heappush(queue, (least, rank, place, number, remat, None))

    for place in range(len(entries)):
        if len(numbers[place]) == 1:
            push(place, 0, 0, ranks[place])
        else:
            heapq.heappush(queue, (bounds[place].floor(), ranks[place], place, _ANY, 0, None))
    bounded: set[int] = set()  # ranks of plans whose parameters' part is in their time
    finished: set[int] = set()
    possible: set[int] = set()
    while queue:
        least, rank, place, number, remat, time = heapq.heappop(queue)
        if place in finished:
            continue
        if number == _ANY:
            for start in numbers[place]:
                push(place, start, 0, rank + start)
            continue
        if time is None and rank not in bounded:
            bounded.add(rank)
            least += bounds[place].parameter_time(number, remat)
            heapq.heappush(queue, (least, rank, place, number, remat, None))
            continue
        arrangement = entries[place]
        plan = arrangement.at(number, remat)
        sizes = searching.sizes(plan)
        if time is None:
            time = time_of(sizes, chip)
            heapq.heappush(queue, (time.step, rank, place, number, remat, time))
            continue
        if place not in possible and least_bytes(sizes) > chip.available:
            finished.add(place)
            continue
        if searching.may_fit(sizes):
            candidate = searching.candidate(plan, time)
            if candidate.excess(chip) <= 0:
                finished.add(place)
                yield place, candidate, time
                continue
        yield place, plan, time
        if place not in possible:
            if not searching.may_fit(searching.sizes(arrangement.smallest)):
                finished.add(place)
                continue
            possible.add(place)
        if remat:
            continue
        for index in range(1, len(arrangement.remats)):
            push(place, number, index, next(serial))
        if arrangement.plan.execution.mesh.stage == 1 and number + 1 < len(arrangement.numbers):
            push(place, number + 1, 0, next(serial))


def _smallest(
    plans: Sequence[tuple[StepPlan, StepTime]], searching: _BestFirstSearch, number: int
) -> list[Candidate]:
    """Return those plans that need least memory, in their order."""
    bounds = [searching.least_need(searching.sizes(plan)) for plan, _ in plans]
    smallest: list[tuple[float, int, Candidate]] = []
    for least, place in sorted(zip(bounds, range(len(plans)), strict=True)):
        if len(smallest) == number and least > smallest[-1][0]:
            break
        candidate = searching.candidate(*plans[place])
        smallest = sorted([*smallest, (candidate.need, place, candidate)], key=lambda one: one[:2])
        smallest = smallest[:number]
    return [candidate for _, _, candidate in sorted(smallest, key=lambda one: one[1])]


def _closest(entries: Sequence[Arrangement], searching: _BestFirstSearch) -> Candidate | None:
    """Return the plan that needs least memory; of equals the one with the smallest parameters."""
    all_sizes = [searching.sizes(entry.smallest) for entry in entries]
    closest: tuple[float, float, int, Candidate] | None = None
    for least, place in sorted((searching.least_need(s), i) for i, s in enumerate(all_sizes)):
        if closest is not None and least > closest[0]:
            break
        sizes = all_sizes[place]
        candidate = searching.candidate(sizes.plan, time_of(sizes, searching.chip))
        found = candidate.need, least_bytes(sizes), place, candidate
        if closest is None or found[:3] < closest[:3]:
            closest = found
    return None if closest is None else closest[-1]


def least_bytes(sizes: Sizes) -> float:
    """Return bytes that a device needs at least: parameters and their gradients.

    Args:
        sizes: Sizes of a step.
    """
    plan = sizes.plan
    width = jnp.dtype(plan.execution.precision.parameter_dtype).itemsize
    return sum(sizes.local(row) * (width + 4 * (not row.is_frozen)) for row in plan.table)
