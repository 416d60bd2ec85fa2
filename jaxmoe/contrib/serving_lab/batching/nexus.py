# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Splits the device between decoding and prompts by predicted latency.

Source: Nexus (arXiv:2507.06608): the share that minimises the predicted time of the prompts and of
a decoding step; it changes only for a gain beyond a threshold.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.serving_lab.batching.base import SimulatedBatchingConfig
from jaxmoe.contrib.serving_lab.batching.two_lanes import plan_lanes
from jaxmoe.serve.facts import Facts, WorkPart
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import TIMES, Batching
from jaxmoe.serve.view import InstanceView

SHARES = tuple(step / 10 for step in range(1, 10))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NexusConfig(SimulatedBatchingConfig):
    """Two lanes; the share by predicted latency."""

    name: ClassVar[str] = "nexus"
    needs: ClassVar[frozenset[str]] = frozenset({"partitions", TIMES})

    budget: int = 2048
    """Tokens of the prompts of one step."""
    weight: float = 20.0
    """Seconds until the first token that a second per further token is worth."""
    hysteresis: float = 0.05
    """Relative gain for which the share changes."""

    def __post_init__(self) -> None:
        if self.budget < 1 or not self.weight > 0 or not self.hysteresis >= 0:
            raise ValueError(
                f"budget={self.budget}, weight={self.weight} and hysteresis={self.hysteresis} must"
                " be positive"
            )

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""
        share = 0.5

        def predict(view: InstanceView, decode_share: float) -> float:
            live = (*view.running, *view.busy)
            singles = [WorkPart(1, sequence.computed) for sequence in live if sequence.left == 1]
            prompts = [
                WorkPart(sequence.left, sequence.computed) for sequence in live if sequence.left > 1
            ]
            prompts += [
                WorkPart(sequence.left, 0) for sequence in view.waiting[: facts.max_running]
            ]
            if facts.cost is None or not (singles or prompts):
                return 0.0
            ttft = facts.cost.seconds(prompts, share=1.0 - decode_share) if prompts else 0.0
            tpot = facts.cost.seconds(singles, share=decode_share) if singles else 0.0
            return ttft + self.weight * tpot

        def plan(view: InstanceView) -> Plan:
            nonlocal share
            if not view.busy:  # both lanes are free: the device can be split anew
                now = predict(view, share)
                best = min(SHARES, key=lambda s: predict(view, s))
                if predict(view, best) < now * (1.0 - self.hysteresis):
                    share = best
            return plan_lanes(view, share, self.budget)

        return plan
