# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Groups prompts by their shared beginning, so that each beginning is computed once.

Source: BatchLLM (arXiv:2412.03594): a trie of the prompts, requests of one beginning run one after
the other, groups with a larger share of decoding first, admission by the tokens that stay in the
pool. Here the trie is of pages: a request waits while another computes the page that it needs next.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.policies.batching.base import Batching, BatchingConfig
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLLMConfig(BatchingConfig):
    """Groups by shared beginning, the largest share of decoding first."""

    name: ClassVar[str] = "batch_llm"

    budget: int = 2048
    """Tokens of one step, decoding included."""
    held: float = 1.0
    """Share of the pool that prompts and answers of running sequences may fill when they end."""

    def __post_init__(self) -> None:
        if self.budget < 1 or not 0 < self.held:
            raise ValueError(f"budget={self.budget} and held={self.held} must be positive")

    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance."""
        capacity = self.held * facts.num_pages * facts.page_size

        def final(sequence: Sequence) -> int:
            length = len(sequence.request.prompt) + sequence.request.sampling.max_tokens
            return min(length, facts.max_length)

        def plan(view: InstanceView) -> Plan:
            draft = Draft(view)
            for sequence in draft.decoding()[: self.budget]:
                draft.single(sequence)
            prompts = draft.prompts()
            for sequence in prompts:
                if not draft.piece(sequence, self.budget - draft.tokens()):
                    return draft.plan()
            underway = {
                name for sequence in (*prompts, *view.busy) for name in sequence.prefix_names()
            }
            tokens = sum(map(final, view.running))
            for sequence in _in_groups(view.waiting):
                hits = len(view.hits(sequence))
                needs = sequence.prefix_names()[hits : hits + 1]
                if needs and needs[0] in underway:
                    continue
                if draft.num_running and tokens + final(sequence) > capacity:
                    break
                if not draft.piece(sequence, self.budget - draft.tokens()):
                    break
                tokens += final(sequence)
                underway.update(sequence.prefix_names())
            return draft.plan()

        return plan


def _in_groups(waiting: tuple[Sequence, ...]) -> list[Sequence]:
    """Return sequences by group, each in the order of the trie."""
    groups: dict[bytes, list[Sequence]] = {}
    for sequence in waiting:
        root = sequence.prefix_names()[:1]
        groups.setdefault(root[0] if root else b"%d" % sequence.id, []).append(sequence)

    def decoding(group: list[Sequence]) -> float:
        pages = {name for sequence in group for name in sequence.prefix_names()}
        prompt = len(pages) * group[0].page_size + len(group)
        return sum(sequence.request.sampling.max_tokens for sequence in group) / prompt

    order = sorted(groups.values(), key=lambda group: (-decoding(group), group[0].rank))
    return [
        sequence
        for group in order
        for sequence in sorted(group, key=lambda o: (o.prefix_names(), o.rank))
    ]
