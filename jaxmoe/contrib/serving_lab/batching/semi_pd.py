# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Splits the device between decoding and prompts by the limits that were missed lately.

Source: semi-PD (arXiv:2504.19867): prompts and decoding share one pool of pages, so that nothing is
transferred; the share moves in small steps towards the phase with more violations.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.serving_lab.batching.base import SimulatedBatchingConfig
from jaxmoe.contrib.serving_lab.batching.two_lanes import plan_lanes
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SemiPDConfig(SimulatedBatchingConfig):
    """Two lanes; the share follows the missed limits."""

    name: ClassVar[str] = "semi_pd"
    needs: ClassVar[frozenset[str]] = frozenset({"partitions"})

    budget: int = 2048
    """Tokens of the prompts of one step."""
    step: float = 0.05
    """Change of the share at a time."""
    every: int = 10
    """Finished requests between two changes."""

    def __post_init__(self) -> None:
        if self.budget < 1 or self.every < 1 or not 0 < self.step < 0.5:
            raise ValueError(
                f"budget={self.budget} and every={self.every} must be positive, step={self.step}"
                " in (0, 0.5)"
            )

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""
        share = 0.5
        seen = 0
        last = -1

        def plan(view: InstanceView) -> Plan:
            nonlocal share, seen, last
            if view.finished and view.finished[-1].id != last:
                last = view.finished[-1].id
                seen += 1
            if seen >= self.every and not view.busy:
                seen = 0
                share += self.step * direction(view.finished)
                share = min(max(share, self.step), 1.0 - self.step)
            return plan_lanes(view, share, self.budget)

        return plan


def direction(finished: tuple[Sequence, ...]) -> int:
    """Return 1 if more finished requests missed the limit per token, -1 if that of the first.

    Args:
        finished: Sequences with a whole answer.
    """
    first = token = 0
    for sequence in finished:
        objective = sequence.request.objective
        if objective is not None and sequence.first is not None and sequence.last is not None:
            first += sequence.first - sequence.arrived > objective.ttft
            token += (sequence.last - sequence.first) / max(
                sequence.num_written - 1, 1
            ) > objective.tpot
    return (token > first) - (token < first)
