# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules that every plan keeps, whichever policy made it and whatever executes it."""

from __future__ import annotations

from typing import NoReturn

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.plan import Plan, PlanError, PromptPiece
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView


def check(plan: Plan, view: InstanceView, policy: str) -> None:
    """Raise if a plan breaks a rule.

    Args:
        plan: Plan of the policy.
        view: What the policy saw.
        policy: Its name, for the message.

    Raises:
        PlanError: Names the policy and the rule.
    """
    _Check(plan, view, policy).run()


class _Check:
    """One plan with the state it starts from."""

    def __init__(self, plan: Plan, view: InstanceView, policy: str):
        self.plan = plan
        self.view = view
        self.policy = policy
        self.ledger = view.ledger()
        self.running = {sequence.id: sequence for sequence in view.running}
        self.left: dict[int, int] = {}
        """Tokens left of the sequences that enter."""
        self.held: dict[int, int] = {}
        """Pages of the sequences that enter."""

    def run(self) -> None:
        plan = self.plan
        if plan.admit or plan.restore or plan.evict:
            self.check_movements()
        self.check_sequences()
        self.check_shape()
        size = self.view.facts.page_size
        for id_ in plan.singles:
            sequence = self.running[id_]
            num_tokens = len(sequence.tokens)
            num_left = self.count(id_) if self.left else num_tokens - sequence.computed
            if num_left != 1:
                self.fail("single", f"sequence {id_} has not 1 token left")
            if num_tokens > len(sequence.pages) * size:
                self.grow(id_, 1)
        for piece in self.plan.pieces:
            self.check_piece(piece)
            self.grow(piece.id, piece.count)
        self.require("pages", self.ledger.free >= 0, f"{-self.ledger.free} pages are lacking")

    def require(self, rule: str, holds: bool, detail: str) -> None:
        if not holds:
            self.fail(rule, detail)

    def fail(self, rule: str, detail: str) -> NoReturn:
        raise PlanError(self.policy, rule, detail)

    def check_movements(self) -> None:
        plan = self.plan
        view = self.view
        facts = self.view.facts
        moved = [*plan.admit, *plan.restore, *(eviction.id for eviction in plan.evict)]
        self.require("once", len(set(moved)) == len(moved), f"{moved} names a sequence twice")
        for eviction in plan.evict:
            sequence = self.running.pop(eviction.id, None)
            self.require("evict", sequence is not None, f"sequence {eviction.id} does not run")
            if sequence is not None:
                self.ledger.give(sequence.pages)
        swapped = {sequence.id: sequence for sequence in view.swapped}
        for id_ in plan.restore:
            self.require("restore", id_ in swapped, f"sequence {id_} is not swapped")
            self.enter(swapped[id_], num_pages(swapped[id_].computed, facts.page_size))
            self.left[id_] = swapped[id_].left
        waiting = view.find_waiting(plan.admit)
        for id_ in plan.admit:
            self.require("admit", id_ in waiting, f"sequence {id_} does not wait")
            hits = view.hits(waiting[id_])
            self.ledger.share(hits)
            self.enter(waiting[id_], 0)
            self.held[id_] = len(hits)
            self.left[id_] = len(waiting[id_].tokens) - len(hits) * facts.page_size
        total = len(self.running) + len(view.busy) + view.num_moving
        self.require(
            "max_running",
            total <= facts.max_running or not (plan.admit or plan.restore),
            f"{total} sequences would run, at most {facts.max_running}",
        )

    def enter(self, sequence: Sequence, num_pages: int) -> None:
        self.running[sequence.id] = sequence
        self.held[sequence.id] = num_pages
        self.ledger.take(num_pages)

    def check_sequences(self) -> None:
        plan = self.plan
        ids = [*plan.singles, *(piece.id for piece in plan.pieces)]
        self.require("free", self.view.is_free or not ids, "as many steps run as may")
        if len(set(ids)) < len(ids):
            self.fail("once", f"{ids} names a sequence twice")
        absent = [id_ for id_ in ids if id_ not in self.running]
        if absent:
            self.fail("running", f"sequence {absent[0]} does not run")

    def check_shape(self) -> None:
        shapes = self.view.facts.shapes
        if shapes is not None:
            number = len(self.plan.singles)
            counts = [piece.count for piece in self.plan.pieces]
            fits = number <= shapes.singles and shapes.fitting(counts) is not None
            detail = f"{number} singles and pieces of {counts} fit none of {shapes}"
            self.require("shape", fits, detail)

    def check_piece(self, piece: PromptPiece) -> None:
        num_left = self.count(piece.id)
        detail = f"{piece.count} tokens of sequence {piece.id}, which has {num_left} left"
        self.require("count", 1 <= piece.count <= num_left, detail)

    def count(self, id_: int) -> int:
        if id_ in self.left:
            return self.left[id_]
        sequence = self.running[id_]
        return len(sequence.tokens) - sequence.computed

    def grow(self, id_: int, count: int) -> None:
        """Count the pages that the tokens of a sequence need beyond its table."""
        sequence = self.running[id_]
        end = len(sequence.tokens) - self.count(id_) + count
        held = self.held.get(id_, len(sequence.pages))
        self.ledger.take(max(num_pages(end, self.view.facts.page_size) - held, 0))
