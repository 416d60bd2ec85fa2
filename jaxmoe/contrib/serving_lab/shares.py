# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lanes: steps that run at once on shares of the device, or are cut into parts that overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxmoe.contrib.serving_lab.layers import LayersInstance, LayersWork
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan, PlanError, PromptPiece
from jaxmoe.serve.requests import End, Event, Result
from jaxmoe.serve.sequence import PENDING, Sequence
from jaxmoe.serve.step import EngineStep, Work
from jaxmoe.serve.view import InstanceView

_NO_TOKEN = (PENDING,)
"""Stands for a token that no executor reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """Work that runs as one program."""

    singles: tuple[int, ...] = ()
    """Sequences that compute their last token and draw the next."""
    pieces: tuple[PromptPiece, ...] = ()
    """Parts of prompts to compute beside."""
    number: int = 0
    """Which of the device's partitions."""
    share: float = 1.0
    """Share of the device that the lane may use."""
    nano_batches: int = 1
    """Parts into which the step is cut, so that compute, memory and network overlap."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the lane computes."""
        return len(self.singles) + sum(piece.count for piece in self.pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class LanesPlan(Plan):
    """A plan whose work is divided into lanes."""

    lanes: tuple[Lane, ...] = ()
    """The same singles and pieces, lane by lane."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaneStep(EngineStep):
    """One lane of a plan, as the simulator computes its time."""

    number: int = 0
    """Which of the device's partitions."""
    share: float = 1.0
    """Share of the device."""
    nano_batches: int = 1
    """Parts into which the step is cut."""


class LanesInstance(LayersInstance):
    """Requests of one simulated instance, whose device may be split."""

    def __init__(
        self,
        facts: Facts,
        policy: str = "policy",
        *,
        has_sharing: bool = True,
        has_tokens: bool = True,
    ):
        """Make an instance without requests.

        Args:
            facts: Its properties.
            policy: Name of the policy, for messages.
            has_sharing: Whether requests share the pages of equal beginnings.
            has_tokens: Whether works result in `Result`s, and tokens are events; else in token ids,
                and only the ends of answers are events.
        """
        super().__init__(facts, policy, has_sharing=has_sharing)
        self._has_tokens = has_tokens

    def start(
        self, plan: Plan, now: float, view: InstanceView | None = None
    ) -> tuple[EngineStep, ...]:
        """Check the lanes of a plan too, and start a step for each."""
        free = free_lanes(self.flying, self.facts)
        lanes = lanes_of(plan)
        numbers = [lane.number for lane in lanes]
        if len(set(numbers)) < len(numbers) or not set(numbers) <= set(free):
            raise PlanError(self.policy, "lane", f"lanes {numbers} of the free ones {[*free]}")
        for lane in lanes:
            if not 0 < lane.share <= 1:
                raise PlanError(self.policy, "share", f"share={lane.share} of lane {lane.number}")
        steps = super().start(plan, now, view)
        if not steps:
            return ()
        (step,) = steps
        first, *further = lanes or (Lane(number=min(free, default=0)),)
        singles = step.singles
        pieces = step.pieces
        works = {work.id: work for work in step.works} if further else {}
        if further:
            singles = tuple(works[id_] for id_ in first.singles)
            pieces = tuple(works[piece.id] for piece in first.pieces)
        parts = [
            LaneStep(
                singles=singles,
                pieces=pieces,
                number=first.number,
                share=first.share,
                nano_batches=first.nano_batches,
                out=step.out,
                back=step.back,
                copies=step.copies,
                dropped=step.dropped,
            )
        ]
        for lane in further:
            parts.append(
                LaneStep(
                    singles=tuple(works[id_] for id_ in lane.singles),
                    pieces=tuple(works[piece.id] for piece in lane.pieces),
                    number=lane.number,
                    share=lane.share,
                    nano_batches=lane.nano_batches,
                )
            )
        self.flying[-1:] = parts
        return tuple(parts)

    def _work(self, id_: int, count: int) -> Work:
        if self._has_tokens or count > 1:
            return super()._work(id_, count)
        # One for each token of an answer: nothing is computed, so that it needs neither the token
        # nor the table.
        sequence = self.queues.running[id_]
        start = sequence.computed
        self.tables.cover(sequence, start, start + 1)
        sequence.is_busy = True
        draws = start + 1 == len(sequence.tokens)
        sampling = sequence.request.sampling
        return Work(id_, _NO_TOKEN, start, (), draws, sequence.num_written, sampling)

    def _take_over(
        self, sequence: Sequence, work: Work, result: Any, now: float
    ) -> tuple[Event, ...]:
        if self._has_tokens:
            return super()._take_over(sequence, work, result, now)
        if isinstance(work, LayersWork):
            drawn = None if result is None else Result(result)
            events = super()._take_over(sequence, work, drawn, now)
            return tuple(event for event in events if isinstance(event, End))
        self._advance(sequence, len(work.tokens))
        if result is None:
            return ()
        sequence.append(result, now)
        reason = self._ending(sequence, result)
        return () if reason is None else (self.end(sequence, reason),)


def lanes_of(plan: Plan) -> tuple[Lane, ...]:
    """Return the lanes of a plan, a single one of the whole device for most policies.

    Args:
        plan: Plan of any policy.
    """
    if isinstance(plan, LanesPlan):
        return plan.lanes
    return (Lane(plan.singles, plan.pieces),) if plan.singles or plan.pieces else ()


def free_lanes(flying: Iterable[EngineStep], facts: Facts) -> tuple[int, ...]:
    """Return the partitions of a device on which nothing runs.

    Args:
        flying: Steps that have started and not ended.
        facts: Properties of the instance.
    """
    numbers = {step.number for step in flying if isinstance(step, LaneStep)}
    return tuple(lane for lane in range(facts.steps_at_once) if lane not in numbers)


def in_lanes(plan: Plan, *lanes: Lane) -> LanesPlan:
    """Return a plan divided into those of some lanes that have work.

    Args:
        plan: All work.
        lanes: Its division.
    """
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return LanesPlan(**fields, lanes=tuple(lane for lane in lanes if lane.num_tokens))
