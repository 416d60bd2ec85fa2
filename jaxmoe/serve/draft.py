# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Composes a plan that keeps the rules: counts pages, preempts when they run out."""

from __future__ import annotations

from collections.abc import Callable

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.plan import Eviction, Plan, PromptPiece
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


class Draft:
    """A plan under construction, for policies to add work to.

    Swapped sequences return first, in the order of their rank, while their pages and one more fit;
    requests of a later rank are admitted when none waits.
    """

    def __init__(self, view: InstanceView):
        self.view = view
        self.evicted: list[Eviction] = []
        self._ledger = view.ledger()
        self._running = {sequence.id: sequence for sequence in view.running}
        self._held: dict[int, int] = {}  # pages of those that have entered or grown
        self._computed: dict[int, int] = {}  # tokens of those that have entered
        self._used: set[int] = set()
        self._admitted: list[int] = []
        self._restored: list[int] = []
        self._entered: set[int] = set()  # both
        self._away = list[Sequence]()
        self._singles: list[int] = []
        self._pieces: list[PromptPiece] = []
        self._restore()

    @property
    def num_running(self) -> int:
        """Sequences that run after what was drafted so far, and those that move."""
        return len(self._running) + len(self.view.busy) + self.view.num_moving

    @property
    def is_full(self) -> bool:
        """Whether as many sequences run as may, so that nothing that waits can be admitted."""
        return self.num_running >= self.view.facts.max_running

    def running(self, keep: Callable[[Sequence], bool] = lambda sequence: True) -> list[Sequence]:
        """Return the running sequences without work so far, in order.

        Args:
            keep: Which of them to return.
        """
        used = self._used
        return [o for o in self._running.values() if o.id not in used and keep(o)]

    def decoding(self) -> list[Sequence]:
        """Return the running sequences without work of which one token is left."""
        used = self._used
        running = self._running.values()
        if self._computed or used:
            return [o for o in running if o.id not in used and self._num_left(o) == 1]
        return [o for o in running if len(o.tokens) - o.computed == 1]

    def prompts(self) -> list[Sequence]:
        """Return the running sequences without work of which more than one token is left."""
        used = self._used
        computed = self._computed
        running = self._running
        free = [o for o in running.values() if o.id not in used] if len(used) < len(running) else []
        return [o for o in free if len(o.tokens) - computed.get(o.id, o.computed) > 1]

    def left(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence until the next is drawn; cached ones do not count."""
        if sequence.state == "running" or sequence.id in self._computed:
            return self._num_left(sequence)
        return len(sequence.tokens) - len(self.view.hits(sequence)) * self.view.facts.page_size

    def tokens(self) -> int:
        """Return the tokens drafted so far."""
        return len(self._singles) + sum(self.counts())

    def counts(self) -> list[int]:
        """Return the tokens of each piece drafted so far."""
        return [piece.count for piece in self._pieces]

    def decode(self, limit: int | None = None) -> list[Sequence]:
        """Let the running sequences of which one token is left draw the next, in order.

        Args:
            limit: Sequences at most; None for all.

        Returns:
            Those that have a place.
        """
        is_free = self.view.facts.shapes is None
        drafted: list[Sequence] = []
        running = self._running
        for sequence in self.decoding()[:limit]:
            id_ = sequence.id
            has_room = is_free and sequence.computed < len(sequence.pages) * sequence.page_size
            if has_room and id_ in running:  # as `single` without a page or a shape to take
                self._used.add(id_)
                self._singles.append(id_)
                drafted.append(sequence)
            elif self.single(sequence):
                drafted.append(sequence)
        return [o for o in drafted if o.id in running] if self.evicted else drafted

    def single(self, sequence: Sequence) -> bool:
        """Let a running sequence draw a token, at the cost of later ones if pages are lacking.

        Args:
            sequence: Sequence with one token left.

        Returns:
            Whether it has a place; it may itself have been evicted.
        """
        shapes = self.view.facts.shapes
        if shapes is not None and len(self._singles) >= shapes.singles:
            return False
        id_ = sequence.id
        if id_ not in self._running:
            return False
        if sequence.computed < len(sequence.pages) * sequence.page_size:
            self._used.add(id_)  # its last page has room
        elif not self._grow(sequence, 1):
            return False
        self._singles.append(id_)
        return True

    def piece(self, sequence: Sequence, count: int) -> int:
        """Compute part of a prompt; a waiting sequence is admitted if its whole prompt fits.

        Args:
            sequence: Running or waiting sequence.
            count: Tokens at most; a compiled shape may take fewer.

        Returns:
            Tokens that have a place, 0 if none.
        """
        count = self.view.facts.piece(min(count, self.left(sequence)), self.counts())
        if count <= 0:
            return 0
        if sequence.id not in self._running and not self.admit(sequence):
            return 0
        if not self._grow(sequence, count):
            return 0
        self._pieces.append(PromptPiece(sequence.id, count))
        return count

    def admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence if there is a place and pages for all its tokens."""
        view = self.view
        size = self.view.facts.page_size
        if self.is_full or sequence.state != "waiting":  # it was evicted for this plan
            return False
        if any(away.rank < sequence.rank for away in self._away):
            return False
        hits = view.hits(sequence)
        num_tokens = min(len(sequence.tokens) + 1, view.facts.max_length)
        needed = num_pages(num_tokens, size) - len(hits)
        self._ledger.share(hits)
        is_lacking = self._ledger.free < needed or self._ledger.free - self._promise() < needed
        if is_lacking and self.num_running:
            self._ledger.give(hits)
            return False
        self._admitted.append(sequence.id)
        self._enter(sequence, len(hits), len(hits) * size)
        return True

    def plan(self, wake: float | None = None) -> Plan:
        """Return the plan.

        Args:
            wake: Time at which the policy wants to be asked again.
        """
        return Plan(
            singles=tuple(self._singles),
            pieces=tuple(self._pieces),
            admit=tuple(self._admitted),
            evict=tuple(self.evicted),
            restore=tuple(self._restored),
            wake=wake,
        )

    def _restore(self) -> None:
        facts = self.view.facts
        swapped = self.view.swapped
        for number, sequence in enumerate(swapped):
            pages = num_pages(sequence.computed, facts.page_size)
            is_alone = self.num_running == 0
            if self.num_running >= facts.max_running or self._ledger.free < pages + (not is_alone):
                self._away = [*swapped[number:]]
                return
            self._ledger.take(pages)
            self._restored.append(sequence.id)
            self._enter(sequence, pages, sequence.computed)

    def _num_left(self, sequence: Sequence) -> int:
        """Return the tokens of a running sequence until the next is drawn."""
        computed = self._computed.get(sequence.id, sequence.computed)
        return len(sequence.tokens) - computed

    def _num_held(self, sequence: Sequence) -> int:
        """Return the pages of a running sequence, those that it grows by included."""
        return self._held.get(sequence.id, len(sequence.pages))

    def _enter(self, sequence: Sequence, num_pages: int, computed: int) -> None:
        self._running[sequence.id] = sequence
        self._entered.add(sequence.id)
        self._held[sequence.id] = num_pages
        self._computed[sequence.id] = computed

    def _promise(self) -> int:
        """Return the pages that running prompts still need, so that admissions leave them."""
        size = self.view.facts.page_size
        held = self._held
        promise = 0
        for sequence in self._running.values():
            num_held = held.get(sequence.id) or len(sequence.pages)
            num_tokens = len(sequence.tokens)
            if num_tokens > num_held * size:
                promise += num_pages(num_tokens, size) - num_held
        return promise

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Take the pages for more tokens, preempting others; False if `sequence` had to go."""
        size = self.view.facts.page_size
        num_held = self._num_held(sequence)
        end = self._computed.get(sequence.id, sequence.computed) + count
        needed = max(num_pages(end, size) - num_held, 0)
        while self._ledger.free < needed:
            candidates = self._candidates(sequence)
            if not candidates or sequence.id in self._entered:
                return False
            victim, kind = self.view.facts.victim(candidates)
            self._leave(victim)
            self.evicted.append(Eviction(victim.id, kind))
            self._away += [victim] if kind == "swap" else []
            if victim is sequence:
                return False
        self._ledger.take(needed)
        self._held[sequence.id] = num_held + needed
        self._used.add(sequence.id)
        return True

    def _candidates(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that may give their pages back for another, or it for them.

        They have no work so far, or a lower priority than the other one.
        """
        priority = sequence.request.priority
        running = [o for o in self._running.values() if o.id not in self._entered]
        return [o for o in running if o.id not in self._used or o.request.priority < priority]

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of the plan, with its work."""
        id_ = sequence.id
        del self._running[id_]
        self._ledger.give(sequence.pages)
        if id_ in self._used:
            self._used.discard(id_)
            self._singles = [single for single in self._singles if single != id_]
            self._pieces = [piece for piece in self._pieces if piece.id != id_]
            self._ledger.take(len(sequence.pages) - self._held.pop(id_, len(sequence.pages)))
