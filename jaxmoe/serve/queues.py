# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of an instance by state, the law that none is lost, and what is not queued."""

from __future__ import annotations

import bisect
import collections
import collections.abc
import itertools
from collections.abc import Iterator
from typing import Protocol, overload, runtime_checkable

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.requests import EndReason, Refusal, Request
from jaxmoe.serve.sequence import Sequence

REMEMBERED = 100
"""Sequences that ended lately which are remembered."""
_BLOCK = 512
"""Sequences of a block of the queue at most."""


@runtime_checkable
class QueueIndex(Protocol):
    """What a policy keeps up to date about the queue instead of reading it for each plan."""

    def enter(self, sequence: Sequence) -> None:
        """Take in a sequence that waits from now on."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that does not wait any more."""
        ...


class WaitingQueue(collections.abc.Sequence[Sequence]):
    """Waiting sequences in the order of priority and arrival.

    They lie in blocks, so that to enter and to leave costs the same in a long queue as in a short
    one. An iteration sees the queue as it is, which must not change meanwhile.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all sequences."""
        self.num_pages = 0
        """Pages that these tokens fill."""
        self._blocks: list[list[Sequence]] = []
        self._by_id: dict[int, Sequence] = {}
        self._indexes: list[QueueIndex] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        for block in self._blocks:
            yield from block

    def __reversed__(self) -> Iterator[Sequence]:
        for block in reversed(self._blocks):
            yield from reversed(block)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._by_id.get(sequence.id) is sequence

    @overload
    def __getitem__(self, place: int) -> Sequence: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Sequence, ...]: ...
    def __getitem__(self, place: int | slice) -> Sequence | tuple[Sequence, ...]:
        if isinstance(place, slice):
            begin, end, step = place.indices(len(self))
            if step > 0:
                return tuple(itertools.islice(self, begin, max(begin, end), step))
            return tuple(self)[place]
        number = place + len(self) if place < 0 else place
        for block in self._blocks if number >= 0 else ():
            if number < len(block):
                return block[number]
            number -= len(block)
        raise IndexError(f"place {place} of a queue of {len(self)}")

    def find(self, id_: int) -> Sequence | None:
        """Return the sequence of a request; None if it does not wait."""
        return self._by_id.get(id_)

    def watch(self, index: QueueIndex) -> None:
        """Keep an index up to date from now on, beginning with what waits already; once for each.

        Args:
            index: Empty index, or one that the queue keeps already.
        """
        if any(index is watched for watched in self._indexes):
            return
        self._indexes.append(index)
        for sequence in self:
            index.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence in its place."""
        rank = sequence.rank
        blocks = self._blocks
        number = min(bisect.bisect_left(blocks, rank, key=_last_rank), len(blocks) - 1)
        if number < 0:
            number = 0
            blocks.append([])
        block = blocks[number]
        bisect.insort(block, sequence, key=_rank)
        if len(block) > _BLOCK:
            half = len(block) // 2
            blocks[number : number + 1] = [block[:half], block[half:]]
        self._by_id[sequence.id] = sequence
        self.num_tokens += len(sequence.tokens)
        self.num_pages += num_pages(len(sequence.tokens), sequence.page_size)
        for index in self._indexes:
            index.enter(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            AssertionError: It is not in its place.
        """
        rank = sequence.rank
        blocks = self._blocks
        number = bisect.bisect_left(blocks, rank, key=_last_rank)
        block = blocks[number] if number < len(blocks) else []
        place = bisect.bisect_left(block, rank, key=_rank)
        if place == len(block) or block[place] is not sequence:
            raise AssertionError(f"sequence {sequence.id} is not in its place in the queue")
        del block[place]
        if not block:
            del blocks[number]
        del self._by_id[sequence.id]
        self.num_tokens -= len(sequence.tokens)
        self.num_pages -= num_pages(len(sequence.tokens), sequence.page_size)
        for index in self._indexes:
            index.leave(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _last_rank(block: list[Sequence]) -> tuple[int, int]:
    return block[-1].rank


class Queues:
    """Every sequence that was submitted, in exactly one state."""

    def __init__(self, remembered: int = REMEMBERED):
        self.sequences: dict[int, Sequence] = {}
        """Sequences that have not ended, by request."""
        self.waiting = WaitingQueue()
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
        self.moved_here = 0
        """Sequences that came from another instance, which count as submitted too."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence of another instance or from a client, and queue it if it waits."""
        self.submitted += 1
        self.sequences[sequence.id] = sequence
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """File a sequence under its state."""
        if sequence.state == "waiting":
            self.waiting.enter(sequence)
        elif sequence.state != "finished":
            self._of(sequence)[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its state."""
        if sequence.state == "waiting":
            self.waiting.leave(sequence)
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


def refusal_of(request: Request, facts: Facts, queues: Queues) -> Refusal | None:
    """Return why an instance does not queue a request; None if it does.

    Args:
        request: Request.
        facts: Sizes of the instance.
        queues: What it serves already.
    """
    length = len(request.prompt)
    if request.id in queues.sequences:
        message = f"id={request.id} is already being served: give another id"
        return Refusal("duplicate_id", message)
    # A token that is thrown away is never computed; a row of masked diffusion has a place for it.
    has_room = not request.sampling.has_answer and "pages" in facts.capabilities
    most = facts.max_length if has_room else facts.max_length - 1
    if length > most:
        rule = "are held" if has_room else "leave room for an answer"
        message = f"the prompt has {length} tokens; at most {most} {rule}: shorten the prompt"
        return Refusal("context_length_exceeded", message)
    if len(queues.waiting) >= facts.max_waiting:
        return queue_full(facts.max_waiting)
    return None


def queue_full(most: int) -> Refusal:
    """Return the refusal of a request where as many wait as may.

    Args:
        most: Their number.
    """
    return Refusal("queue_full", f"{most} requests are waiting already: try again later")
