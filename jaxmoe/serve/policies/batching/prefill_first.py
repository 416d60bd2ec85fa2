# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes whole prompts before any decoding: the classic baseline of continuous batching.

Source: Orca (OSDI 2022) as vLLM first scheduled it (arXiv:2309.06180, section 4.5): new prompts are
computed together, and running sequences stand still meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching, BatchingConfig
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFirstConfig(BatchingConfig):
    """Whole prompts before any decoding."""

    name: ClassVar[str] = "prefill_first"

    budget: int = 8192
    """Tokens of the prompts of one step; a longer prompt is computed alone."""

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 token")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""

        def plan(view: InstanceView) -> Plan:
            draft = Draft(view)
            for sequence in itertools.chain(draft.prompts(), view.waiting):
                num_left = draft.left(sequence)
                if draft.tokens() and draft.tokens() + num_left > self.budget:
                    break
                if not draft.piece(sequence, num_left):
                    break
            if not draft.tokens():
                draft.decode()
            return draft.plan()

        return plan
