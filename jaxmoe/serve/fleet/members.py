# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes steps and copies of a fleet: a thread for each executor, which keeps their order.

Results come back through `post`, which runs a function in the thread that owns the fleet.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.fleet.autoscaling import EngineScaling
from jaxmoe.serve.fleet.config import InstancesConfig
from jaxmoe.serve.fleet.fleet import Fleet
from jaxmoe.serve.fleet.migration import Copy
from jaxmoe.serve.fleet.resharding import Layouts, Resharder
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.metrics import EngineMetrics, Meter
from jaxmoe.serve.requests import Event, Request, Token
from jaxmoe.serve.step import Step

logger = logging.getLogger(__name__)

_THREAD = "jaxmoe-engine-executor"


@runtime_checkable
class Executor(Protocol):
    """What an engine needs of an executor; `jaxmoe.serve.device.executor.ModelExecutor` is one."""

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the executor cannot compute a request."""
        ...

    def run(self, step: Step) -> dict[int, Any]:
        """Compute a step and return the drawn tokens by request, each a `Result`; or a `FilledRow`
        where the instance fills rows."""
        ...

    def reset(self) -> None:
        """Begin with empty pages, after a step that failed."""
        ...

    def expert_load(self) -> Any:
        """Return the tokens that each expert of each MoE layer has got [L E]; None without any."""
        ...


@runtime_checkable
class PageMover(Protocol):
    """What a dispatch policy that moves sequences needs of the executors beside."""

    def read_pages(self, pages: Sequence[int]) -> Any:
        """Return the content of some pages, in host memory."""
        ...

    def write_pages(self, pages: Sequence[int], host_pages: Any) -> None:
        """Write what `read_pages` of another executor has returned."""
        ...


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class Member:
    """One instance with what executes and counts its steps."""

    number: int
    """Place in the fleet."""
    instance: Instance
    executor: Any
    thread: ThreadPoolExecutor
    """The one thread that calls the executor, in the order of the calls."""
    meter: Meter = dataclasses.field(default_factory=Meter)
    metrics: EngineMetrics = EngineMetrics()
    """Numbers after the last step."""

    @classmethod
    def of(cls, number: int, executor: Executor, config: InstancesConfig) -> Member:
        """Return an instance of an executor, without requests.

        Args:
            number: Place in the fleet.
            executor: Computes its steps.
            config: Queue, and what the instance computes.
        """
        instance = config.instance(executor.facts(max_waiting=config.max_waiting))
        config.dispatch.check(has_moves=isinstance(executor, PageMover))
        return cls(
            number=number,
            instance=instance,
            executor=executor,
            thread=ThreadPoolExecutor(1, thread_name_prefix=_THREAD),
        )


def check_equal(all_facts: Sequence[Facts]) -> None:
    """Raise if instances differ in their sizes: requests move between them.

    Args:
        all_facts: Facts of each instance.

    Raises:
        ValueError: Names the size and both values.
    """
    for number, facts in enumerate(all_facts):
        for field in dataclasses.fields(Facts):
            first_value, value = getattr(all_facts[0], field.name), getattr(facts, field.name)
            if field.name != "cost" and first_value != value:
                raise ValueError(
                    f"executors: {field.name}={value} of executor {number} differs from"
                    f" {first_value} of"
                    " the first, and requests move between them: give all equal sizes"
                )


Publish = Callable[[Iterable[Event], Member], None]
"""Takes the events of an instance."""


class Members:
    """A fleet with its executors; all methods belong to one thread."""

    def __init__(
        self,
        executors: Sequence[Executor],
        config: InstancesConfig,
        *,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        publish: Publish,
        exchange: Callable[[Any, int], Future[Any]],
        hardware: Any = None,
        layouts: Layouts | None = None,
    ):
        """Make the instances, and a thread for each executor.

        Args:
            executors: Executor of each instance, all with the same model.
            config: Queue, batching and dispatch.
            clock: Seconds for the policies.
            post: Runs a function later in the thread that owns the fleet.
            publish: Takes new tokens and ended streams.
            exchange: Lets an instance go on with another executor.
            hardware: Times of a step for the scaling policy; None if they are not known.
            layouts: Meshes that instances may have; None keeps them.

        Raises:
            ValueError: A policy needs what an executor lacks, or other instances, or executors
                differ in their sizes.
        """
        self.all = [
            Member.of(number, executor, config) for number, executor in enumerate(executors)
        ]
        instances = [member.instance for member in self.all]
        policies = [config.policy(instance.facts) for instance in instances]
        check_equal([instance.facts for instance in instances])
        self.fleet = Fleet(instances, policies, config.dispatch)
        self.resharder = Resharder(
            layouts, lambda: [executor.executor for executor in self.all], exchange
        )
        self.scaling = EngineScaling(
            self.fleet,
            config.scaling,
            hardware=hardware,
            resharder=self.resharder,
            has_layouts=layouts is not None,
            clock=clock,
            post=post,
        )
        self.num_flying = 0
        """Calls of executors that have not ended."""
        self._clock, self._post, self._publish = clock, post, publish
        self.measure()

    def turn(self, note: Callable[[Instance, Step], None]) -> float | None:
        """Let moves go on and start what the policies want.

        Args:
            note: Called with each step that starts.

        Returns:
            Seconds until the next turn if nothing happens before; None waits for ever.
        """
        wakes = [self.scaling.turn()]
        for copy in self.fleet.balance(self._clock()):
            self._copy(copy)
        wakes += [self._start(member, note) for member in self.all]
        return min((wake for wake in wakes if wake is not None), default=None)

    def measure(self, *members: Member) -> None:
        """Renew the numbers of some instances, or of all."""
        for member in members or self.all:
            number = self.fleet.pages_copied[member.number]
            now = time.monotonic()
            member.metrics = member.meter.metrics(member.instance, now, pages_moved=number)

    @property
    def num_offered(self) -> int:
        """Requests that no instance has taken yet."""
        return len(self.fleet.offered)

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
        for member in self.all:
            member.thread.shutdown()

    def _start(self, member: Member, note: Callable[[Instance, Step], None]) -> float | None:
        plan, steps = self.fleet.start(member.number, self._clock())
        for step in steps:
            note(member.instance, step)
            self._call(member, member.executor.run, step, then=self._finish(member, step))
        if steps:
            self.measure(member)
        elif plan.admit or plan.evict or plan.restore:
            return 0.0
        # While there is a rate, the numbers are renewed until it has fallen to 0.
        initial_rates = [1.0] if member.metrics.tokens_per_second else []
        initial_rates += [] if plan.wake is None else [max(plan.wake - self._clock(), 0.0)]
        return min(initial_rates, default=None)

    def _call(self, member: Member, function: Any, *arguments: Any, then: Any) -> None:
        """Call a function of an executor in its thread, and then `then` with its future in ours."""

        def end(done: Future[Any]) -> None:
            self.num_flying -= 1
            then(done)

        self.num_flying += 1
        future = member.thread.submit(function, *arguments)
        future.add_done_callback(lambda done: self._post(lambda: end(done)))

    def _finish(self, member: Member, step: Step) -> Callable[[Future[Any]], None]:
        """Return what takes over a step; an error ends all streams of its instance."""

        def finish(done: Future[Any]) -> None:
            if member.instance.flying.get(step.number) is not step:
                return  # another lane has failed
            if (error := done.exception()) is not None:
                self._fail(member, f"a step failed: {type(error).__name__}: {error}")
                return
            events = self.fleet.apply(member.number, step, done.result(), self._clock())
            number = sum(isinstance(event, Token) for event in events)
            member.meter.step(number, time.monotonic())
            self._publish(events, member)

        return finish

    def _fail(self, member: Member, message: str) -> None:
        """End all streams of an instance, which goes on with empty pages."""
        member.thread.submit(member.executor.reset).result()
        self._publish(self.fleet.fail(member.number, message), member)

    def _copy(self, copy: Copy) -> None:
        """Read pages of the source and write them to the target, unless the move has ended."""
        source, target = self.all[copy.move.source], self.all[copy.move.target]

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
            self.fleet.copied(copy)

        self._call(source, source.executor.read_pages, copy.pages, then=write)
