# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts every step into nano-batches whose compute, memory and network overlap.

Source: NanoFlow (arXiv:2408.12757). The step is that of split-fuse; the number of parts is the one
with the shortest predicted time, because each part reads the weights again.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from jaxmoe.contrib.serving_lab.batching.base import SimulatedBatchingConfig
from jaxmoe.contrib.serving_lab.shares import Lane, in_lanes
from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts, WorkPart
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import TIMES, Batching
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NanoBatchesConfig(SimulatedBatchingConfig):
    """Decoding and pieces of prompts in overlapping parts."""

    name: ClassVar[str] = "nano_batches"
    needs: ClassVar[frozenset[str]] = frozenset({TIMES})

    budget: int = 2048
    """Tokens of one step, decoding included."""
    most: int = 4
    """Parts of a step at most."""

    def __post_init__(self) -> None:
        if self.budget < 1 or self.most < 1:
            raise ValueError(f"budget={self.budget} and most={self.most} must be at least 1")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""

        def plan(view: InstanceView) -> Plan:
            draft = Draft(view)
            parts = [WorkPart(1, sequence.computed) for sequence in draft.decode(self.budget)]
            for sequence in itertools.chain(draft.prompts(), view.waiting):
                num_left = draft.left(sequence)
                count = draft.piece(sequence, self.budget - draft.tokens())
                if not count:
                    break
                parts.append(WorkPart(count, len(sequence.tokens) - num_left))
            best = 1
            if facts.cost is not None and parts:
                cost = facts.cost
                numbers = range(1, min(self.most, sum(part.count for part in parts)) + 1)
                best = min(numbers, key=lambda n: cost.seconds(parts, nano_batches=n))
            plan = draft.plan()
            return in_lanes(plan, Lane(plan.singles, plan.pieces, nano_batches=best))

        return plan
