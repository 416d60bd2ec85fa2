# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a rank's arrays by route (heads) and piece (tokens) of a schedule, and joins them again.

A cut array is a list of routes, each a list of pieces: `cut[route][piece]` is an array or a tuple
of arrays, None where nothing has arrived. All blocks of a step are one batch, so that one call of
the attention does the arithmetic beside which everything travels.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.ring.step import Links, Parcel
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.ring_attention.schedule import Hop, RingSchedule

Cut = list[list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyRing:
    """Static part of a call of ring attention; hashable."""

    schedule: RingSchedule
    rules: Rules
    is_by_position: bool
    """Whether the mask compares positions. If not, a rank's own tokens count from 0, and it sees
    whole blocks of other ranks, except for segments."""
    links: Links
    """Mesh axis, transport and implementation."""

    @property
    def axis_name(self) -> Any:
        """`AxisName` of the ring."""
        return self.links.axis_name

    def rules_at(self, step: int) -> Rules:
        """Return the mask rules of a step."""
        if step == 0 or self.is_by_position:
            return self.rules
        return dataclasses.replace(self.rules, causal=False, window=None)


class Ids(NamedTuple):
    """Positions and segments of all ranks [ranks B S] i32; None where the mask needs none."""

    positions: Array | None
    segment_ids: Array | None


def cut(x: Array, ring: KeyRing, *, tokens: int = 1, heads: int = 2) -> Cut:
    """Cut an array along its dimensions of tokens and heads."""
    schedule = ring.schedule
    routes = jnp.split(x, len(schedule.routes), axis=heads)
    return [jnp.split(route, schedule.pieces, axis=tokens) for route in routes]


def join(parts: Cut, *, tokens: int = 1, heads: int = 2) -> Array:
    """Join what `cut` has cut."""
    return jnp.concatenate([jnp.concatenate(route, tokens) for route in parts], heads)


def pack(k: Array, v: Array) -> Array:
    """Return keys and values, or their gradients, as one array [B S M H+Hv].

    A TPU has at most five collective permutes under way at once; with separate arrays for keys and
    values the backward pass would wait.
    """
    return jnp.concatenate([k, v], axis=-1)


def unpack(keys: Array, width: int) -> tuple[Array, Array]:
    """Split what `pack` has joined; keys are `width` wide."""
    return keys[..., :width], keys[..., width:]


def zip_cuts(record: Callable[..., Any], *cuts: Cut) -> Cut:
    """Return `record(*pieces)` for the pieces at every place of the cuts."""
    return [
        [record(*pieces) for pieces in zip(*routes, strict=True)]
        for routes in zip(*cuts, strict=True)
    ]


def where_rank(table: Sequence[bool], rank: Array, x: Array, fill: float) -> Array:
    """Return x on ranks where the table is true, a constant on others."""
    if all(table):
        return x
    return jnp.where(jnp.asarray(table)[rank], x, jnp.asarray(fill, x.dtype))


def by_block(ring: KeyRing, step: int, rank: Array, side: Literal["q", "k"], parts: Cut) -> Any:
    """Return the queries or keys of all blocks of a step, stacked in the batch."""
    blocks: list[Any] = []
    for route, pieces in zip(ring.schedule.routes, parts, strict=True):
        for block in route.steps[step].blocks:
            blocks.append(_pick(pieces, getattr(block, side), rank))
    return blocks[0] if len(blocks) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *blocks)


def blocks_of(ring: KeyRing, step: int, *results: Array) -> Iterator[tuple[int, Any, list[Array]]]:
    """Yield (route, block, its part of the results); the inverse of `by_block`."""
    routes = ring.schedule.routes
    number = sum(len(route.steps[step].blocks) for route in routes)
    split = [jnp.split(x, number) for x in results]
    at_block = 0
    for at, route in enumerate(routes):
        for block in route.steps[step].blocks:
            yield at, block, [parts[at_block] for parts in split]
            at_block += 1


def own_tokens(ids: Ids, ring: KeyRing, rank: Array) -> Tokens:
    """Return the tokens of a rank's attention to itself."""
    positions, segments = (None if x is None else _of_rank(x, rank) for x in ids)
    positions = positions if ring.is_by_position else None
    return Tokens(positions, positions, segments, segments)


def is_one_kernel(ring: KeyRing) -> bool:
    """Return whether the single-kernel form sends at most a third more than the schedule.

    In the kernels of ring/remote_dma/ring_keys.py all keys visit all ranks, one way round.
    """
    schedule = ring.schedule
    if ring.links.transport != "remote_dma" or len(schedule.routes) != 1 or schedule.ranks == 1:
        return False
    sent = sum(len(hop.pairs) for step in schedule.routes[0].steps for hop in step.keys)
    return 4 * sent >= 3 * schedule.pieces * schedule.ranks * (schedule.ranks - 1)


def numbered_tokens(ids: Ids, ring: KeyRing, rank: Array, width: int) -> Tokens:
    """Return the tokens of a rank's attention to all ranks.

    Where the mask does not compare positions, numbers that rise along every document are used.
    """
    positions, segments = (None if x is None else _of_rank(x, rank) for x in ids)
    if not ring.is_by_position:
        layout = "zigzag" if ring.schedule.pieces == 2 else "contiguous"
        positions = _of_rank(layout_positions(ring.schedule.ranks, width, layout), rank)
    return Tokens(positions, positions, segments, segments)


def block_tokens(ids: Ids, ring: KeyRing, step: int, rank: Array) -> Tokens:
    """Return the tokens of the blocks of a step after the first."""

    def both(x: Array | None) -> tuple[Array | None, Array | None]:
        if x is None:
            return None, None
        pieces = ring.schedule.pieces
        mine: Cut = []
        theirs: Cut = []
        for route in ring.schedule.routes:
            owner = (rank - route.direction * step) % ring.schedule.ranks
            mine.append(jnp.split(_of_rank(x, rank), pieces, axis=1))
            theirs.append(jnp.split(_of_rank(x, owner), pieces, axis=1))
        return (
            by_block(ring, step, rank, "q", mine),
            by_block(ring, step, rank, "k", theirs),
        )

    q_positions, kv_positions = both(ids.positions if ring.is_by_position else None)
    return Tokens(q_positions, kv_positions, *both(ids.segment_ids))


def key_hops(ring: KeyRing, step: int) -> list[tuple[int, Hop]]:
    """Return the hops of keys that leave at a step, with their routes."""
    routes = enumerate(ring.schedule.routes)
    return [(at, hop) for at, route in routes for hop in route.steps[step].keys]


def gradient_hops(ring: KeyRing, step: int) -> list[tuple[int, Hop]]:
    """Return the hops of gradients that leave at a step, with their routes."""
    routes = enumerate(ring.schedule.routes)
    return [(at, hop) for at, route in routes for hop in route.steps[step].gradients]


def key_parcels(ring: KeyRing, step: int, local: Cut, remote: Cut) -> list[Parcel]:
    """Return the keys that leave at a step: a rank's own, or those received in the step before."""
    return [
        Parcel((local if hop.is_at_home else remote)[at][hop.piece], hop.pairs)
        for at, hop in key_hops(ring, step)
    ]


def arrived_keys(ring: KeyRing, step: int, arrived: Iterator[Array]) -> Cut:
    """Take the keys that arrived during a step off `arrived`."""
    keys = nothing(ring)
    for at, hop in key_hops(ring, step):
        add(keys, at, hop.piece, next(arrived))
    return keys


def nothing(ring: KeyRing) -> Cut:
    """Return a cut with None everywhere."""
    return [[None] * ring.schedule.pieces for _ in ring.schedule.routes]


def add(total: Cut, route: int, piece: int, more: Array) -> None:
    """Add to one piece; a rank that received nothing holds zeros."""
    so_far = total[route][piece]
    total[route][piece] = more if so_far is None else so_far + more


def pace(arrived: tuple[Array, ...], results: Any) -> tuple[tuple[Array, ...], Any]:
    """Return the same values behind a barrier, so that a hop waits for the step before it.

    Without it all hops could run first, with the keys of every owner in memory at once.
    """
    return jax.lax.optimization_barrier((arrived, results))


def _of_rank(x: Array, rank: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, rank, 0, keepdims=False)


def _pick(pieces: list[Any], table: Sequence[int | None], rank: Array) -> Any:
    """Return the piece that the table names for this rank; any piece where it names none."""
    names = sorted({piece for piece in table if piece is not None})
    array = pieces[names[0]]
    for piece in names[1:]:
        is_this = jnp.asarray([name == piece for name in table])[rank]
        array = jax.tree.map(functools.partial(jnp.where, is_this), pieces[piece], array)
    return array
