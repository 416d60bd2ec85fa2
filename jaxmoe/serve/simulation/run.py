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
from collections.abc import Callable, Sequence

from jaxmoe.serve.facts import Facts, Part
from jaxmoe.serve.fleet.fleet import Fleet
from jaxmoe.serve.fleet.migration import Copy
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching import BatchingConfig
from jaxmoe.serve.policies.dispatch import DispatchConfig, LeastLoadedConfig
from jaxmoe.serve.requests import End, Event, Result
from jaxmoe.serve.sequence import Sequence as ServedSequence
from jaxmoe.serve.simulation.cost import Roofline
from jaxmoe.serve.simulation.workload import Arrival
from jaxmoe.serve.step import Step


class Simulation:
    """A fleet of equal instances that serves one workload.

    Raises:
        ValueError: The batching policy needs what the facts do not have.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        facts: Facts,
        batching: BatchingConfig,
        cost: Roofline,
        *,
        num_instances: int = 1,
        dispatch: DispatchConfig | None = None,
    ):
        batching.check(facts)
        if not batching.traits.needs_partition:
            facts = dataclasses.replace(facts, has_partitions=False)
        dispatch = dispatch or LeastLoadedConfig()
        self.now = 0.0
        self.plans: list[tuple[int, Plan]] = []
        """Plans with work, and the instance of each."""
        self.sequences: dict[int, ServedSequence] = {}
        """Sequences that have a whole answer, by request."""
        self.refused = 0
        self.expert_bytes = 0.0
        self.busy_seconds = [0.0] * num_instances
        self._cost = cost
        self.fleet = Fleet(
            [Instance(facts, batching.name) for _ in range(num_instances)],
            [batching.build(facts) for _ in range(num_instances)],
            dispatch,
        )
        self._arrivals = {arrival.request.id: arrival for arrival in arrivals}
        self._followers: dict[int, list[Arrival]] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for arrival in arrivals:
            if arrival.after is None:
                self._at(arrival.time, lambda a=arrival: self._arrive(a))
            else:
                self._followers.setdefault(arrival.after, []).append(arrival)

    def run(self) -> Simulation:
        """Serve all requests.

        Raises:
            RuntimeError: A policy leaves requests waiting for ever.
        """
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            for copy in self.fleet.balance(self.now):
                self._at(self.now + self._travel(copy), lambda c=copy: self.fleet.copied(c))
            for number in range(len(self.fleet.instances)):
                self._kick(number)
        left = [i.queues.sequences for i in self.fleet.instances if not i.is_idle]
        if left:
            name = self.fleet.instances[0].policy
            raise RuntimeError(f"policy {name!r} left {sum(map(len, left))} requests unserved")
        return self

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

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _arrive(self, arrival: Arrival) -> None:
        self._note(self.fleet.submit(arrival.request, self.now))

    def _kick(self, number: int) -> None:
        """Start what the policy wants of an instance, if a lane is free."""
        plan, steps = self.fleet.start(number, self.now)
        if plan.lanes:
            self.plans.append((number, plan))
        for step in steps:
            parts = [Part(len(w.tokens), w.start, w.layers) for w in step.works]
            cost = self._cost.cost(parts, share=step.share, nano_batches=step.nano_batches)
            swapped = sum(swap.num_tokens for swap in (*step.out, *step.back))
            transfer = swapped * self._cost.sizes.kv_bytes / self._cost.chip.host_bandwidth
            self.expert_bytes += cost.expert_bytes
            self.busy_seconds[number] += cost.seconds
            end = self.now + cost.seconds + transfer
            self._at(end, lambda n=number, s=step: self._end(n, s))
        if plan.wake is not None and plan.wake > self.now:
            self._at(plan.wake, lambda: None)

    def _end(self, number: int, step: Step) -> None:
        instance = self.fleet.instances[number]
        live = {work.id: instance.queues.sequences[work.id] for work in step.works}
        results = {
            work.id: Result(self._arrivals[work.id].answer[work.index])
            for work in step.works
            if work.draws
        }
        self._note(self.fleet.apply(number, step, results, self.now), live)

    def _note(self, events: Sequence[Event], live: dict[int, ServedSequence] | None = None) -> None:
        for event in events:
            if isinstance(event, End):
                if live is None:
                    self.refused += 1
                else:
                    self.sequences[event.id] = live[event.id]
                for later in self._followers.pop(event.id, ()):
                    self._at(self.now + later.time, lambda a=later: self._arrive(a))

    def _travel(self, copy: Copy) -> float:
        """Return the seconds of a copy over the slow link."""
        instance, chip = self.fleet.instances[copy.move.source], self._cost.chip
        one = instance.queues.sequences[copy.move.id]
        first = one.pages.index(copy.pages[0]) * one.page_size
        tokens = min(len(copy.pages) * one.page_size, one.computed - first)
        return chip.link_latency + tokens * self._cost.sizes.kv_bytes / chip.far_bandwidth
