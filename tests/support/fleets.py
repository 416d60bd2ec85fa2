# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a fleet on pages in plain Python, by a logical clock: every step and copy takes one tick."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxmoe.contrib.fleet.dispatch import DispatchConfig, FleetView, Move, RequestDispatcher
from jaxmoe.contrib.fleet.dispatch.base import Route
from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.layouts import Resharding
from jaxmoe.contrib.fleet.migration import Copy
from jaxmoe.serve import BATCHING, EngineStep, Facts, Instance, Request, Result
from sharding import MeshConfig
from tests.support.page_executor import PageExecutor, Streams


class PageWorker:
    """The executor on pages, as an engine takes it."""

    def __init__(self, facts: Facts):
        self.pages, self.num_read = PageExecutor(facts), 0

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance."""
        return dataclasses.replace(self.pages.facts, max_waiting=max_waiting)

    def check(self, request: Request) -> None:
        """Take every request."""

    def run(self, step: EngineStep) -> dict[int, Result]:
        """Compute a step."""
        return self.pages.run(step)

    def launch(self, step: EngineStep) -> dict[int, Result]:
        """Compute a step, before the last one is collected."""
        return self.run(step)

    def collect(self, launched: dict[int, Result]) -> dict[int, Result]:
        """Return what a step has drawn."""
        return launched

    def reset(self) -> None:
        """Begin with empty pages."""
        self.pages.memory.clear()
        self.pages.host.clear()
        self.pages.named.clear()

    def expert_load(self) -> Any:
        """Return None: there are no experts."""
        return

    def read_pages(self, pages: Sequence[int]) -> Any:
        """Return what some pages hold."""
        self.num_read += len(pages)
        size = self.pages.facts.page_size
        memory = self.pages.memory
        return [[memory.get((page, slot), -1) for slot in range(size)] for page in pages]

    def write_pages(self, pages: Sequence[int], held: Any) -> None:
        """Write what another one has read."""
        for page, tokens in zip(pages, held, strict=True):
            for slot, token in enumerate(tokens):
                self.pages.memory[page, slot] = token


class MeshedWorker(PageWorker):
    """One that another takes over from, on a mesh."""

    def __init__(self, facts: Facts, mesh: MeshConfig):
        super().__init__(facts)
        self.mesh = mesh

    def adopt(self, other: PageWorker) -> Resharding:
        """Take the pages over."""
        self.pages = other.pages
        return Resharding(weight_bytes=100, page_bytes=10, seconds=0.5)


class MeshedLayouts:
    """Meshes of up to `most` devices; `gate` holds a change until it is set."""

    def __init__(self, most: int, gate: threading.Event | None = None):
        self.most, self.gate = most, gate

    def check(self, number: int, executor: Any, mesh: MeshConfig) -> None:
        """Refuse larger meshes."""
        if math.prod(mesh.sizes) > self.most:
            raise ValueError(f"{mesh} has more than {self.most} devices")

    def laid_out(self, number: int, executor: Any, mesh: MeshConfig) -> Any:
        """Return a worker on the mesh."""
        if self.gate is not None:
            assert self.gate.wait(60)
        return MeshedWorker(executor.pages.facts, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedConfig(DispatchConfig):
    """Everything to the first instance, and given moves at given times."""

    name: ClassVar[str] = "scripted"

    moves: dict[float, Move] = dataclasses.field(default_factory=dict)
    decode: int | None = None

    def build(self) -> RequestDispatcher:
        """Return the policy."""
        return _Scripted(self)


class _Scripted(RequestDispatcher):
    def __init__(self, given: ScriptedConfig):
        self._given = given

    def place(self, request: Request, fleet: FleetView) -> Route:
        return Route(0, self._given.decode)

    def rebalance(self, fleet: FleetView) -> tuple[Move, ...]:
        move = self._given.moves.get(fleet.now)
        return () if move is None else (move,)


Hook = Callable[["Rig"], None]


def _nothing(rig: Rig) -> None:
    del rig


class Rig:
    """A fleet with its executors; `tick` is one turn of all instances."""

    def __init__(self, facts: Facts, dispatch: DispatchConfig, number: int = 2, policy: Any = None):
        policy = policy or BATCHING["split_fuse"]()
        instances = [Instance(facts) for _ in range(number)]
        self.fleet = Fleet(instances, [policy.build(facts) for _ in instances], dispatch)
        self.workers = [PageWorker(facts) for _ in instances]
        self.streams, self.now = Streams(), 0.0
        self.plans: list[tuple[int, Any]] = []
        self.copies: list[tuple[Copy, Any]] = []
        self.flying: list[tuple[int, EngineStep, dict[int, Result]]] = []
        self.started = set[int]()
        """Instances of which a step has started in the last tick."""

    def submit(self, request: Request) -> None:
        self.streams.add(self.fleet.submit(request, self.now))

    def tick(self, between: Hook = _nothing, before: Hook = _nothing) -> None:
        """End what the tick before has started, and start the next steps and copies.

        `before` is called while steps and copies are under way, `between` when they have ended.
        """
        before(self)
        for copy, held in self.copies:
            if self.fleet.is_current(copy):
                self.workers[copy.move.target].write_pages(copy.to, held)
            self.fleet.note_copy(copy)
        flying, self.flying = self.flying, []
        for place, (number, step, results) in enumerate(flying):
            is_newest = all(number != later for later, _, _ in flying[place + 1 :])
            if is_newest and number in self.started and step.is_foreseen:
                self.flying.append((number, step, results))  # the next one starts before its end
                continue
            self.streams.add(self.fleet.apply(number, step, results, self.now))
        between(self)
        self.copies = [
            (copy, self.workers[copy.move.source].read_pages(copy.pages))
            for copy in self.fleet.balance(self.now)
        ]
        self.started = set[int]()
        for number, worker in enumerate(self.workers):
            plan, steps = self.fleet.start(number, self.now)
            self.started |= {number} if steps else set()
            if plan.num_tokens:
                self.plans.append((number, plan))
            self.flying += [(number, step, worker.run(step)) for step in steps]
        self.fleet.check_pages()
        self.now += 1.0

    def serve(
        self,
        requests: Sequence[tuple[float, Request]],
        between: Hook = _nothing,
        before: Hook = _nothing,
    ) -> Rig:
        """Serve requests that arrive at given ticks, until none is left and all pages are free."""
        left = sorted(requests, key=lambda pair: pair[0])
        while left or self.flying or self.copies or self.is_busy:
            while left and left[0][0] <= self.now:
                self.submit(left.pop(0)[1])
            self.tick(between, before)
            assert self.now < 2000, "requests wait for ever"
        for instance in self.fleet.instances:
            assert instance.pool.num_free == instance.facts.num_pages and not instance.incoming
        submitted = sum(i.queues.submitted - i.queues.moved_away for i in self.fleet.instances)
        assert submitted == len(requests) == len(self.streams.ends)
        return self

    @property
    def is_busy(self) -> bool:
        is_left = bool(self.fleet._moves) or bool(self.fleet.offered)
        return is_left or any(not one.is_idle for one in self.fleet.instances)
