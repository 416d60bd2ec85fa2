# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy sees of an instance when it plans a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as AnySequence

from jaxmoe.serve.blocks import BlockPool
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.ledger import PageLedger
from jaxmoe.serve.queues import WaitingQueue
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.step import EngineStep


def may_start(flying: AnySequence[EngineStep], facts: Facts) -> bool:
    """Return whether another step may start.

    Args:
        flying: Steps that have started and not ended.
        facts: Properties of the instance.
    """
    return len(flying) < facts.steps_at_once + facts.steps_ahead


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InstanceView:
    """State of an instance. Policies only read it, and the sequences and the pool in it."""

    now: float
    """Seconds on the instance's clock."""
    facts: Facts
    pool: BlockPool
    running: tuple[Sequence, ...]
    """Sequences with pages that no step computes right now, in the order of their admission."""
    busy: tuple[Sequence, ...] = ()
    """Sequences that a step computes right now."""
    waiting: WaitingQueue = dataclasses.field(default_factory=WaitingQueue)
    """Sequences in the queue, in the order of priority and arrival. It is the queue itself, which
    may be long: read from its beginning what the plan needs, and not after the next change."""
    swapped: tuple[Sequence, ...] = ()
    """Sequences whose pages are in host memory, the oldest first."""
    flying: tuple[EngineStep, ...] = ()
    """Steps that have started and not ended."""
    finished: tuple[Sequence, ...] = ()
    """Sequences that ended lately, for policies that adapt to what clients saw."""
    has_sharing: bool = True
    """Whether pages with equal contents are shared."""
    num_moving: int = 0
    """Sequences on their way to another instance or from one: they hold pages and a place, and no
    step computes them."""

    @property
    def is_free(self) -> bool:
        """Whether another step may start."""
        return may_start(self.flying, self.facts)

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return len(self.running) + len(self.busy)

    def ledger(self) -> PageLedger:
        """Return a count of free pages to plan with."""
        return PageLedger(self.pool)

    def find_waiting(self, ids: Iterable[int]) -> dict[int, Sequence]:
        """Return waiting sequences by request, without ids that do not wait.

        Args:
            ids: Requests.
        """
        sequences = ((id_, self.waiting.find(id_)) for id_ in ids)
        return {id_: sequence for id_, sequence in sequences if sequence is not None}

    def hits(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the cached pages with which a waiting sequence would begin."""
        return self.pool.find(sequence.prefix_names()) if self.has_sharing else ()
