# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the prompt with the least slack, and may leave it between layers for a more urgent one.

Source: FlowPrefill (arXiv:2602.16603): a prompt is one piece that can stop between operators, and
decisions are made when a request arrives or a prompt is complete, not at every stop.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.serving_lab.batching.base import SimulatedBatchingConfig
from jaxmoe.contrib.serving_lab.layers import LayersDraft
from jaxmoe.serve.facts import Facts, WorkPart
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import TIMES, Batching
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlowPrefillConfig(SimulatedBatchingConfig):
    """Least slack first; prompts stop between layers."""

    name: ClassVar[str] = "flow_prefill"
    needs: ClassVar[frozenset[str]] = frozenset({"layers", TIMES})

    stops: int = 4
    """Places between layers at which a prompt may stop."""

    def __post_init__(self) -> None:
        if self.stops < 1:
            raise ValueError(f"stops={self.stops} must be at least 1")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""
        layers = facts.num_layers
        stride = -(-layers // self.stops)
        seen: set[int] = set()
        chosen: list[int] = []

        def slack(
            sequence: Sequence, draft: LayersDraft, now: float
        ) -> tuple[float, tuple[int, int]]:
            objective = sequence.request.objective
            if objective is None or facts.cost is None:
                return float("inf"), sequence.rank
            part = WorkPart(
                draft.left(sequence),
                len(sequence.tokens) - draft.left(sequence),
                (draft.layers_done(sequence), layers),
            )
            return sequence.arrived + objective.ttft - now - facts.cost.seconds(
                [part]
            ), sequence.rank

        def plan(view: InstanceView) -> Plan:
            draft = LayersDraft(view)
            draft.decode()
            prompts = {sequence.id: sequence for sequence in (*draft.prompts(), *view.waiting)}
            if set(prompts) != seen or not chosen:
                seen.clear()
                seen.update(prompts)
                order = sorted(
                    prompts.values(), key=lambda sequence: slack(sequence, draft, view.now)
                )
                chosen[:] = [sequence.id for sequence in order]
            for id_ in chosen:
                sequence = prompts[id_]
                first = draft.layers_done(sequence)
                end = min(first + stride, layers)
                if draft.layers_piece(sequence, draft.piece_size(sequence), (first, end)):
                    break
            return draft.plan()

        return plan
