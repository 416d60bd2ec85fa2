# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A rank's arrays, cut as a schedule has it: by route (heads) and piece (tokens), and put together.

What is cut is a list of routes, each a list of pieces: `cut[route][piece]`, an array or a tuple of
arrays, None where nothing has arrived. All blocks of a step are one batch, so that one call of the
attention does the arithmetic beside which everything travels.

To add something that belongs to queries or keys: cut it, and take it `by_block`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import Kernels
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.ring.step import Parcel, Transport
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.ring_attention.schedule import Hop, Schedule

Cut = list[list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The static part of ring attention; hashable."""

    schedule: Schedule
    rules: Rules
    is_by_position: bool
    """Whether the mask compares positions. If not, a rank's own tokens count from 0, and of others'
    it sees whole blocks, but for segments."""
    axis_name: str
    transport: Transport
    """How parcels travel."""
    kernels: Kernels

    def rules_at(self, step: int) -> Rules:
        """Of the mask."""
        if step == 0 or self.is_by_position:
            return self.rules
        return dataclasses.replace(self.rules, causal=False, window=None)


class Ids(NamedTuple):
    """Of all ranks' tokens, where the mask needs them: [ranks B S] i32."""

    positions: Array | None
    segment_ids: Array | None


def cut(x: Array, ring: Ring, *, tokens: int = 1, heads: int = 2) -> Cut:
    """Routes and pieces of a rank's array; its dimensions of tokens and of heads."""
    schedule = ring.schedule
    routes = jnp.split(x, len(schedule.routes), axis=heads)
    return [jnp.split(route, schedule.pieces, axis=tokens) for route in routes]


def join(parts: Cut, *, tokens: int = 1, heads: int = 2) -> Array:
    """The inverse of `cut`."""
    return jnp.concatenate([jnp.concatenate(route, tokens) for route in parts], heads)


def pack(k: Array, v: Array) -> Array:
    """Keys and values, or their gradients, as they travel: one array, [B S M H+Hv]. A TPU has five
    collective permutes under way at once; with two arrays for each the backward pass waits."""
    return jnp.concatenate([k, v], axis=-1)


def unpack(keys: Array, width: int) -> tuple[Array, Array]:
    """The inverse of `pack`, of keys that are `width` wide."""
    return keys[..., :width], keys[..., width:]


def zip_cuts(record: Callable[..., Any], *cuts: Cut) -> Cut:
    """`record(*pieces)` of the pieces that stand in the same place."""
    return [
        [record(*pieces) for pieces in zip(*routes, strict=True)]
        for routes in zip(*cuts, strict=True)
    ]


def where_rank(table: Sequence[bool], rank: Array, x: Array, fill: float) -> Array:
    """x on the ranks that the table names, a constant on others."""
    if all(table):
        return x
    return jnp.where(jnp.asarray(table)[rank], x, jnp.asarray(fill, x.dtype))


def by_block(ring: Ring, step: int, rank: Array, side: Literal["q", "k"], parts: Cut) -> Any:
    """Of every block of a step its piece of queries or keys, one after the other in the batch."""
    found: list[Any] = []
    for route, pieces in zip(ring.schedule.routes, parts, strict=True):
        for block in route.steps[step].blocks:
            found.append(_pick(pieces, getattr(block, side), rank))
    return found[0] if len(found) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *found)


def blocks_of(ring: Ring, step: int, *results: Array) -> Iterator[tuple[int, Any, list[Array]]]:
    """(route, block, its part of the results): the inverse of `by_block`."""
    routes = ring.schedule.routes
    number = sum(len(route.steps[step].blocks) for route in routes)
    split = [jnp.split(x, number) for x in results]
    at_block = 0
    for at, route in enumerate(routes):
        for block in route.steps[step].blocks:
            yield at, block, [parts[at_block] for parts in split]
            at_block += 1


def own_tokens(ids: Ids, ring: Ring, rank: Array) -> Tokens:
    """For a rank's attention to its own tokens."""
    positions, segments = (None if x is None else _of_rank(x, rank) for x in ids)
    positions = positions if ring.is_by_position else None
    return Tokens(positions, positions, segments, segments)


def is_one_kernel(ring: Ring) -> bool:
    """Whether the kernels of remote_dma/ring_keys.py, in which all keys visit all ranks one way
    round, send at most a third more than the schedule would."""
    schedule = ring.schedule
    if ring.transport != "remote_dma" or len(schedule.routes) != 1 or schedule.ranks == 1:
        return False
    sent = sum(len(hop.pairs) for step in schedule.routes[0].steps for hop in step.keys)
    return 4 * sent >= 3 * schedule.pieces * schedule.ranks * (schedule.ranks - 1)


def numbered_tokens(ids: Ids, ring: Ring, rank: Array, width: int) -> Tokens:
    """For a rank's attention to all tokens: positions, or numbers that rise as the tokens of a
    document do, which comes to the same among ranks."""
    positions, segments = (None if x is None else _of_rank(x, rank) for x in ids)
    if not ring.is_by_position:
        layout = "zigzag" if ring.schedule.pieces == 2 else "contiguous"
        positions = _of_rank(layout_positions(ring.schedule.ranks, width, layout), rank)
    return Tokens(positions, positions, segments, segments)


def block_tokens(ids: Ids, ring: Ring, step: int, rank: Array) -> Tokens:
    """For the blocks of a later step."""

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


def key_hops(ring: Ring, step: int) -> list[tuple[int, Hop]]:
    """What leaves at a step, with its route."""
    routes = enumerate(ring.schedule.routes)
    return [(at, hop) for at, route in routes for hop in route.steps[step].keys]


def gradient_hops(ring: Ring, step: int) -> list[tuple[int, Hop]]:
    """The same of gradients."""
    routes = enumerate(ring.schedule.routes)
    return [(at, hop) for at, route in routes for hop in route.steps[step].gradients]


def key_parcels(ring: Ring, step: int, own: Cut, held: Cut) -> list[Parcel]:
    """Keys that leave at a step: a rank's own, or those that came in the step before."""
    return [
        Parcel((own if hop.is_at_home else held)[at][hop.piece], hop.pairs)
        for at, hop in key_hops(ring, step)
    ]


def arrived_keys(ring: Ring, step: int, arrived: Iterator[Array]) -> Cut:
    """What came meanwhile, taken off `arrived`."""
    found = nothing(ring)
    for at, hop in key_hops(ring, step):
        add(found, at, hop.piece, next(arrived))
    return found


def nothing(ring: Ring) -> Cut:
    """No piece of any route."""
    return [[None] * ring.schedule.pieces for _ in ring.schedule.routes]


def add(total: Cut, route: int, piece: int, more: Array) -> None:
    """Adds to one piece; a rank to which nobody sent has got zeros."""
    so_far = total[route][piece]
    total[route][piece] = more if so_far is None else so_far + more


def paced(arrived: tuple[Array, ...], *results: Any) -> tuple[tuple[Array, ...], Any]:
    """The same values, the arrived ones not before the results: else all hops would come first,
    and every owner's keys would lie in memory at once."""
    return jax.lax.optimization_barrier((arrived, results))


def _of_rank(x: Array, rank: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, rank, 0, keepdims=False)


def _pick(pieces: list[Any], table: Sequence[int | None], rank: Array) -> Any:
    """On every rank the piece that the table names; any one where it names none."""
    names = sorted({piece for piece in table if piece is not None})
    found = pieces[names[0]]
    for piece in names[1:]:
        is_this = jnp.asarray([name == piece for name in table])[rank]
        found = jax.tree.map(functools.partial(jnp.where, is_this), pieces[piece], found)
    return found
