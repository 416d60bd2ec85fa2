# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts work and traffic of ring schedules, for comparison with masks and compiled programs."""

from typing import NamedTuple

import numpy as np

from pallas_kernels.array_types import Int
from pallas_kernels.ring_attention.schedule import Hop
from pallas_kernels.ring_attention.schedule import RingSchedule as RingSchedule
from pallas_kernels.token_ring_attention.schedule import TokenRingSchedule as TokenRingSchedule
from pallas_kernels.token_ring_attention.schedule import statistic_rows


class Sizes(NamedTuple):
    """Sizes of the local shards."""

    batch: int
    length: int
    heads: int
    """Number of query heads."""
    width: int
    """Width of a query and key head."""
    value_width: int
    """Width of a value head."""
    itemsize: int
    """Bytes of an element of the activations."""
    token_arrays: int = 0
    """Number of int32 arrays [B S] that travel with the queries: positions, segment ids."""


class Traffic(NamedTuple):
    """Traffic of all ranks together."""

    permutes: int
    """Number of collectives; each carries a message of one piece in one step."""
    bytes: int
    """Bytes sent."""


def ring_permutes(schedule: RingSchedule, backward: bool = False) -> int:
    """Return the number of collective permutes; keys and values travel as one array."""
    hops = [hop for route in schedule.routes for step in route.steps for hop in step.keys]
    if backward:
        hops += [hop for route in schedule.routes for step in route.steps for hop in step.gradients]
    return len(hops)


def ring_bytes(
    schedule: RingSchedule,
    tokens: int,
    heads: int,
    width: int,
    itemsize: int,
    backward: bool = False,
) -> int:
    """Return the bytes of keys, values and float32 gradients that all ranks send.

    Args:
        tokens: Tokens on a rank, B * S / N.
        heads: Key heads on a rank, M.
        width: Width of a key and a value together, H + Hv.
        itemsize: Bytes of a key or value element.
        backward: Whether the backward pass is asked for.
    """
    numbers = tokens * heads * width // (schedule.pieces * len(schedule.routes))

    def sent(hops: tuple[Hop, ...]) -> int:
        return numbers * sum(len(hop.pairs) for hop in hops)

    steps = [step for route in schedule.routes for step in route.steps]
    total = itemsize * sum(sent(step.keys) for step in steps)
    return total + (4 * sum(sent(step.gradients) for step in steps) if backward else 0)


def ring_work(
    schedule: RingSchedule,
    order: Int[np.ndarray, " S"],
    segment_ids: Int[np.ndarray, " S"] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Int[np.ndarray, "ranks steps"]:
    """Return the number of unmasked scores of one head, by rank and step of the first route.

    Args:
        order: Result of `sequence_order`.
        segment_ids: Segments of the tokens, in the order of the sequence.
        causal: Whether a query sees no later key.
        window: Distance from which keys are hidden.
    """
    held = order.reshape(schedule.ranks, schedule.pieces, -1)

    def count(q: np.ndarray, k: np.ndarray) -> int:
        distance = q[:, None] - k[None, :]
        sees = np.ones(distance.shape, bool)
        if causal:
            sees &= distance >= 0
        if window is not None:
            sees &= np.abs(distance) < window
        if segment_ids is not None:
            sees &= segment_ids[q][:, None] == segment_ids[k][None, :]
        return int(sees.sum())

    route = schedule.routes[0]
    found = np.zeros((schedule.ranks, schedule.num_steps), np.int64)
    for rank in range(schedule.ranks):
        found[rank, 0] = count(held[rank].reshape(-1), held[rank].reshape(-1))
        for s in range(1, schedule.num_steps):
            owner = schedule.owner(route.direction, s, rank)
            for block in route.steps[s].blocks:
                k = block.k[rank]
                if k is not None:
                    found[rank, s] += count(held[rank, block.q[rank]], held[owner, k])
    return found


def visible_scores(schedule: TokenRingSchedule, rank: int, step: int, length: int) -> int:
    """Return the number of scores per head of a rank's block that no causal mask hides.

    Args:
        rank: Rank that computes.
        step: Step of the loop.
        length: Tokens of a local shard.
    """
    if schedule.visits == "every":
        return length * length
    if step == 0:
        return length * (length + 1) // 2
    if schedule.visits == "halves":
        return 2 * (length // 2) ** 2
    return 0 if schedule.is_earlier(rank, step) else length * length


def forward_traffic(schedule: TokenRingSchedule, sizes: Sizes) -> Traffic:
    """Return the traffic of the forward pass: queries to the left, (out, lse) home.

    For the direct form with c tokens a rank and no token arrays:
    N (N - 1) c heads (width b + value_width b + 4) bytes, and 3/4 of it for halves.
    """
    length = sizes.length // len(schedule.pieces)
    queries = sizes.batch * length * sizes.heads * sizes.width * sizes.itemsize
    itemsize = 4 if schedule.form == "co_travelling" else sizes.itemsize
    results = message_bytes(sizes, sizes.value_width, length, itemsize)
    return _traffic(schedule, (queries, *_tokens(sizes, length)), results)


def backward_traffic(schedule: TokenRingSchedule, sizes: Sizes) -> Traffic:
    """Return the traffic of the backward pass: (Q, lse, dO, delta) to the left, dQ home.

    For the direct form: N (N - 1) c heads (width b + value_width b + 8 + 4 width) bytes, and
    3/4 of it for halves.
    """
    length = sizes.length // len(schedule.pieces)
    widths = sizes.width, sizes.value_width
    if sizes.width == sizes.value_width:  # one message
        queries = (message_bytes(sizes, sizes.width, 2 * length, sizes.itemsize),)
    else:
        queries = tuple(message_bytes(sizes, x, length, sizes.itemsize) for x in widths)
    d_q = sizes.batch * length * sizes.heads * sizes.width * 4
    return _traffic(schedule, (*queries, *_tokens(sizes, length)), d_q)


def _traffic(schedule: TokenRingSchedule, travelling: tuple[int, ...], returning: int) -> Traffic:
    permutes = total = 0
    for step in range(schedule.ranks):
        for piece in schedule.pieces:
            if hop := schedule.hop(step, piece):
                permutes += len(travelling)
                total += len(hop) * sum(travelling)
            if home := schedule.homeward(step, piece):
                permutes += 1
                total += len(home) * returning
    return Traffic(permutes, total)


def message_bytes(sizes: Sizes, width: int, length: int, itemsize: int) -> int:
    """Return the bytes of a message: activations and one float32 number per query and head.

    Args:
        sizes: Sizes of the local shards.
        width: Width of a head.
        length: Rows of activations in the piece.
        itemsize: Bytes of an element of the activations.
    """
    rows = length + statistic_rows(length, width, itemsize)
    return sizes.batch * rows * sizes.heads * width * itemsize


def _tokens(sizes: Sizes, length: int) -> tuple[int, ...]:
    return (4 * sizes.batch * length,) * sizes.token_arrays
