# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Swaps preempted sequences in few copies, and copies only what host memory does not have.

Source: FastSwitch (arXiv:2411.18424). Pages of a sequence are taken in groups side by side, so that
a swap is one copy per group rather than per page. The copy of pages that have returned stays in
host memory: when the sequence, or a later turn with the same beginning, is swapped again, only the
pages since then travel. Sequences in host memory return before later requests are admitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxmoe.serve.facts import Facts, youngest
from jaxmoe.serve.plan import EvictionKind
from jaxmoe.serve.policies.retention.base import RetentionConfig
from jaxmoe.serve.sequence import Sequence as ServedSequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwapGroupsConfig(RetentionConfig):
    """Pages in groups; a preempted sequence goes to host memory."""

    name: ClassVar[str] = "swap_groups"

    group: int = 8
    """Pages side by side that are taken for one sequence while there are such."""
    host: float = 4.0
    """Pages whose copies stay in host memory after their return, as a multiple of those of the
    device."""

    def __post_init__(self) -> None:
        if self.group < 1 or not self.host >= 0:
            raise ValueError(
                f"retention.group={self.group} must be at least 1 and retention.host={self.host} 0"
                " (no copies are kept) or more"
            )

    def facts(self, facts: Facts) -> Facts:
        """Return the facts with groups, swaps and copies."""
        pages = int(self.host * facts.num_pages)
        return dataclasses.replace(facts, victim=choose_swap, group=self.group, host_pages=pages)


def choose_swap(candidates: Sequence[ServedSequence]) -> tuple[ServedSequence, EvictionKind]:
    """Return the sequence that is served last, to be swapped; without pages, to begin again."""
    sequence, kind = youngest(candidates)
    return sequence, "swap" if sequence.computed else kind
