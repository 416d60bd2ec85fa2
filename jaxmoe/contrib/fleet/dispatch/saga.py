# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the calls of a workflow at one instance; an idle instance steals whole workflows.

Source: SAGA (arXiv:2605.00528), our reading. The calls of a workflow (a session)
share a growing beginning, so that a later one goes where the earlier ones are cached. An instance
at rest takes a workflow of which all calls wait elsewhere, if it computes them from nothing before
the other one is through; later calls follow it. While a tool runs no call is there: the pages of a
workflow stay in their order of use iff

    P(another call comes) x seconds to compute them again > rent x share of all pages x mean pause

and are the first to be taken for others else. P and pause are counted as calls come and end. The
rent of all pages is a field. At its default it acts where pauses are long beside few pages, and
need not gain: P and pause are those of all workflows together, so that it tells them apart by their
lengths alone. Of 18 simulated workloads of sessions (200 to 450 pages, pauses of 2 to 10 s) it
acted in 3, with 1.23, 0.97 and 0.87 times the cached tokens. `caches/` has Belady's bound for the
same uses.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    Move,
    RequestDispatcher,
    Route,
    is_at_rest,
    load,
    wait,
)
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.requests import Request
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView

_MOST = 100_000
"""Workflows that are remembered, those with the latest calls."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SagaConfig(DispatchConfig):
    """One instance for all calls of a workflow."""

    name: ClassVar[str] = "saga"

    rent: float = 0.01
    """Seconds of computing that all pages of an instance together are worth to others in each
    second of a pause; 0 keeps the pages of all workflows."""

    def __post_init__(self) -> None:
        if not self.rent >= 0:
            raise ValueError(f"dispatch.rent={self.rent} must be 0 (keep all pages) or more")

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return Saga(self.rent)


class Saga(RequestDispatcher):
    """Homes of workflows, and how often and how soon they return."""

    def __init__(self, rent: float):
        self._rent = rent
        self._homes: dict[str, int] = {}
        self._paused: dict[str, float] = {}
        self._ended = self._returned = 0
        self._pauses = 0.0

    def place(self, request: Request, fleet: FleetView) -> Route:
        """Return the home of the workflow; the least loaded instance for a new one."""
        if request.session in self._paused:
            self._returned += 1
            self._pauses += fleet.now - self._paused.pop(request.session)
        numbers = range(len(fleet.members))
        home = self._homes.get(request.session)
        if home is None or home >= len(fleet.members):
            home = min(numbers, key=lambda i: (load(fleet.members[i]), i))  # also after a drain
        if request.session:
            self._homes.pop(request.session, None)
            self._homes[request.session] = home  # the last one now
            if len(self._homes) > _MOST:
                oldest = next(iter(self._homes))
                del self._homes[oldest]
                self._paused.pop(oldest, None)
        return Route(home)

    def rebalance(self, fleet: FleetView) -> tuple[Move, ...]:
        """Let an instance at rest steal the workflow that waits longest at the busiest one."""
        thief = next((i for i, view in enumerate(fleet.members) if is_at_rest(view)), None)
        if thief is None:
            return ()
        busiest = max(range(len(fleet.members)), key=lambda i: (load(fleet.members[i]), -i))
        view = fleet.members[busiest]
        workflows = {workflow(sequence) for sequence in (*view.running, *view.busy, *view.swapped)}
        free = [sequence for sequence in view.waiting if workflow(sequence) not in workflows]
        if not free or not workflows:
            return ()
        stolen = [sequence for sequence in free if workflow(sequence) == workflow(free[0])]
        if wait(fleet.members[thief], sum(sequence.left for sequence in stolen)) >= wait(view):
            return ()
        if free[0].request.session:
            self._homes[free[0].request.session] = thief
        return tuple(Move(sequence.id, busiest, thief) for sequence in stolen)

    def keeps(self, sequence: Sequence, view: InstanceView) -> bool:
        """Return whether the pages of a call that has ended are worth their rent."""
        if not sequence.request.session:
            return True
        self._ended += 1
        if sequence.request.session in self._homes:
            self._paused[sequence.request.session] = view.now
        probability = (self._returned + 1) / (self._ended + 1)
        pause = self._pauses / max(self._returned, 1)
        return self.is_worth(view, len(sequence.tokens), probability, pause)

    def is_worth(self, view: InstanceView, tokens: int, probability: float, pause: float) -> bool:
        """Return whether computing some tokens again is expected to cost more than their pages.

        Args:
            view: Instance; without a model of the time of a step every page is worth its rent.
            tokens: Tokens in the pages.
            probability: Probability that they are used again.
            pause: Expected seconds until then.
        """
        if view.facts.cost is None:
            return True
        again = view.facts.cost.seconds([WorkPart(tokens)])
        share = tokens / view.facts.page_size / view.facts.num_pages
        return probability * again > self._rent * share * pause


def workflow(sequence: Sequence) -> str | int:
    """Return the session of a call, or its number if it has none."""
    return sequence.request.session or sequence.id
