# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The way of the queries through all ranks, and of what is made of them home: both passes' loop.

In every step the queries at hand go on to the left while the rank works on them, and what was made
in the step before goes home (schedule.py says along which pairs). Nothing of a step waits for the
arithmetic of the same step.

Without a brake all hops of the queries, which depend on no arithmetic, could be made at once, and
results could go home when all is done: every rank would keep N copies of either, and the latter
would travel beside no arithmetic. `jax.lax.optimization_barrier` hands out the queries of a step
when what was made in the step before is there, and what was under way meanwhile has come home.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool
from pallas_kernels.flash_attention.kernels import Kernels
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.ring.step import Parcel, Transport, send
from pallas_kernels.token_ring_attention.schedule import Pairs, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The static part of a call: hashable, fixed at trace time."""

    axis_name: str
    schedule: Schedule
    rules: Rules
    """Of the mask, among the tokens of one rank."""
    transport: Transport
    kernels: Kernels

    @property
    def options(self) -> dict[str, Any]:
        """Of `attend_and_send` and `differentiate_and_send`."""
        names = ("axis_name", "transport", "kernels")
        return {name: getattr(self, name) for name in names}


class Results(NamedTuple):
    """How results come by pieces of the queries, add up, and travel."""

    by_piece: Callable[[int, Any], Sequence[Any]]
    """What a step has made of every piece, from what its work has found."""
    join: Callable[[Any, Any], Any]
    """Of the same queries over other keys."""
    pack: Callable[[Any], Array]
    unpack: Callable[[Array, Bool[Array, ""] | None], Any]
    """Of a message, and whether one came at all (None: to every rank); nothing is zeros."""


Work = Callable[
    [int, Sequence[tuple[Array, ...]], Any, Sequence[Parcel]],
    tuple[Any, Any, tuple[Array, ...]],
]
"""(step, what is held of every piece, what is kept here, parcels)
-> (what is found for the queries, what is kept here, what has arrived)."""


def circulate(
    ring: Ring, held: Sequence[tuple[Array, ...]], work: Work, results: Results
) -> tuple[list[Any], Any]:
    """Every rank works on all queries; each has what was made of its own back.

    Args:
        ring: the static part.
        held: of every piece of a rank's queries, what travels.
        work: of a step; at step 0 on its own queries.
        results: of the work.

    Returns:
        Of every piece, everything joined; and what is kept in the end.
    """
    schedule = ring.schedule
    is_direct = schedule.form == "direct"
    home: list[Any] = []
    kept: Any = None
    homeward: list[Parcel] = []

    def receive(messages: Sequence[Array]) -> list[Any]:
        pairs = (parcel.pairs for parcel in homeward)
        return [
            results.unpack(message, _is_reached(ways, ring))
            for message, ways in zip(messages, pairs, strict=True)
        ]

    def join(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return [results.join(a, b) for a, b in zip(some, others, strict=True)]

    for step in range(schedule.ranks):
        hops = [
            Parcel(x, pairs)
            for piece in schedule.pieces
            if (pairs := schedule.hop(step, piece))
            for x in held[piece]
        ]
        found, kept, arrived = work(step, held, kept, [*hops, *homeward])
        if arrived:
            here = found, kept, arrived, home
            found, kept, arrived, home = jax.lax.optimization_barrier(here)
        made = list(results.by_piece(step, found))
        queries, back = iter(arrived[: len(hops)]), receive(arrived[len(hops) :])
        held = [tuple(next(queries) for _ in piece) for piece in held] if hops else []
        if step == 0:
            home = made
        elif is_direct and back:
            home = join(home, back)
        elif back:
            made = join(back, made)
        ways = [schedule.homeward(step, piece) for piece in schedule.pieces]
        homeward = [
            Parcel(results.pack(one), pairs) for one, pairs in zip(made, ways, strict=True) if pairs
        ]
    if not homeward:
        return home, kept
    back = receive(send(homeward, ring.axis_name, ring.transport))
    return join(home, back) if is_direct else back, kept


def _is_reached(pairs: Pairs, ring: Ring) -> Bool[Array, ""] | None:
    """Whether something is sent to this rank; None where it is to all."""
    targets = {target for _, target in pairs}
    ranks = range(ring.schedule.ranks)
    if len(targets) == len(ranks):
        return None
    return jnp.asarray([rank in targets for rank in ranks])[jax.lax.axis_index(ring.axis_name)]
