# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves short and long prompts from two queues, so that short ones do not wait for long ones.

Source: length-aware prefill scheduling (LAPS, arXiv:2601.11589): short prompts are collected until
a batch is full or the oldest has waited for some milliseconds, long ones get the rest of the time,
in pieces.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching, BatchingConfig
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
            for sequence in draft.decoding():
                draft.single(sequence)
            prompts = (*draft.prompts(), *view.waiting)
            short = [sequence for sequence in prompts if draft.left(sequence) <= self.border]
            long = [sequence for sequence in prompts if draft.left(sequence) > self.border]
            is_full = sum(draft.left(sequence) for sequence in short) >= self.budget
            due = min((sequence.arrived + self.patience for sequence in short), default=view.now)
            is_due = is_full or due <= view.now
            num_used = 0
            for group in (short, long) if is_due else (long,):
                for sequence in group:
                    num_taken = draft.piece(sequence, self.budget - num_used)
                    if not num_taken:
                        break
                    num_used += num_taken
                if num_used:
                    break
            return draft.plan(wake=due if short and not is_due else None)

        return plan
