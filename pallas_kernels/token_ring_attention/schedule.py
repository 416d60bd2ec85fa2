# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Who works on whose queries when, what travels meanwhile, and its bytes. Plain Python.

N ranks, steps 0 .. N - 1. At step s rank r holds the queries of rank r + s (mod N): they all move
to the left, r -> r - 1, one rank a step, and rest after step N - 1. Keys never move. Where r + s
reaches N, the queries come from an earlier rank than the keys do. What that means:

    halves   a causal zigzag layout. Later queries: whole, x the low half of the keys; earlier ones:
             their high half x all keys (half_blocks.py). Low halves stop travelling at rank 0.
    later    a causal contiguous layout. Earlier queries see nothing, and stop at rank 0.
    every    no causality, or positions of the caller's: queries visit every rank, masks decide.

    direct          what a rank made at step s goes to its owner at step s + 1, over s ranks at
                    once; the last one after the loop, beside nothing. For full-mesh links.
    co_travelling   a running result follows its queries one step behind, always to the left, in
                    float32, and is home after N hops. For rings and tori, where distance counts.

Queries, results and (backward) gradients of the output travel as messages: [B S N H] activations
with one float32 number per query and head behind them, in the same array (messages.py).

Sources: TokenRing, arXiv 2412.20501; its published code has no backward pass. Ours carries
(Q, lse, dO, delta) along the same ways, and float32 dQ home as results go.
"""

import dataclasses
from typing import Literal, NamedTuple

Visits = Literal["halves", "later", "every"]
Form = Literal["direct", "co_travelling"]
Pairs = tuple[tuple[int, int], ...]

LOW, HIGH = 0, 1
"""Pieces of a rank's queries where they are halves; elsewhere the whole is piece 0."""


class Sizes(NamedTuple):
    """Of the local shards."""

    batch: int
    length: int
    heads: int
    """Of the queries."""
    width: int
    """Of one head of the queries and keys."""
    value_width: int
    itemsize: int
    """Bytes of one number of the activations."""
    token_arrays: int = 0
    """Positions and segment ids that travel with the queries, int32 [B S]."""


class Traffic(NamedTuple):
    """What is sent, by all ranks together."""

    permutes: int
    """Collectives; each is a message of one piece in one step."""
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Static, hashable: the same on every rank."""

    ranks: int
    visits: Visits
    form: Form

    @property
    def pieces(self) -> range:
        """The pieces in which a rank's queries travel."""
        return range(2 if self.visits == "halves" else 1)

    def owner(self, rank: int, step: int) -> int:
        """Whose queries a rank holds."""
        return (rank + step) % self.ranks

    def is_earlier(self, rank: int, step: int) -> bool:
        """Whether those queries come from an earlier rank than the keys there."""
        return rank + step >= self.ranks

    def holds(self, rank: int, step: int, piece: int) -> bool:
        """Whether a piece of the owner's queries gets there at all."""
        goes_on = self.visits == "every" or (self.visits == "halves" and piece == HIGH)
        return goes_on or not self.is_earlier(rank, step)

    def hop(self, step: int, piece: int) -> Pairs:
        """Ways of the queries during a step."""
        if step == self.ranks - 1:
            return ()
        ranks = range(self.ranks)
        left = [(rank, (rank - 1) % self.ranks) for rank in ranks]
        return tuple(pair for pair in left if self.holds(pair[1], step + 1, piece))

    def homeward(self, step: int, piece: int) -> Pairs:
        """Ways of what was made at a step, during the step after it (the last: after the loop)."""
        if self.ranks == 1:
            return ()
        ranks = range(self.ranks)
        if self.form == "co_travelling":
            return tuple((rank, (rank - 1) % self.ranks) for rank in ranks)
        if step == 0:
            return ()
        return tuple((r, self.owner(r, step)) for r in ranks if self.holds(r, step, piece))

    def visible_scores(self, rank: int, step: int, length: int) -> int:
        """Scores per head that a rank's block has and no causal mask hides.

        Args:
            rank: that works.
            step: of the loop.
            length: of a local shard.
        """
        if self.visits == "every":
            return length * length
        if step == 0:
            return length * (length + 1) // 2
        if self.visits == "halves":
            return 2 * (length // 2) ** 2
        return 0 if self.is_earlier(rank, step) else length * length

    def forward_traffic(self, sizes: Sizes) -> Traffic:
        """Queries to the left, (out, lse) home.

        Direct, without what travels with the queries of packed documents, and with c tokens a rank:
        N (N - 1) c heads (width b + value_width b + 4) bytes, and 3/4 of it in halves.
        """
        length = sizes.length // len(self.pieces)
        queries = sizes.batch * length * sizes.heads * sizes.width * sizes.itemsize
        itemsize = 4 if self.form == "co_travelling" else sizes.itemsize
        results = message_bytes(sizes, sizes.value_width, length, itemsize)
        return self._traffic((queries, *_tokens(sizes, length)), results)

    def backward_traffic(self, sizes: Sizes) -> Traffic:
        """(Q, lse, dO, delta) to the left, dQ home.

        Direct, likewise: N (N - 1) c heads (width b + value_width b + 8 + 4 width) bytes, and 3/4
        of it in halves.
        """
        length = sizes.length // len(self.pieces)
        widths = sizes.width, sizes.value_width
        if sizes.width == sizes.value_width:  # one message
            queries = (message_bytes(sizes, sizes.width, 2 * length, sizes.itemsize),)
        else:
            queries = tuple(message_bytes(sizes, x, length, sizes.itemsize) for x in widths)
        d_q = sizes.batch * length * sizes.heads * sizes.width * 4
        return self._traffic((*queries, *_tokens(sizes, length)), d_q)

    def _traffic(self, travelling: tuple[int, ...], returning: int) -> Traffic:
        permutes = total = 0
        for step in range(self.ranks):
            for piece in self.pieces:
                if hop := self.hop(step, piece):
                    permutes += len(travelling)
                    total += len(hop) * sum(travelling)
                if home := self.homeward(step, piece):
                    permutes += 1
                    total += len(home) * returning
        return Traffic(permutes, total)


def statistic_rows(length: int, width: int, itemsize: int) -> int:
    """Rows [N H] of a message behind its `length` own: one float32 a head for each of them.

    Args:
        length: of the activations.
        width: of a head.
        itemsize: bytes of one number of the activations.
    """
    return -(-length * max(1, 4 // itemsize) // width)


def message_bytes(sizes: Sizes, width: int, length: int, itemsize: int) -> int:
    """Of activations [B S N H] with one float32 number per query and head behind them.

    Args:
        sizes: of the local shards.
        width: of a head.
        length: of the piece.
        itemsize: bytes of one number of the activations.
    """
    rows = length + statistic_rows(length, width, itemsize)
    return sizes.batch * rows * sizes.heads * width * itemsize


def _tokens(sizes: Sizes, length: int) -> tuple[int, ...]:
    return (4 * sizes.batch * length,) * sizes.token_arrays
