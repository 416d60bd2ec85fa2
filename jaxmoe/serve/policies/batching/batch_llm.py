# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Groups prompts by their shared beginning, so that each beginning is computed once.

Source: BatchLLM (arXiv:2412.03594): a trie of the prompts, requests of one beginning run one after
the other, groups with a larger share of decoding first, admission by the tokens that stay in the
pool. Here the trie is of pages: a request waits while another computes the page that it needs next.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterator
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

        groups = _PrefixGroups()

        def plan(view: InstanceView) -> Plan:
            view.waiting.watch(groups)
            draft = Draft(view)
            draft.decode(self.budget)
            prompts = draft.prompts()
            for sequence in prompts:
                if not draft.piece(sequence, self.budget - draft.tokens()):
                    return draft.plan()
            underway = {
                name for sequence in (*prompts, *view.busy) for name in sequence.prefix_names()
            }
            tokens = sum(map(final, view.running))
            for sequence in groups if not draft.is_full else ():
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


class _PrefixGroups:
    """Waiting sequences by group, each in the order of the trie; `QueueIndex`."""

    def __init__(self) -> None:
        self._groups: dict[bytes, _PrefixGroup] = {}
        self._order: list[tuple[float, tuple[int, int], bytes]] = []
        """Share of decoding, less than 0, and first rank of each group, and its name; sorted."""

    def __iter__(self) -> Iterator[Sequence]:
        for *_, root in self._order:
            yield from self._groups[root].members

    def enter(self, sequence: Sequence) -> None:
        """Take in a sequence that waits from now on."""
        self._change(sequence, is_entering=True)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that does not wait any more."""
        self._change(sequence, is_entering=False)

    def _change(self, sequence: Sequence, *, is_entering: bool) -> None:
        names = sequence.prefix_names()
        root = names[0] if names else b"%d" % sequence.id
        group = self._groups.setdefault(root, _PrefixGroup())
        if group.members:
            del self._order[bisect.bisect_left(self._order, (*group.key(), root))]
        group.change(sequence, names, is_entering=is_entering)
        if group.members:
            bisect.insort(self._order, (*group.key(), root))
        else:
            del self._groups[root]


class _PrefixGroup:
    """Sequences with the same first page."""

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        """In the order of the trie."""
        self._ranks: list[tuple[int, int]] = []
        self._pages: collections.Counter[bytes] = collections.Counter()
        self._num_drawn = 0

    def key(self) -> tuple[float, tuple[int, int]]:
        """Return the place among the groups: by the share of decoding, then by rank."""
        prompt = len(self._pages) * self.members[0].page_size + len(self.members)
        return -(self._num_drawn / prompt), self._ranks[0]

    def change(self, sequence: Sequence, names: list[bytes], *, is_entering: bool) -> None:
        """Add a sequence, or take it out.

        Args:
            sequence: Sequence.
            names: Names of its pages that may be shared.
            is_entering: Whether it is added.
        """
        if is_entering:
            bisect.insort(self.members, sequence, key=_in_trie)
            bisect.insort(self._ranks, sequence.rank)
            self._pages.update(names)
            self._num_drawn += sequence.request.sampling.max_tokens
            return
        del self.members[bisect.bisect_left(self.members, _in_trie(sequence), key=_in_trie)]
        del self._ranks[bisect.bisect_left(self._ranks, sequence.rank)]
        self._num_drawn -= sequence.request.sampling.max_tokens
        for name in names:
            self._pages[name] -= 1
            if not self._pages[name]:
                del self._pages[name]


def _in_trie(sequence: Sequence) -> tuple[list[bytes], tuple[int, int]]:
    return sequence.prefix_names(), sequence.rank
