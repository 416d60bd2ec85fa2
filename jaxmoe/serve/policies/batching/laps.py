# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves short and long prompts from two queues, so that short ones do not wait for long ones.

Source: length-aware prefill scheduling (LAPS, arXiv:2601.11589): short prompts are collected until
a batch is full or the oldest has waited for some milliseconds, long ones get the rest of the time,
in pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching, BatchingConfig
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LapsConfig(BatchingConfig):
    """Two queues by the length of the prompt."""

    name: ClassVar[str] = "laps"

    border: int = 512
    """Tokens of the longest short prompt."""
    patience: float = 0.01
    """Seconds that a short prompt waits for others at most."""
    budget: int = 2048
    """Tokens of the prompts of one step."""

    def __post_init__(self) -> None:
        if self.border < 1 or self.budget < self.border or not self.patience >= 0:
            raise ValueError(
                f"border={self.border}, budget={self.budget} and patience={self.patience} must be"
                " positive, and budget no smaller than border"
            )

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""

        def plan(view: InstanceView) -> Plan:
            draft = Draft(view)
            draft.decode()
            prompts = _Prompts(draft, self.border)
            due, is_due = self._due(prompts, view.now)
            num_used = 0
            for is_short in (True, False) if is_due else (False,):
                for sequence in prompts.to_compute(is_short=is_short):
                    num_taken = draft.piece(sequence, self.budget - num_used)
                    if not num_taken:
                        break
                    num_used += num_taken
                if num_used:
                    break
            return draft.plan(wake=None if is_due else due)

        return plan

    def _due(self, prompts: _Prompts, now: float) -> tuple[float, bool]:
        """Return when the short prompts are due, and whether they are due now.

        Args:
            prompts: Short and long ones.
            now: Seconds on the instance's clock.
        """
        due = math.inf
        num_left = 0
        for sequence in prompts.short():
            due = min(due, sequence.arrived + self.patience)
            num_left += prompts.num_left[sequence.id]
            if due <= now or num_left >= self.budget:
                return due, True
        return due, not num_left  # without a short prompt the long ones need not wait


class _Prompts:
    """Prompts by their length, read from the queue as far as a plan needs them.

    What is left of a prompt depends on the pages that are in the pool right now, which no order of
    the queue can know. So the queue is read up to the first prompt of each length; a queue of one
    length alone is read to its end.
    """

    def __init__(self, draft: Draft, border: int):
        self.num_left: dict[int, int] = {}
        """Tokens left of those that were read."""
        self._draft = draft
        self._border = border
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []
        self._unread = iter(draft.view.waiting)
        for sequence in draft.prompts():
            self._add(sequence)

    def short(self) -> Iterator[Sequence]:
        """Yield the short prompts in order."""
        number = 0
        while number < len(self._short) or self._read():
            if number < len(self._short):
                yield self._short[number]
                number += 1

    def to_compute(self, *, is_short: bool) -> Iterator[Sequence]:
        """Yield the prompts of a length in order, while one that waits may have a place.

        Args:
            is_short: Which length.
        """
        group = self._short if is_short else self._long
        number = 0
        while number < len(group) or (not self._draft.is_full and self._read()):
            if number < len(group):
                yield group[number]
                number += 1

    def _read(self) -> bool:
        """Read the next of the queue; return whether there was one."""
        sequence = next(self._unread, None)
        if sequence is not None:
            self._add(sequence)
        return sequence is not None

    def _add(self, sequence: Sequence) -> None:
        num_left = self._draft.left(sequence)
        self.num_left[sequence.id] = num_left
        (self._short if num_left <= self._border else self._long).append(sequence)
