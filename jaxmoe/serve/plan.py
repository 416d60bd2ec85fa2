# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plan of a step: which sequences are computed, admitted and evicted; and the shapes allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxmoe.errors import JaxmoeError

EvictionKind = Literal["recompute", "swap"]


class PlanError(JaxmoeError, RuntimeError):
    """A policy returned a plan that breaks a rule of `jaxmoe/serve/rules.py`."""

    def __init__(self, policy: str, rule: str, detail: str):
        super().__init__(f"policy {policy!r} breaks the rule {rule!r}: {detail}")
        self.policy = policy
        self.rule = rule


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPiece:
    """Part of a prompt to compute."""

    id: int
    """Sequence."""
    count: int
    """Tokens from the first that is not computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Eviction:
    """A running sequence that gives its pages back."""

    id: int
    """Sequence."""
    kind: EvictionKind = "recompute"
    """Whether its tokens are computed again later, or its pages are kept in host memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What an instance does next. Evictions come first, then restores, then admissions."""

    singles: tuple[int, ...] = ()
    """Sequences that compute their last token and draw the next."""
    pieces: tuple[PromptPiece, ...] = ()
    """Parts of prompts to compute beside."""
    admit: tuple[int, ...] = ()
    """Waiting sequences that become running."""
    evict: tuple[Eviction, ...] = ()
    """Running sequences that give their pages back."""
    restore: tuple[int, ...] = ()
    """Swapped sequences whose pages return from host memory."""
    wake: float | None = None
    """Time at which the policy wants to be asked again if there is nothing to do before."""

    @classmethod
    def of(
        cls,
        singles: Iterable[int],
        pieces: Iterable[PromptPiece] = (),
        *,
        admit: Iterable[int] = (),
        evict: Iterable[Eviction] = (),
    ) -> Plan:
        """Return a plan of any iterables.

        Args:
            singles: Sequences that draw a token.
            pieces: Parts of prompts.
            admit: Waiting sequences that become running.
            evict: Running sequences that give their pages back.
        """
        return cls(tuple(singles), tuple(pieces), tuple(admit), tuple(evict))

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes; 0 where the plan has no step."""
        return len(self.singles) + sum(piece.count for piece in self.pieces)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Compiled shapes of a step: R singles with P pieces of up to C tokens."""

    singles: int
    """Single tokens of every step (R)."""
    pieces: tuple[tuple[int, int], ...] = ()
    """Number and length (P, C) of the pieces, one compiled shape each beside `(0, 0)`."""

    @property
    def most_rows(self) -> int:
        """Sequences of the largest step (R + P)."""
        return self.singles + max((number for number, _ in self.pieces), default=0)

    def fitting(self, counts: Sequence[int]) -> tuple[int, int] | None:
        """Return the smallest compiled (P, C) that holds some pieces, None if there is none.

        Args:
            counts: Tokens of each piece.
        """
        if not counts:
            return (0, 0)
        fit = [(p * c, p, c) for p, c in self.pieces if len(counts) <= p and max(counts) <= c]
        return min(fit)[1:] if fit else None

    def room(self, counts: Sequence[int]) -> int:
        """Return the tokens that one more piece may have; 0 if no shape takes another.

        Args:
            counts: Tokens of the pieces so far.
        """
        largest = max(counts, default=0)
        return max((c for p, c in self.pieces if p > len(counts) and c >= largest), default=0)
