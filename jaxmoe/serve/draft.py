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
        self._held = {sequence.id: len(sequence.pages) for sequence in view.running}
        self._computed = {sequence.id: sequence.computed for sequence in view.running}
        self._used: set[int] = set()
        self._admitted: list[int] = []
        self._restored: list[int] = []
        self._away = list[Sequence]()
        self._singles: list[int] = []
        self._pieces: list[PromptPiece] = []
        self._restore()

    @property
    def num_running(self) -> int:
        """Sequences that run after what was drafted so far, and those that move."""
        return len(self._running) + len(self.view.busy) + self.view.num_moving

    def running(self, keep: Callable[[Sequence], bool] = lambda sequence: True) -> list[Sequence]:
        """Return the running sequences without work so far, in order.

        Args:
            keep: Which of them to return.
        """
        return [o for o in self._running.values() if o.id not in self._used and keep(o)]

    def decoding(self) -> list[Sequence]:
        """Return the running sequences without work of which one token is left."""
        return self.running(lambda sequence: self.left(sequence) == 1)

    def prompts(self) -> list[Sequence]:
        """Return the running sequences without work of which more than one token is left."""
        return self.running(lambda sequence: self.left(sequence) > 1)

    def left(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence until the next is drawn; cached ones do not count."""
        if sequence.id in self._computed:
            return len(sequence.tokens) - self._computed[sequence.id]
        return len(sequence.tokens) - len(self.view.hits(sequence)) * self.view.facts.page_size

    def tokens(self) -> int:
        """Return the tokens drafted so far."""
        return len(self._singles) + sum(self.counts())

    def counts(self) -> list[int]:
        """Return the tokens of each piece drafted so far."""
        return [piece.count for piece in self._pieces]

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
        if sequence.id not in self._running or not self._grow(sequence, 1):
            return False
        self._singles.append(sequence.id)
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
        if self.num_running >= view.facts.max_running:
            return False
        if any(away.rank < sequence.rank for away in self._away):
            return False
        hits = view.hits(sequence)
        needed = num_pages(len(sequence.tokens) + 1, size) - len(hits)
        self._ledger.share(hits)
        if self._ledger.free - self._promise() < needed and self.num_running:
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

    def _enter(self, sequence: Sequence, num_pages: int, computed: int) -> None:
        self._running[sequence.id] = sequence
        self._held[sequence.id] = num_pages
        self._computed[sequence.id] = computed

    def _promise(self) -> int:
        """Return the pages that running prompts still need, so that admissions leave them."""
        size = self.view.facts.page_size
        running = self._running.values()
        return sum(max(num_pages(len(o.tokens), size) - self._held[o.id], 0) for o in running)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Take the pages for more tokens, preempting others; False if `sequence` had to go."""
        size = self.view.facts.page_size
        end = self._computed[sequence.id] + count
        needed = max(num_pages(end, size) - self._held[sequence.id], 0)
        while self._ledger.free < needed:
            candidates = [o for o in self.running() if o.id not in self._entered()]
            if not candidates or sequence.id in self._entered():
                return False
            victim, kind = self.view.facts.victim(candidates)
            del self._running[victim.id]
            self._ledger.give(victim.pages)
            self.evicted.append(Eviction(victim.id, kind))
            self._away += [victim] if kind == "swap" else []
            if victim is sequence:
                return False
        self._ledger.take(needed)
        self._held[sequence.id] += needed
        self._used.add(sequence.id)
        return True

    def _entered(self) -> set[int]:
        return {*self._admitted, *self._restored}
