# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State machine of an instance that fills rows: requests, rows, steps. Runs nothing itself.

A row is the one page of its sequence, as long as the longest request: queue, cancellation, ends,
numbers and the law that none is lost are those of `Instance`. A request stands at a step of its
own; each step of the instance takes all rows one step further. Filled positions never change, so
that a token is written as soon as all positions before it are filled.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.requests import End, EndReason, Event, Request, Result, Token
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.step import EngineStep, Work
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(kw_only=True, slots=True)
class RowWork(Work):
    """One step of one row; `tokens` is the prompt and what is filled in, `pages` its row."""

    is_filled: tuple[bool, ...]
    """Which of the tokens are there; the others are masked."""
    done: int
    """Steps that the row has passed."""
    num_steps: int
    """Steps of the row."""


@dataclasses.dataclass(frozen=True, slots=True)
class FilledRow:
    """What a step has made of one row."""

    tokens: np.ndarray
    """Ids of prompt and answer."""
    is_filled: np.ndarray
    """Which of them are there."""
    logprobs: np.ndarray
    """Log-probability of those that the step has filled in; 0 elsewhere."""


@dataclasses.dataclass(eq=False, slots=True)
class _DiffusionRow:
    """A request between its steps."""

    held: FilledRow
    num_steps: int
    done: int = 0


def plan_rows(view: InstanceView) -> Plan:
    """Return the plan of a step: free rows are taken in the order of the queue, all go on."""
    admitted = [sequence.id for sequence in view.waiting[: view.pool.num_free]]
    return Plan.of([*(sequence.id for sequence in view.running), *admitted], admit=admitted)


class RowsInstance(Instance):
    """Requests of one instance from submission to their end."""

    def __init__(self, facts: Facts, *, steps_per_token: float = 1.0):
        super().__init__(facts, "rows", has_sharing=False)
        self._steps_per_token = steps_per_token
        self._rows: dict[int, _DiffusionRow] = {}

    def start(
        self, plan: Plan, now: float, view: InstanceView | None = None
    ) -> tuple[EngineStep, ...]:
        """Take rows, and return the step of all that are planned.

        Args:
            plan: Plan of `plan_rows` for the state as it is.
            now: Seconds on the instance's clock.
            view: What the policy saw, if it is at hand.
        """
        waiting = (view or self.view(now)).find_waiting(plan.admit)
        for id_ in plan.admit:
            self._admit(waiting[id_], (), now)
            self._rows[id_] = self._begin_row(waiting[id_].request)
        works = tuple(self._row_work(id_) for id_ in plan.singles)
        steps = (EngineStep(singles=works, pieces=()),) if works else ()
        self.flying += steps
        return steps

    def end(self, sequence: Sequence, reason: EndReason, message: str = "") -> End:
        """End a sequence that no step computes, and free its row."""
        self._rows.pop(sequence.id, None)
        return super().end(sequence, reason, message)

    def _begin_row(self, request: Request) -> _DiffusionRow:
        prompt = len(request.prompt)
        length = min(prompt + request.sampling.max_tokens, self.facts.max_length)
        tokens = np.zeros(length, np.int32)
        tokens[:prompt] = request.prompt
        filled_row = FilledRow(tokens, np.arange(length) < prompt, np.zeros(length, np.float32))
        return _DiffusionRow(filled_row, math.ceil(self._steps_per_token * (length - prompt)))

    def _row_work(self, id_: int) -> RowWork:
        sequence = self.queues.running[id_]
        row = self._rows[id_]
        self.tables.grow(sequence, 1)
        sequence.is_busy = True
        return RowWork(
            id=id_,
            tokens=tuple(row.held.tokens.tolist()),
            start=0,
            pages=tuple(sequence.pages),
            draws=True,
            index=sequence.num_written,
            sampling=sequence.request.sampling,
            is_filled=tuple(row.held.is_filled.tolist()),
            done=row.done,
            num_steps=row.num_steps,
        )

    def _take_over(
        self, sequence: Sequence, work: Work, result: Any, now: float
    ) -> tuple[Event, ...]:
        self.num_computed += len(work.tokens)
        self._rows[sequence.id].done += 1
        return () if result is None else self._fill(sequence, result, now)

    def _fill(self, sequence: Sequence, result: FilledRow, now: float) -> tuple[Event, ...]:
        """Return the tokens behind which every position is filled, and the end of a whole row."""
        row = self._rows[sequence.id]
        events = list[Event]()
        logprobs = row.held.logprobs + result.logprobs
        row.held = dataclasses.replace(result, logprobs=logprobs)
        length = len(result.tokens)
        while len(sequence.tokens) < length and result.is_filled[len(sequence.tokens)]:
            place = len(sequence.tokens)
            token = int(result.tokens[place])
            events.append(
                Token(sequence.id, sequence.num_written, Result(token, float(logprobs[place])))
            )
            sequence.append(token, now)
            if token in sequence.request.sampling.stop_ids:
                return (*events, self.end(sequence, "stop"))
        return (
            (*events, self.end(sequence, "length"))
            if len(sequence.tokens) == length
            else tuple(events)
        )
