# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes the steps of an engine's instance in a thread of its executor, which keeps their order.

Results come back through `post`, which runs a function in the thread of the engine. Where the
executor can launch a step before the last one has ended, the threads do

    engine      plan 1, plan 2                    apply 1, plan 3          apply 2, plan 4
    executor    launch 1, launch 2, collect 1 ... launch 3, collect 2 ...  launch 4, collect 3 ...
    device      1 ............................... 2 ...................... 3 .................

so that the device has the next step when one ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxmoe.serve.backend import AheadExecutor, Executor
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.metrics import EngineMetrics, Meter
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching import Batching
from jaxmoe.serve.requests import Event, Refusal, Request, Token
from jaxmoe.serve.step import EngineStep

_THREAD = "jaxmoe-engine-executor"


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class FleetMember:
    """One instance with what plans, executes and counts its steps."""

    number: int
    """Place in the engine."""
    instance: Instance
    policy: Batching
    """Plans the steps."""
    executor: Any
    thread: ThreadPoolExecutor
    """The one thread that calls the executor, in the order of the calls."""
    launched: list[tuple[EngineStep, Callable[[], dict[int, Any]]]] = dataclasses.field(
        default_factory=list
    )
    """Steps that were launched, and what collects them."""
    meter: Meter = dataclasses.field(default_factory=Meter)
    metrics: EngineMetrics = EngineMetrics()
    """Numbers after the last step."""

    @classmethod
    def of(cls, number: int, executor: Executor, config: InstancesConfig) -> FleetMember:
        """Return an instance of an executor, without requests.

        Args:
            number: Place in the engine.
            executor: Computes its steps.
            config: Queue, and what the instance computes.
        """
        instance = config.instance(executor.facts(max_waiting=config.max_waiting))
        return cls(
            number=number,
            instance=instance,
            policy=config.policy(instance.facts),
            executor=executor,
            thread=ThreadPoolExecutor(1, thread_name_prefix=_THREAD),
        )


Post = Callable[[Callable[[], object]], None]
"""Runs a function later in the thread of the engine."""
Publish = Callable[[Iterable[Event], FleetMember], None]
"""Takes the events of an instance."""


class Members:
    """The instances of an engine; all methods belong to one thread.

    Here there is one; `jaxmoe.contrib.fleet` places requests on several.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        config: InstancesConfig,
        *,
        clock: Callable[[], float],
        post: Post,
        publish: Publish,
    ):
        """Make an instance, and a thread, for each executor.

        Args:
            executors: Executor of each instance, all with the same model.
            config: Queue, and what an instance computes.
            clock: Seconds for the policies.
            post: Runs a function later in the thread of the engine.
            publish: Takes new tokens and ended streams.

        Raises:
            ValueError: A policy needs what an executor lacks.
        """
        self.all = [
            FleetMember.of(number, executor, config) for number, executor in enumerate(executors)
        ]
        self.num_flying = 0
        """Calls of executors that have not ended."""
        self._clock = clock
        self._post = post
        self._publish = publish

    @property
    def num_offered(self) -> int:
        """Requests that no instance has taken yet."""
        return 0

    @property
    def num_places(self) -> int:
        """Requests that may still be queued."""
        return sum(
            member.instance.facts.max_waiting - len(member.instance.queues.waiting)
            for member in self.all
        )

    @property
    def most_places(self) -> int:
        """Requests that may be queued at the same time."""
        return sum(member.instance.facts.max_waiting for member in self.all)

    def refuse(self, request: Request, refusal: Refusal) -> tuple[Event, ...]:
        """Count a request that is not queued, and return the end of its stream."""
        return self.all[0].instance.refuse(request, refusal)

    def submit(self, request: Request) -> tuple[Event, ...]:
        """Queue a request; return nothing, or the end of its stream if it is refused."""
        return self.all[0].instance.submit(request, self._clock())

    def has(self, id_: int) -> bool:
        """Return whether a request is queued or running."""
        return id_ in self.all[0].instance.queues.sequences

    def cancel(self, id_: int) -> tuple[Event, ...]:
        """End a request early; one that has ended is ignored."""
        return self.all[0].instance.cancel(id_)

    def stop(self, id_: int) -> tuple[Event, ...]:
        """End a request whose answer is whole; one that has ended is ignored."""
        return self.all[0].instance.stop(id_)

    def turn(self, note: Callable[[Instance, EngineStep], None]) -> float | None:
        """Start what the policies want.

        Args:
            note: Called with each step that starts.

        Returns:
            Seconds until the next turn if nothing happens before; None waits for ever.
        """
        wakes = (self._start(member, note) for member in self.all)
        return min((wake for wake in wakes if wake is not None), default=None)

    def measure(self, *members: FleetMember) -> None:
        """Renew the numbers of some instances, or of all."""
        for member in members or self.all:
            member.metrics = self._metrics(member)

    def close(self) -> None:
        """End the threads."""
        for member in self.all:
            member.thread.shutdown()

    def _metrics(self, member: FleetMember) -> EngineMetrics:
        return member.meter.metrics(member.instance, time.monotonic())

    def _start(
        self, member: FleetMember, note: Callable[[Instance, EngineStep], None]
    ) -> float | None:
        plan, steps = self._plan(member)
        for step in steps:
            note(member.instance, step)
            self._execute(member, step)
        if steps and member.instance.facts.steps_ahead and member.instance.may_start:
            return 0.0  # the next one is planned while this one runs
        self._collect(member)
        if steps:
            self.measure(member)
        elif plan.admit or plan.evict or plan.restore:
            return 0.0
        # While there is a rate, the numbers are renewed until it has fallen to 0.
        waits = [1.0] if member.metrics.tokens_per_second else []
        waits += [] if plan.wake is None else [max(plan.wake - self._clock(), 0.0)]
        return min(waits, default=None)

    def _plan(self, member: FleetMember) -> tuple[Plan, tuple[EngineStep, ...]]:
        """Return what the policy of an instance wants, and the steps that start for it."""
        now = self._clock()
        return member.instance.next_steps(member.policy, now)

    def _execute(self, member: FleetMember, step: EngineStep) -> None:
        """Run a step, or launch it where others may start before it ends."""
        if not member.instance.facts.steps_ahead:
            self._call(member, member.executor.run, step, then=self._finish(member, step))
            return
        executor: AheadExecutor = member.executor
        launch = member.thread.submit(executor.launch, step)
        member.launched.append((step, lambda: executor.collect(launch.result())))

    def _collect(self, member: FleetMember) -> None:
        """Wait for the first step that was launched, unless one before it is waited for.

        The last one waits for the next launch, which would come too late behind its end.
        """
        if member.launched and len(member.launched) == len(member.instance.flying):
            step, collect = member.launched.pop(0)
            self._call(member, collect, then=self._finish(member, step))

    def _call(self, member: FleetMember, function: Any, *arguments: Any, then: Any) -> None:
        """Call a function of an executor in its thread, and then `then` with its future in ours."""

        def end(done: Future[Any]) -> None:
            self.num_flying -= 1
            then(done)

        self.num_flying += 1
        future = member.thread.submit(function, *arguments)
        future.add_done_callback(lambda done: self._post(lambda: end(done)))

    def _finish(self, member: FleetMember, step: EngineStep) -> Callable[[Future[Any]], None]:
        """Return what takes over a step; an error ends all streams of its instance."""

        def finish(done: Future[Any]) -> None:
            if all(flying is not step for flying in member.instance.flying):
                return  # another call of this executor has failed meanwhile
            if (error := done.exception()) is not None:
                self._fail(member, f"a step failed: {type(error).__name__}: {error}")
                return
            events = self._apply(member, step, done.result())
            number = sum(isinstance(event, Token) for event in events)
            member.meter.step(number, time.monotonic())
            self._publish(events, member)

        return finish

    def _apply(self, member: FleetMember, step: EngineStep, results: Any) -> tuple[Event, ...]:
        return member.instance.apply(step, results, self._clock())

    def _fail(self, member: FleetMember, message: str) -> None:
        """End all streams of an instance, which goes on with empty pages."""
        member.launched.clear()
        member.thread.submit(member.executor.reset).result()
        self._publish(self._ends(member, message), member)

    def _ends(self, member: FleetMember, message: str) -> tuple[Event, ...]:
        return member.instance.fail(message)
