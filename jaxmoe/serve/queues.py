# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of an instance by state, and the law that none is lost."""

from __future__ import annotations

import bisect
import collections

from jaxmoe.serve.requests import EndReason
from jaxmoe.serve.sequence import Sequence


class Queues:
    """Every sequence that was submitted, in exactly one state."""

    def __init__(self, remembered: int = 100):
        self.sequences: dict[int, Sequence] = {}
        """Sequences that have not ended, by request."""
        self.waiting: list[Sequence] = []
        """In the order of priority and arrival."""
        self.running: dict[int, Sequence] = {}
        """In the order of admission."""
        self.swapped: dict[int, Sequence] = {}
        self.moving: dict[int, Sequence] = {}
        self.finished: collections.deque[Sequence] = collections.deque(maxlen=remembered)
        """Sequences that ended lately with a whole answer."""
        self.submitted = 0
        self.ended: collections.Counter[EndReason] = collections.Counter()
        """Ended sequences by reason."""
        self.moved_away = 0
        """Sequences that went to another instance."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence of another instance or from a client, and queue it if it waits."""
        self.submitted += 1
        self.sequences[sequence.id] = sequence
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """File a sequence under its state."""
        if sequence.state == "waiting":
            bisect.insort(self.waiting, sequence, key=lambda queued: queued.rank)
        elif sequence.state != "finished":
            self._of(sequence)[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its state."""
        if sequence.state == "waiting":
            place = bisect.bisect_left(self.waiting, sequence.rank, key=lambda queued: queued.rank)
            if self.waiting[place] is not sequence:
                raise AssertionError(f"sequence {sequence.id} is not in its place in the queue")
            del self.waiting[place]
        else:
            del self._of(sequence)[sequence.id]

    def check(self) -> None:
        """Assert the conservation law.

        Raises:
            AssertionError: A sequence was lost or counted twice.
        """
        groups = (self.waiting, self.running, self.swapped, self.moving)
        live = sum(map(len, groups))
        total = live + sum(self.ended.values()) + self.moved_away
        if self.submitted != total or live != len(self.sequences):
            raise AssertionError(
                f"{self.submitted} submitted, but {len(self.waiting)} waiting,"
                f" {len(self.running)} running, {len(self.swapped)} swapped, {len(self.moving)}"
                f" moving, {self.moved_away} moved away, ended {dict(self.ended)}"
            )

    def _of(self, sequence: Sequence) -> dict[int, Sequence]:
        groups = {"running": self.running, "swapped": self.swapped, "moving": self.moving}
        return groups[sequence.state]
