# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends queries through all ranks and their results home: the loop of both passes.

In every step the held queries move one rank to the left while the rank works on them, and the
results of the step before travel home, along the pairs of schedule.py. No transfer waits for the
arithmetic of its own step.

Hops of the queries depend on no arithmetic. An optimization barrier per step keeps XLA
from running all of them first, which would keep N copies on every rank, and from sending all
results at the end, beside no arithmetic.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.ring.step import Links, Parcel, send
from pallas_kernels.token_ring_attention.schedule import Pairs, TokenRingSchedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryRing:
    """Static part of a call of token_ring_attention; hashable."""

    schedule: TokenRingSchedule
    rules: Rules
    """Mask rules among the tokens of one rank."""
    links: Links
    """Mesh axis, transport and implementation."""

    @property
    def axis_name(self) -> str:
        """Mesh axis of the ring."""
        return self.links.axis_name


class Results(NamedTuple):
    """How the results of a pass are split by piece, joined and sent."""

    by_piece: Callable[[int, Any], Sequence[Any]]
    """Split the result of a step by piece of the queries."""
    join: Callable[[Any, Any], Any]
    """Join two results of the same queries over different keys."""
    pack: Callable[[Any], Array]
    """Make a message of a result."""
    unpack: Callable[[Array, Bool[Array, ""] | None], Any]
    """Read a message; the second argument is whether one arrived, None if every rank gets one."""


Work = Callable[
    [int, Sequence[tuple[Array, ...]], Any, Sequence[Parcel]],
    tuple[Any, Any, tuple[Array, ...]],
]
"""(step, held arrays by piece, sums kept here, parcels)
-> (results for the queries, sums kept here, arrays that arrived)."""


def circulate(
    ring: QueryRing, query_pieces: Sequence[tuple[Array, ...]], work: Work, results: Results
) -> tuple[list[Any], Any]:
    """Run all steps, so that every rank works on all queries.

    Args:
        ring: Static part of the call.
        query_pieces: Arrays that travel, for every piece of this rank's queries.
        work: Arithmetic of a step; at step 0 on this rank's own queries.
        results: How results are split, joined and sent.

    Returns:
        The joined results of every piece of this rank's queries, and the sums kept here.
    """
    schedule = ring.schedule
    is_direct = schedule.form == "direct"
    home: list[Any] = []
    carry: Any = None
    homeward: list[Parcel] = []

    def receive(messages: Sequence[Array]) -> list[Any]:
        pairs = (parcel.pairs for parcel in homeward)
        return [
            results.unpack(message, _is_reached(ways, ring))
            for message, ways in zip(messages, pairs, strict=True)
        ]

    def join(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return [results.join(a, b) for a, b in zip(first, second, strict=True)]

    for step in range(schedule.ranks):
        hops = [
            Parcel(x, pairs)
            for piece in schedule.pieces
            if (pairs := schedule.hop(step, piece))
            for x in query_pieces[piece]
        ]
        partial, carry, arrived = work(step, query_pieces, carry, [*hops, *homeward])
        if arrived:
            outcome = partial, carry, arrived, home
            partial, carry, arrived, home = jax.lax.optimization_barrier(outcome)
        made = list(results.by_piece(step, partial))
        queries = iter(arrived[: len(hops)])
        back = receive(arrived[len(hops) :])
        query_pieces = (
            [tuple(next(queries) for _ in piece) for piece in query_pieces] if hops else []
        )
        if step == 0:
            home = made
        elif is_direct and back:
            home = join(home, back)
        elif back:
            made = join(back, made)
        ways = [schedule.homeward(step, piece) for piece in schedule.pieces]
        homeward = [
            Parcel(results.pack(result), pairs)
            for result, pairs in zip(made, ways, strict=True)
            if pairs
        ]
    if not homeward:
        return home, carry
    back = receive(send(homeward, ring.axis_name, ring.links.transport))
    return join(home, back) if is_direct else back, carry


def _is_reached(pairs: Pairs, ring: QueryRing) -> Bool[Array, ""] | None:
    """Return whether this rank receives something; None if every rank does."""
    targets = {target for _, target in pairs}
    ranks = range(ring.schedule.ranks)
    if len(targets) == len(ranks):
        return None
    return jnp.asarray([rank in targets for rank in ranks])[jax.lax.axis_index(ring.axis_name)]
