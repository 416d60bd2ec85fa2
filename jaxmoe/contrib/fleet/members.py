# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes the steps and copies of a fleet, a thread for each executor."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from jaxmoe.contrib.fleet.autoscaling import EngineScaling
from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.migration import Copy
from jaxmoe.contrib.fleet.resharding import Layouts, Resharder
from jaxmoe.serve.backend import Executor
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.members import FleetMember, Members, Post, Publish
from jaxmoe.serve.metrics import EngineMetrics
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.requests import Event, Request
from jaxmoe.serve.step import EngineStep

logger = logging.getLogger(__name__)


@runtime_checkable
class PageMover(Protocol):
    """What a dispatch policy that moves sequences needs of the executors beside."""

    def read_pages(self, pages: Sequence[int]) -> Any:
        """Return the content of some pages, in host memory."""
        ...

    def write_pages(self, pages: Sequence[int], host_pages: Any) -> None:
        """Write what `read_pages` of another executor has returned."""
        ...


def check_equal(all_facts: Sequence[Facts]) -> None:
    """Raise if instances differ in their sizes: requests move between them.

    Args:
        all_facts: Facts of each instance.

    Raises:
        ValueError: Names the size and both values.
    """
    for number, facts in enumerate(all_facts):
        for field in dataclasses.fields(Facts):
            first_value = getattr(all_facts[0], field.name)
            value = getattr(facts, field.name)
            if field.name != "cost" and first_value != value:
                raise ValueError(
                    f"executors: {field.name}={value} of executor {number} differs from"
                    f" {first_value} of"
                    " the first, and requests move between them: give all equal sizes"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FleetParts:
    """What a fleet is made of."""

    executors: Sequence[Executor]
    """Executor of each instance, all with the same model."""
    fleet: FleetConfig
    """Placement of requests, and scaling."""
    hardware: Any = None
    """Times of a step for the scaling policy; None if they are not known."""
    layouts: Layouts | None = None
    """Meshes that instances may have; None keeps them."""


class FleetMembers(Members):
    """A fleet with its executors."""

    def __init__(
        self,
        parts: FleetParts,
        config: InstancesConfig,
        *,
        clock: Callable[[], float],
        post: Post,
        publish: Publish,
        exchange: Callable[[Any, int], Future[Any]],
    ):
        """Make the instances, and a thread for each executor.

        Args:
            parts: Executors, and what places and scales.
            config: Queue, and what an instance computes.
            clock: Seconds for the policies.
            post: Runs a function later in the thread that owns the fleet.
            publish: Takes new tokens and ended streams.
            exchange: Lets an instance go on with another executor.

        Raises:
            ValueError: A policy needs what an executor lacks, or other instances, or executors
                differ in their sizes.
        """
        fleet = parts.fleet
        super().__init__(parts.executors, config, clock=clock, post=post, publish=publish)
        for executor in parts.executors:
            fleet.dispatch.check(has_moves=isinstance(executor, PageMover))
        instances = [member.instance for member in self.all]
        check_equal([instance.facts for instance in instances])
        self.fleet = Fleet(instances, [member.policy for member in self.all], fleet.dispatch)
        self.resharder = Resharder(
            parts.layouts, lambda: [member.executor for member in self.all], exchange
        )
        self.scaling = EngineScaling(
            self.fleet,
            fleet.scaling,
            hardware=parts.hardware,
            resharder=self.resharder,
            has_layouts=parts.layouts is not None,
            clock=clock,
            post=post,
        )

    @property
    def num_offered(self) -> int:
        """Requests that no instance has taken yet."""
        return len(self.fleet.offered)

    @property
    def num_places(self) -> int:
        """Requests that may still be queued, by the instances that take some, or offered."""
        most = [member.instance.facts.max_waiting for member in self.all[: self.fleet.num_open]]
        waiting = [len(member.instance.queues.waiting) for member in self.all[: len(most)]]
        return sum(most) - max(sum(waiting), self.num_offered)

    def submit(self, request: Request) -> tuple[Event, ...]:
        """Place a request; return nothing, or the end of its stream if it is refused."""
        self.scaling.arrive(request)
        return self.fleet.submit(request, self._clock())

    def has(self, id_: int) -> bool:
        """Return whether a request is offered, queued or running."""
        return id_ in self.fleet.offered or self.fleet.instance_of(id_) is not None

    def cancel(self, id_: int) -> tuple[Event, ...]:
        """End a request early, also one that is moving; one that has ended is ignored."""
        return self.fleet.cancel(id_)

    def stop(self, id_: int) -> tuple[Event, ...]:
        """End a request whose answer is whole; one that has ended is ignored."""
        return self.fleet.stop(id_)

    def turn(self, note: Callable[[Instance, EngineStep], None]) -> float | None:
        """Let moves go on and start what the policies want.

        Returns:
            Seconds until the next turn if nothing happens before; None waits for ever.
        """
        wakes = [self.scaling.turn()]
        for copy in self.fleet.balance(self._clock()):
            self._copy(copy)
        wakes.append(super().turn(note))
        return min((wake for wake in wakes if wake is not None), default=None)

    def exchange(self, number: int, executor: Any, done: Future[Any]) -> None:
        """Let another executor take over the pages of an instance, after the step that runs.

        Args:
            number: Instance.
            executor: Executor with a method `adopt`.
            done: Gets what that method returns, or raises.
        """
        if not done.set_running_or_notify_cancel():
            return
        member = self.all[number]
        adopting = member.thread.submit(lambda: executor.adopt(member.executor))
        if (error := adopting.exception()) is not None:
            done.set_exception(error)
            return
        member.executor = executor
        done.set_result(adopting.result())

    def close(self) -> None:
        """End the threads."""
        self.resharder.close()
        super().close()

    def _metrics(self, member: FleetMember) -> EngineMetrics:
        metrics = super()._metrics(member)
        return dataclasses.replace(metrics, pages_moved=self.fleet.pages_copied[member.number])

    def _plan(self, member: FleetMember) -> tuple[Plan, tuple[EngineStep, ...]]:
        return self.fleet.start(member.number, self._clock())

    def _apply(self, member: FleetMember, step: EngineStep, results: Any) -> tuple[Event, ...]:
        return self.fleet.apply(member.number, step, results, self._clock())

    def _ends(self, member: FleetMember, message: str) -> tuple[Event, ...]:
        return self.fleet.fail(member.number, message)

    def _copy(self, copy: Copy) -> None:
        """Read pages of the source and write them to the target, unless the move has ended."""
        source = self.all[copy.move.source]
        target = self.all[copy.move.target]

        def write(done: Future[Any]) -> None:
            if not self.fleet.is_current(copy):
                return
            if (error := done.exception()) is not None:
                logger.warning(
                    "request %d stays at instance %d, whose pages cannot be read: %s",
                    copy.move.id,
                    copy.move.source,
                    error,
                )
                self.fleet.abort(copy.move.id)
            else:
                host_pages = done.result()
                self._call(target, target.executor.write_pages, copy.to, host_pages, then=finish)

        def finish(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                self._fail(target, f"a move failed: {type(error).__name__}: {error}")
                return
            self.fleet.note_copy(copy)

        self._call(source, source.executor.read_pages, copy.pages, then=write)
