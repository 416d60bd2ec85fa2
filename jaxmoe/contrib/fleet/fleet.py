# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State machine of several instances of one model: placements and moves. Runs nothing itself.

    fleet.submit(request, now)                      # the dispatch policy places it
    copies = fleet.balance(now)                     # moves go on; what has to be copied for them
    plan, steps = fleet.start(number, now)          # for each instance
    events = fleet.apply(number, step, results, now)
    fleet.note_copy(copy)

An engine executes steps and copies on devices, a simulator computes how long they take. All methods
belong to one thread.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.contrib.fleet.dispatch import (
    DispatchConfig,
    FleetView,
    Move,
    RequestDispatcher,
    Route,
)
from jaxmoe.contrib.fleet.dispatch.base import load
from jaxmoe.contrib.fleet.migration import Copy, Migration
from jaxmoe.contrib.fleet.moves import transfer_waiting
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching import Batching
from jaxmoe.serve.queues import queue_full
from jaxmoe.serve.requests import End, Event, Request
from jaxmoe.serve.step import EngineStep


class Fleet:
    """Requests of several instances from their placement to their end."""

    def __init__(
        self, instances: Sequence[Instance], policies: Sequence[Batching], dispatch: DispatchConfig
    ):
        """Make a fleet of instances without requests.

        Args:
            instances: Instances; a single one needs no dispatch policy and asks none.
            policies: Batching policy of each.
            dispatch: Which of them serves a request, and what moves.

        Raises:
            ValueError: The dispatch policy needs other instances.
        """
        self.instances, self._policies = tuple(instances), tuple(policies)
        self._dispatcher, self.roles = dispatch.build(), dispatch.roles(len(instances))
        self._has_moves = type(self._dispatcher).rebalance is not RequestDispatcher.rebalance
        self.num_open = len(instances)
        """Instances that take requests, the first ones; the others only end what they have."""
        self.offered: collections.OrderedDict[int, tuple[Request, float]]
        self.offered = collections.OrderedDict()
        """Requests that the policy has not placed so far and the times they came."""
        self.bandwidth = math.inf
        """Bytes per second of the link of an instance; infinite if not known."""
        self.links_free = [0.0] * len(instances)
        """Time from which on the link of each instance is free."""
        self._targets: dict[int, int] = {}
        self._moves: dict[int, Migration] = {}
        self.num_moves = 0
        """Moves that have begun, those of waiting requests included."""
        self.num_aborted = 0
        """Moves that were taken back."""
        self.pages_copied = [0] * len(instances)
        """Pages that travelled from each instance to another."""
        self.most_paused = 0
        """Pages at most that a live move has copied while its sequence waited."""

    def instance_of(self, id_: int) -> Instance | None:
        """Return the instance that has a request, None if it has ended."""
        return next((i for i in self.instances if id_ in i.queues.sequences), None)

    def view(self, now: float) -> FleetView:
        """Return what a dispatch policy may see.

        Args:
            now: Seconds on the fleet's clock.
        """
        moves = tuple(migration.move for migration in self._moves.values())
        bound = collections.Counter(self._targets.values())
        bound.update(move.target for move in moves)
        return FleetView(
            now=now,
            members=tuple(migration.view(now) for migration in self.instances[: self.num_open]),
            roles=self.roles[: self.num_open],
            expected=tuple(bound[number] for number in range(self.num_open)),
            moves=moves,
            backlog=tuple(max(free - now, 0.0) for free in self.links_free[: self.num_open]),
            bandwidth=self.bandwidth,
        )

    def submit(self, request: Request, now: float) -> tuple[Event, ...]:
        """Place a request and queue it, or offer it again with each `balance`.

        Where the queue of its place is full another instance of the same role takes it.

        Args:
            request: Request.
            now: Seconds on the fleet's clock.

        Returns:
            Nothing, or the end of the stream if it is refused.
        """
        self._offer_again(now)
        route = None if self.offered else self._dispatcher.place(request, self.view(now))
        first = self.instances[0]
        refusal = first.refusal(request)
        if route is None and refusal is not None and refusal.code != "queue_full":
            return first.refuse(request, refusal)
        if route is None:
            most = first.facts.max_waiting * self.num_open
            if len(self.offered) >= most:
                return first.refuse(request, queue_full(most))
            self.offered[request.id] = (request, now)
            return ()
        return self._queue(request, now, self._with_room(route, now))

    def cancel(self, id_: int) -> tuple[Event, ...]:
        """End a request early, also one that is moving; one that has ended is ignored."""
        if self.offered.pop(id_, None) is not None:
            first = self.instances[0]
            first.queues.submitted += 1
            first.queues.ended["cancelled"] += 1
            return (End(id_, "cancelled"),)
        instance = self.instance_of(id_)
        return () if instance is None else self._note(instance.cancel(id_))

    def stop(self, id_: int) -> tuple[Event, ...]:
        """End a request whose answer is whole; one that has ended is ignored."""
        instance = self.instance_of(id_)
        return () if instance is None else self._note(instance.stop(id_))

    def balance(self, now: float) -> list[Copy]:
        """Begin the moves that the policy wants, and go on with those under way.

        Args:
            now: Seconds on the fleet's clock.

        Returns:
            Copies to execute; `note_copy` takes each that is done.
        """
        if self.num_open > 1 and self._has_moves:
            for move in self._dispatcher.rebalance(self.view(now)):
                self.move(move, is_live=True)
        self._offer_again(now)
        copies = []
        for id_, migration in [*self._moves.items()]:
            if (copy := migration.advance()) is not None:
                copies.append(copy)
            if migration.is_over:
                self.num_aborted += not migration.has_landed
                del self._moves[id_]
        return copies

    def move(self, move: Move, *, is_live: bool) -> None:
        """Begin a move: a waiting request changes its queue, a running one goes in stages.

        Args:
            move: Request, source and target.
            is_live: Whether the source goes on decoding while full pages are copied.
        """
        source = self.instances[move.source]
        target = self.instances[move.target]
        sequence = source.queues.sequences[move.id]
        is_movable = sequence.state in ("waiting", "running") and move.id not in self._moves
        is_movable = is_movable and not (sequence.state == "waiting" and sequence.num_pending)
        if not is_movable or source is target:
            return
        self.num_moves += 1
        if sequence.state == "waiting":
            transfer_waiting(source, target, move.id)
        else:
            self._moves[move.id] = Migration(move, source, target, is_live=is_live)

    def is_current(self, copy: Copy) -> bool:
        """Return whether the move of a copy still goes on; its pages are not the move's else."""
        migration = self._moves.get(copy.move.id)
        return migration is not None and migration.copy is copy

    def note_copy(self, copy: Copy) -> None:
        """Take a copy that is done; that of a move which was taken back is ignored.

        Args:
            copy: Copy of `balance`.
        """
        self.pages_copied[copy.move.source] += len(copy.pages)
        if not self.is_current(copy):
            return
        migration = self._moves[copy.move.id]
        migration.note_copy()
        if migration.is_live and copy.is_paused:
            self.most_paused = max(self.most_paused, len(copy.pages))

    def abort(self, id_: int) -> None:
        """Take a move back; a sequence that does not move is left alone.

        Args:
            id_: Sequence; it runs on at the source.
        """
        migration = self._moves.pop(id_, None)
        if migration is not None:
            migration.abort()
            self.num_aborted += 1

    def start(self, number: int, now: float) -> tuple[Plan, tuple[EngineStep, ...]]:
        """Start what the policy of an instance wants, if another step may start.

        Args:
            number: Instance.
            now: Seconds on the fleet's clock.

        Returns:
            The plan, and steps to be executed and then given to `apply`.
        """
        instance = self.instances[number]
        plan, steps = instance.next_steps(self._policies[number], now)
        for step in steps if self._targets else ():
            for work in step.works if step.is_foreseen else ():
                if work.draws and work.id in self._targets:  # no further step computes it here
                    instance.queues.sequences[work.id].is_leaving = True
        return plan, steps

    def apply(
        self, number: int, step: EngineStep, results: Mapping[int, Any], now: float
    ) -> tuple[Event, ...]:
        """Take over what a step computed; sequences with a first token are handed over.

        Args:
            number: Instance.
            step: Step of `start`.
            results: What the executor has returned, by request.
            now: Seconds on the fleet's clock.

        Returns:
            New tokens and ended streams.
        """
        instance = self.instances[number]
        sequences = instance.queues.sequences
        live = {id_: sequences[id_] for id_ in results if id_ in sequences}
        events = self._note(instance.apply(step, results, now))
        for event in events:
            if isinstance(event, End) and event.reason in ("stop", "length"):
                if not self._dispatcher.keeps(live[event.id], instance.view(now)):
                    instance.pool.demote(live[event.id].names())
        for work in step.works if self._targets else ():
            id_ = work.id
            is_running = id_ in results and id_ in instance.queues.running
            if work.draws and is_running and id_ in self._targets:
                self.move(Move(id_, number, self._targets.pop(id_)), is_live=False)
                if id_ not in self._moves:
                    live[id_].is_leaving = False
        return events

    def fail(self, number: int, message: str) -> tuple[Event, ...]:
        """End the requests of an instance after a step that failed, and the moves to it.

        Args:
            number: Instance.
            message: Reason for the clients.
        """
        for id_, migration in [*self._moves.items()]:
            if number in (migration.move.source, migration.move.target):
                self.abort(id_)
        return self._note(self.instances[number].fail(message))

    def check_pages(self) -> None:
        """Assert the invariants of all pools, and that no request was lost or is in two places.

        Raises:
            AssertionError: An invariant does not hold.
        """
        places = collections.Counter(id_ for i in self.instances for id_ in i.queues.sequences)
        assert all(count == 1 for count in places.values()), places
        for instance in self.instances:
            instance.check()
            instance.check_pages()

    def _offer_again(self, now: float) -> None:
        """Queue requests, the oldest first, until the policy has no place for one."""
        while self.offered:
            request, arrived = next(iter(self.offered.values()))
            route = self._dispatcher.place(request, self.view(now))
            route = None if route is None else self._with_room(route, now)
            if route is None or self.instances[route.prefill].refusal(request) is not None:
                return
            del self.offered[request.id]
            self._queue(request, arrived, route)

    def _with_room(self, route: Route, now: float) -> Route:
        """Return a route, by the least loaded instance of the role where a queue is full."""

        def has_room(number: int) -> bool:
            instance = self.instances[number]
            return len(instance.queues.waiting) < instance.facts.max_waiting

        if has_room(route.prefill):
            return route
        role = self.roles[route.prefill]
        numbers = [n for n in range(self.num_open) if self.roles[n] == role and has_room(n)]
        if not numbers:
            return route
        number = min(numbers, key=lambda n: (load(self.instances[n].view(now)), n))
        return dataclasses.replace(route, prefill=number)

    def _queue(self, request: Request, arrived: float, route: Route) -> tuple[Event, ...]:
        events = self.instances[route.prefill].submit(request, arrived)
        if not events and route.decode is not None and route.decode != route.prefill:
            self._targets[request.id] = route.decode
        return events

    def _note(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        for event in events:
            if isinstance(event, End):
                self._targets.pop(event.id, None)
                self.abort(event.id)
        return events
