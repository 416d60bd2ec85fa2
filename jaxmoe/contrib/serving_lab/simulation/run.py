# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a workload on simulated instances: events in the order of their time.

The instances, the rules and the policies are those of the engine; only the time of a step comes
from a cost model, and the tokens from the workload.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxmoe.contrib.fleet.dispatch import DispatchConfig, LeastLoadedDispatchConfig, Role
from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.migration import Copy
from jaxmoe.contrib.fleet.scaling import FixedScalingConfig, ScalingConfig
from jaxmoe.contrib.serving_lab.layers import layers_of
from jaxmoe.contrib.serving_lab.shares import LanesInstance, LaneStep
from jaxmoe.contrib.serving_lab.simulation.answers import AnswerTimes
from jaxmoe.contrib.serving_lab.simulation.cost import Roofline
from jaxmoe.contrib.serving_lab.simulation.power import PowerMeter
from jaxmoe.contrib.serving_lab.simulation.scaled import SimulatedScaling
from jaxmoe.contrib.serving_lab.simulation.workload import Arrival
from jaxmoe.serve.facts import Facts, WorkPart
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching import BatchingConfig
from jaxmoe.serve.policies.retention import RetentionConfig
from jaxmoe.serve.requests import End, Event
from jaxmoe.serve.sequence import Sequence as ServedSequence
from jaxmoe.serve.step import EngineStep


class Simulation:
    """A fleet of equal instances that serves one workload.

    A request is forgotten when it has ended: `answers` has the times of its answer.

    Args:
        arrivals: Workload. Of an iterator, such as `Workload.stream`, a request is read when it is
            the next to come, so that those that have not come take no memory; it yields them in the
            order of time, and later turns behind the turn before. A sequence may have any order.
        facts: Properties of an instance.
        batching: Policy of every instance.
        cost: Cost of a step on one device of a kind.
        num_instances: Instances at the start.
        dispatch: Policy that gives each request its instance.
        retention: What becomes of pages that are lacking.
        scaling: Policy that changes the number of instances.
        keeps_plans: Whether `plans` has the plan of every step; they take more memory than
            everything else.
        keeps_sequences: Whether `sequences` has the sequences that have ended, with their tokens.

    Raises:
        ValueError: The batching policy needs what the facts do not have.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        facts: Facts,
        batching: BatchingConfig,
        cost: Roofline,
        *,
        num_instances: int = 1,
        dispatch: DispatchConfig | None = None,
        retention: RetentionConfig | None = None,
        scaling: ScalingConfig | None = None,
        keeps_plans: bool = False,
        keeps_sequences: bool = False,
    ):
        batching.check(facts)
        # A simulated host takes no time, so that a step ahead would save none.
        facts = dataclasses.replace(facts, kv_bytes=float(cost.sizes.kv_bytes), steps_ahead=0)
        if retention is not None:
            facts = retention.facts(facts)
        if "partitions" in batching.needs:
            facts = dataclasses.replace(facts, steps_at_once=2)
        dispatch = dispatch or LeastLoadedDispatchConfig()
        self.now = 0.0
        self.plans: list[tuple[int, Plan]] = []
        """Plans with work, and the instance of each, if `keeps_plans`."""
        self._keeps_plans = keeps_plans
        self._keeps_sequences = keeps_sequences
        self.answers = AnswerTimes()
        """Times of the whole answers."""
        self.sequences: dict[int, ServedSequence] = {}
        """Sequences that have a whole answer, by request, if `keeps_sequences`."""
        self.refused = 0
        self.expert_bytes = 0.0
        self.num_copies = 0
        """Copies between device and host memory."""
        self.bytes_swapped = 0.0
        self.busy_seconds = [0.0] * num_instances
        self._cost, self.meter = cost, PowerMeter()
        self.fleet = Fleet(
            [LanesInstance(facts, batching.name, has_tokens=False) for _ in range(num_instances)],
            [batching.build(facts) for _ in range(num_instances)],
            dispatch,
        )
        self.fleet.bandwidth = cost.chip.far_bandwidth
        self.scaling = SimulatedScaling(
            self.fleet, cost, scaling or FixedScalingConfig(), self.meter
        )
        self._is_stream = not isinstance(arrivals, Sequence)
        self._unread = _in_order(arrivals) if isinstance(arrivals, Sequence) else iter(arrivals)
        self._next: Arrival | None = None
        self._live: dict[int, Arrival] = {}
        """Requests that were read and have not ended."""
        self._followers: dict[int, list[Arrival]] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._read()
        self._decide_later(0.0)

    def run(self) -> Simulation:
        """Serve all requests.

        Raises:
            RuntimeError: A policy leaves requests waiting for ever.
        """
        self._come_next()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            for copy in self.fleet.balance(self.now):
                self._at(self.now + self._travel(copy), lambda c=copy: self.fleet.note_copy(c))
            for number in range(len(self.fleet.instances)):
                self._kick(number)
            self.scaling.switch_off(self.now)
        num_left = sum(len(i.queues.sequences) for i in self.fleet.instances) + len(
            self.fleet.offered
        )
        if num_left:
            name = self.fleet.instances[0].policy
            raise RuntimeError(f"policy {name!r} left {num_left} requests unserved")
        return self

    @property
    def seconds_of_roles(self) -> dict[Role, float]:
        """Seconds of work of the instances of each role."""
        seconds_by_role: dict[Role, float] = {}
        for role, seconds in zip(self.fleet.roles, self.busy_seconds, strict=True):
            seconds_by_role[role] = seconds_by_role.get(role, 0.0) + seconds
        return seconds_by_role

    @property
    def num_moves(self) -> int:
        """Moves between instances that have begun."""
        return self.fleet.num_moves

    @property
    def num_preempted(self) -> int:
        """Preemptions of all instances."""
        return sum(instance.num_preempted for instance in self.fleet.instances)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were taken from the pool."""
        return sum(instance.num_cached for instance in self.fleet.instances)

    @property
    def num_computed(self) -> int:
        """Tokens that were computed."""
        return sum(instance.num_computed for instance in self.fleet.instances)

    def _read(self) -> None:
        """Read the next request that comes at a time of its own, and the turns before it.

        Raises:
            ValueError: A stream is not in order.
        """
        before = self._next
        self._next = None
        for arrival in self._unread:
            id_ = arrival.request.id
            if self._is_stream and arrival.after is not None and arrival.after not in self._live:
                raise ValueError(
                    f"request {id_} of the stream comes after request {arrival.after}, which is not"
                    " there or has ended: yield a later turn right behind the turn before"
                )
            if id_ in self._live:
                raise ValueError(f"request {id_} is there twice: give each request its own id")
            self._live[id_] = arrival
            if arrival.after is not None:
                self._followers.setdefault(arrival.after, []).append(arrival)
                continue
            if before is not None and arrival.time < before.time:
                raise ValueError(
                    f"request {id_} of the stream comes at {arrival.time} s, before the one that"
                    f" was read before it, at {before.time} s: yield them in the order of time"
                )
            self._next = arrival
            return

    def _come_next(self) -> None:
        """Let the next request come in its time, before everything else at that time."""
        if (arrival := self._next) is None:
            return

        def come() -> None:
            self._read()
            self._come_next()
            self._arrive(arrival)

        heapq.heappush(self._events, (arrival.time, -1, come))

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _arrive(self, arrival: Arrival) -> None:
        self.scaling.arrive(arrival.request)
        self._note(self.fleet.submit(arrival.request, self.now), is_refused=True)

    def _decide(self) -> None:
        """Let the scaling policy decide, while there is something to serve."""
        if not self._events:
            return
        if (decision := self.scaling.decide(self.now)) is not None:
            self.scaling.switch_on(self.now, decision.instances or 0)
            end = self.now + decision.delay
            self._at(end, lambda: self.scaling.change(self.now, decision))
        self._decide_later(self.now)

    def _decide_later(self, now: float) -> None:
        if math.isfinite(self.scaling.interval):
            self._at(now + self.scaling.interval, self._decide)

    def _kick(self, number: int) -> None:
        """Start what the policy wants of an instance, if another step may start."""
        plan, steps = self.fleet.start(number, self.now)
        if self._keeps_plans and plan.num_tokens:
            self.plans.append((number, plan))
        for step in steps:
            parts = [WorkPart(1, work.start) for work in step.singles]
            parts += [WorkPart(len(w.tokens), w.start, layers_of(w)) for w in step.pieces]
            assert isinstance(step, LaneStep)  # as instances of the simulator make them
            model = self.scaling.costs[number]
            cost = model.cost(parts, share=step.share, nano_batches=step.nano_batches)
            transfer = self._swap(step)
            self.meter.change(self.now, cost.watts)
            self.expert_bytes += cost.expert_bytes
            self.busy_seconds[number] += cost.seconds
            off = self.now + cost.seconds
            self._at(off, lambda watts=cost.watts: self.meter.change(self.now, -watts))
            end = off + transfer
            self._at(end, lambda n=number, s=step: self._end(n, s))
        if plan.wake is not None and plan.wake > self.now:
            self._at(plan.wake, lambda: None)

    def _end(self, number: int, step: EngineStep) -> None:
        instance = self.fleet.instances[number]
        works = (*step.singles, *step.pieces)
        running = instance.queues.running.copy()
        requests = self._live
        results = {work.id: requests[work.id].answer[work.index] for work in works if work.draws}
        events = self.fleet.apply(number, step, results, self.now)
        self._note(events)
        for event in events:
            if isinstance(event, End):
                self.answers.add(running[event.id])
                if self._keeps_sequences:
                    self.sequences[event.id] = running[event.id]

    def _note(self, events: Sequence[Event], *, is_refused: bool = False) -> None:
        for event in events:
            if isinstance(event, End):
                self.refused += is_refused
                del self._live[event.id]
                for later in self._followers.pop(event.id, ()):
                    self._at(self.now + later.time, lambda a=later: self._arrive(a))

    def _swap(self, step: EngineStep) -> float:
        """Return the seconds of the copies between device and host memory."""
        chip = self._cost.chip
        size = self._cost.sizes.kv_bytes
        swaps = (*step.out, *step.back)
        if not swaps:
            return 0.0
        page = self.fleet.instances[0].facts.page_size
        moved = sum(swap.num_tokens - swap.kept * page for swap in swaps) * size
        copies = sum(swap.num_runs for swap in swaps)
        self.num_copies += copies
        self.bytes_swapped += moved
        return copies * chip.link_latency + moved / chip.host_bandwidth

    def _travel(self, copy: Copy) -> float:
        """Return the seconds of a copy over the slow link, which sends one after the other."""
        instance = self.fleet.instances[copy.move.source]
        chip = self._cost.chip
        sequence = instance.queues.sequences[copy.move.id]
        first = sequence.pages.index(copy.pages[0]) * sequence.page_size
        tokens = min(len(copy.pages) * sequence.page_size, sequence.computed - first)
        seconds = tokens * self._cost.sizes.kv_bytes / chip.far_bandwidth
        free = self.fleet.links_free
        source = copy.move.source
        free[source] = max(free[source], self.now) + seconds
        return free[source] - self.now + chip.link_latency


def _in_order(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Yield the later turns, then the requests that come at a time of their own, by time."""
    yield from (arrival for arrival in arrivals if arrival.after is not None)
    firsts = (arrival for arrival in arrivals if arrival.after is None)
    yield from sorted(firsts, key=lambda arrival: arrival.time)
