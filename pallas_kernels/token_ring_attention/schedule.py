# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans which queries a rank works on at every step, what travels meanwhile, and its bytes.

Plain Python, without arrays. N ranks, steps 0 .. N - 1. At step s rank r holds the queries of rank
r + s (mod N): they all move to the left, r -> r - 1, one rank a step, and stop after step N - 1.
Keys never move. Where r + s reaches N, the queries come from an earlier rank than the keys:

    halves   causal zigzag layout. Later queries: whole, x the low half of the keys; earlier ones:
             their high half x all keys (ring/half_blocks.py). Low halves stop at rank 0.
    later    causal contiguous layout. Earlier queries see nothing, and stop at rank 0.
    every    not causal, or positions given: queries visit every rank, and masks decide.

    direct          the result of step s goes to its owner during step s + 1, s ranks away; the last
                    one after the loop, beside no arithmetic. For full-mesh links.
    co_travelling   a running result follows its queries one step behind, always to the left, in
                    float32, and is home after N hops. For rings and tori, where distance counts.

Queries, results and gradients of the output travel as messages: activations [B S N H] followed by
one float32 number per query and head, in one array (messages.py).

Source: TokenRing, arXiv 2412.20501; its published code has no backward pass. The one here sends
(Q, lse, dO, delta) along the route of the queries, and float32 dQ along that of the results.
"""

import dataclasses
from typing import Literal

Visits = Literal["halves", "later", "every"]
Form = Literal["direct", "co_travelling"]
Pairs = tuple[tuple[int, int], ...]

LOW = 0
HIGH = 1
"""Pieces of a rank's queries for halves; for other visits the whole is piece 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRingSchedule:
    """Schedule of a call; static, hashable, the same on every rank."""

    ranks: int
    visits: Visits
    form: Form

    @property
    def pieces(self) -> range:
        """Pieces in which a rank's queries travel."""
        return range(2 if self.visits == "halves" else 1)

    def owner(self, rank: int, step: int) -> int:
        """Return the rank whose queries a rank holds."""
        return (rank + step) % self.ranks

    def is_earlier(self, rank: int, step: int) -> bool:
        """Return whether those queries come from an earlier rank than the keys there."""
        return rank + step >= self.ranks

    def holds(self, rank: int, step: int, piece: int) -> bool:
        """Return whether a piece of the owner's queries reaches the rank."""
        goes_on = self.visits == "every" or (self.visits == "halves" and piece == HIGH)
        return goes_on or not self.is_earlier(rank, step)

    def hop(self, step: int, piece: int) -> Pairs:
        """Return the pairs between which queries move during a step."""
        if step == self.ranks - 1:
            return ()
        ranks = range(self.ranks)
        leftward = [(rank, (rank - 1) % self.ranks) for rank in ranks]
        return tuple(pair for pair in leftward if self.holds(pair[1], step + 1, piece))

    def homeward(self, step: int, piece: int) -> Pairs:
        """Return the pairs between which the results of a step move, during the step after it."""
        if self.ranks == 1:
            return ()
        ranks = range(self.ranks)
        if self.form == "co_travelling":
            return tuple((rank, (rank - 1) % self.ranks) for rank in ranks)
        if step == 0:
            return ()
        return tuple((r, self.owner(r, step)) for r in ranks if self.holds(r, step, piece))


def statistic_rows(length: int, width: int, itemsize: int) -> int:
    """Return the rows [N H] of a message that hold one float32 per query and head.

    Args:
        length: Rows of activations.
        width: Width of a head.
        itemsize: Bytes of an element of the activations.
    """
    return -(-length * max(1, 4 // itemsize) // width)
