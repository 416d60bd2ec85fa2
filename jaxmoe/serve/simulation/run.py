# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a workload on simulated instances: events in the order of their time.

The instances, the rules and the policies are those of the engine; only the time of a step comes
from a cost model, and the tokens from the workload.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence

from jaxmoe.serve.facts import Facts, Part
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.moves import depart, departed, receive, transfer_waiting
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching import BatchingConfig
from jaxmoe.serve.policies.dispatch import DispatchConfig, FleetView, LeastLoadedConfig
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
        self.num_moves = 0
        self.busy_seconds = [0.0] * num_instances
        self._cost = cost
        self._instances = [Instance(facts, batching.name) for _ in range(num_instances)]
        self._policies = [batching.build(facts) for _ in range(num_instances)]
        self._dispatcher, self._roles = dispatch.build(), dispatch.roles(num_instances)
        self._arrivals = {arrival.request.id: arrival for arrival in arrivals}
        self._followers: dict[int, list[Arrival]] = {}
        self._targets: dict[int, int] = {}
        self._moving: collections.Counter[int] = collections.Counter()
        self._arrived: dict[int, list[tuple[int, ServedSequence]]] = {}
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
            for move in self._dispatcher.rebalance(self._fleet()):
                self._move(move.id, move.source, move.target)
            for number in range(len(self._instances)):
                self._receive(number)
                self._kick(number)
        left = [i.queues.sequences for i in self._instances if not i.is_idle]
        if left or any(self._arrived.values()):
            name = self._instances[0].policy
            raise RuntimeError(f"policy {name!r} left {sum(map(len, left))} requests unserved")
        return self

    @property
    def num_preempted(self) -> int:
        """Preemptions of all instances."""
        return sum(instance.num_preempted for instance in self._instances)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were taken from the pool."""
        return sum(instance.num_cached for instance in self._instances)

    @property
    def num_computed(self) -> int:
        """Tokens that were computed."""
        return sum(instance.num_computed for instance in self._instances)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _fleet(self) -> FleetView:
        members = tuple(instance.view(self.now) for instance in self._instances)
        bound = collections.Counter(self._targets.values()) + self._moving
        expected = tuple(bound[number] for number in range(len(members)))
        return FleetView(now=self.now, members=members, roles=self._roles, expected=expected)

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        route = self._dispatcher.place(request, self._fleet())
        if route.decode is not None and route.decode != route.prefill:
            self._targets[request.id] = route.decode
        self._note(self._instances[route.prefill].submit(request, self.now))

    def _kick(self, number: int) -> None:
        """Start what the policy wants of an instance, if a lane is free."""
        instance = self._instances[number]
        view = instance.view(self.now)
        if instance.is_idle or not view.free_lanes:
            return
        plan = self._policies[number](view)
        if plan.lanes:
            self.plans.append((number, plan))
        for step in instance.start(plan, self.now):
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
        instance = self._instances[number]
        live = {work.id: instance.queues.sequences[work.id] for work in step.works}
        results = {
            work.id: Result(self._arrivals[work.id].answer[work.index])
            for work in step.works
            if work.draws
        }
        self._note(instance.apply(step, results, self.now), live)
        for id_ in results:
            if id_ in self._targets and id_ in instance.queues.running:
                self._move(id_, number, self._targets.pop(id_))

    def _note(self, events: Sequence[Event], live: dict[int, ServedSequence] | None = None) -> None:
        for event in events:
            if isinstance(event, End):
                if live is None:
                    self.refused += 1
                else:
                    self.sequences[event.id] = live[event.id]
                    self._targets.pop(event.id, None)
                for later in self._followers.pop(event.id, ()):
                    self._at(self.now + later.time, lambda a=later: self._arrive(a))

    def _move(self, id_: int, source: int, target: int) -> None:
        """Move a sequence; the pages of a running one travel over the slow link."""
        self.num_moves += 1
        there = self._instances[source]
        one = there.queues.sequences[id_]
        if one.state == "waiting":
            transfer_waiting(there, self._instances[target], id_)
            return
        depart(there, id_)
        size = one.computed * self._cost.sizes.kv_bytes
        seconds = self._cost.chip.link_latency + size / self._cost.chip.far_bandwidth
        pending = self._arrived.setdefault(target, [])
        self._moving[target] += 1
        self._at(self.now + seconds, lambda: pending.append((source, one)))

    def _receive(self, number: int) -> None:
        """Take in sequences whose pages have arrived, while there is room."""
        pending = self._arrived.get(number, [])
        while pending and receive(self._instances[number], pending[0][1]) is not None:
            source, one = pending.pop(0)
            self._moving[number] -= 1
            departed(self._instances[source], one.id)
