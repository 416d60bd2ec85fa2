# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fills every step to a budget: decoding first, then pieces of prompts (dynamic split-fuse).

Source: DeepSpeed-FastGen (arXiv:2401.08671), section 3; long prompts are split over steps, short
ones are composed until the budget is full, so that every step costs about the same.
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
class SplitFuseConfig(BatchingConfig):
    """Decoding first, the rest of a token budget for pieces of prompts."""

    name: ClassVar[str] = "split_fuse"

    budget: int = 2048
    """Tokens of one step, decoding included."""

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 token")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""

        def plan(view: InstanceView) -> Plan:
            draft = Draft(view)
            draft.decode(self.budget)
            for sequence in itertools.chain(draft.prompts(), view.waiting):
                if not draft.piece(sequence, self.budget - draft.tokens()):
                    break
            return draft.plan()

        return plan
