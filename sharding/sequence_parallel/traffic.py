# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the forms of sequence parallelism send, in closed form, and over which links.

Of one attention layer, with N ranks, c tokens, n query and m key heads on each, b bytes a value;
each rank sends, forward and backward (Ulysses twice the same):

    all_gather   2 (N - 1) c m H b           2 (N - 1) c m H b
    ulysses      (N - 1)/N c H b (2 n + 2 m)
    ring         share 2 (N - 1) c m H b     share 2 (N - 1) c m H (b + 4)
    usp          both, the ring of R ranks: (R - 1) for its (N - 1)
    token_ring   share (N - 1) c n (2 H b + 4)    share (N - 1) c n (2 H b + 8 + 4 H)

share: 3/4 for causal zigzag halves, 1/2 for contiguous, 1 otherwise. What matters is the busiest
link in its busiest direction:

    torus    the ranks form a ring, with a link each way between neighbours; a message to a rank
             that is farther away takes the shorter way, and loads every link of it
    switch   every rank has one link to all others, which carries as much in as out

Optical and other uneven networks are not modelled, nor is what a collective of XLA adds.
To add a form: its messages in `messages`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from pallas_kernels.ring_attention.schedule import Form as RingForm
from pallas_kernels.ring_attention.schedule import make_schedule
from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention.schedule import Schedule as TokenRingSchedule
from pallas_kernels.token_ring_attention.schedule import Visits
from sharding.sequence_parallel.all_gather import AllGatherKVConfig
from sharding.sequence_parallel.attend import FixedConfig
from sharding.sequence_parallel.ring import RingConfig
from sharding.sequence_parallel.sizes import AttentionSizes
from sharding.sequence_parallel.token_ring import TokenRingConfig
from sharding.sequence_parallel.ulysses import UlyssesConfig
from sharding.sequence_parallel.usp import UlyssesRingConfig

Links = Literal["torus", "switch"]


class Message(NamedTuple):
    """The same number of bytes between some pairs of ranks."""

    bytes: float
    pairs: tuple[tuple[int, int], ...]
    """(from, to)."""


def sent_bytes(config: FixedConfig, sizes: AttentionSizes, *, is_backward: bool) -> float:
    """Bytes that a rank sends in one layer, in the mean over ranks.

    Args:
        config: of the form.
        sizes: of the attention.
        is_backward: in the backward pass, not the forward one.
    """
    found = messages(config, sizes, is_backward=is_backward)
    return sum(one.bytes * len(one.pairs) for one in found) / sizes.ranks


def num_messages(config: FixedConfig, sizes: AttentionSizes, *, is_backward: bool) -> int:
    """Messages that a rank sends in one layer, if each of its arrays is one.

    Args:
        config: of the form.
        sizes: of the attention.
        is_backward: in the backward pass, not the forward one.
    """
    others = sizes.ranks - 1
    match config:
        case AllGatherKVConfig():
            return 2 * others
        case UlyssesConfig():
            return 4 * others * config.num_chunks
        case UlyssesRingConfig():
            groups = dataclasses.replace(sizes, ranks=sizes.ranks // config.ulysses)
            ring = num_messages(config.ring, groups, is_backward=is_backward)
            return 4 * (config.ulysses - 1) + ring
        case _:
            return 2 * len(list(messages(config, sizes, is_backward=is_backward)))


def busiest_link(
    config: FixedConfig, sizes: AttentionSizes, links: Links, *, is_backward: bool
) -> float:
    """Bytes over the busiest link in its busiest direction, in one layer.

    Args:
        config: of the form.
        sizes: of the attention.
        links: between the ranks.
        is_backward: in the backward pass, not the forward one.
    """
    n = sizes.ranks
    load = np.zeros((2, n))  # to the next and the previous rank; or out of and into a rank
    for one in messages(config, sizes, is_backward=is_backward):
        for source, target in one.pairs:
            if links == "switch":
                load[0, source] += one.bytes
                load[1, target] += one.bytes
                continue
            ahead = (target - source) % n
            for goes_back in (False, True):
                hops = n - ahead if goes_back else ahead
                if 2 * hops > n:
                    continue
                share = one.bytes / 2 if 2 * hops == n else one.bytes
                first = target if goes_back else source
                load[int(goes_back), (first + np.arange(hops)) % n] += share
    return float(load.max(initial=0.0))


def messages(config: FixedConfig, sizes: AttentionSizes, *, is_backward: bool) -> Iterator[Message]:
    """All that is sent in one layer.

    Args:
        config: of the form; none where a device holds whole sequences.
        sizes: of the attention.
        is_backward: in the backward pass, not the forward one.
    """
    n = sizes.ranks
    if n == 1:
        return
    everyone = range(n)
    tokens = sizes.sequences * sizes.length / n
    heads, kv_heads, width = sizes.local_heads, sizes.local_kv_heads, sizes.head_dim
    match config:
        case AllGatherKVConfig():
            # Half of it each way round, from neighbour to neighbour.
            shard = 2 * tokens * kv_heads * width * sizes.itemsize
            for step in (1, -1):
                pairs = tuple((rank, (rank + step) % n) for rank in everyone)
                yield Message((n - 1) * shard / 2, pairs)
        case UlyssesConfig():
            local = tokens * width * sizes.itemsize * (2 * heads + 2 * kv_heads)
            yield Message(local / n, tuple((i, j) for i in everyone for j in everyone if i != j))
        case RingConfig():
            yield from _ring(config, sizes, tokens * kv_heads * 2 * width, is_backward)
        case TokenRingConfig():
            yield from _token_ring(config, sizes, tokens * heads, is_backward)
        case UlyssesRingConfig():
            yield from _usp(config, sizes, is_backward)
        case _:
            return


def _usp(config: UlyssesRingConfig, sizes: AttentionSizes, is_backward: bool) -> Iterator[Message]:
    """Exchanges within groups of neighbours, and rings of those that stand alike in them."""
    inner, groups = config.ulysses, range(sizes.ranks // config.ulysses)
    members = range(inner)
    part = dataclasses.replace(
        sizes, ranks=inner, length=sizes.length // len(groups), is_causal=False
    )
    for one in messages(UlyssesConfig(), part, is_backward=is_backward):
        yield Message(
            one.bytes, tuple((g * inner + i, g * inner + j) for g in groups for i, j in one.pairs)
        )
    ring = dataclasses.replace(sizes, ranks=len(groups), sequences=sizes.sequences / inner)
    for one in messages(config.ring, ring, is_backward=is_backward):
        yield Message(
            one.bytes, tuple((i * inner + u, j * inner + u) for u in members for i, j in one.pairs)
        )


def _ring(
    config: RingConfig, sizes: AttentionSizes, values: float, is_backward: bool
) -> Iterator[Message]:
    """Keys and values: `values` of each rank."""
    form, reach = _ring_form(config.layout, sizes)
    schedule = make_schedule(sizes.ranks, form, directions=config.directions, reach=reach)
    values /= schedule.pieces * len(schedule.routes)
    for route in schedule.routes:
        for step in route.steps:
            for hop in step.keys:
                yield Message(values * sizes.itemsize, hop.pairs)
            for hop in step.gradients if is_backward else ():
                yield Message(values * 4, hop.pairs)


def _ring_form(layout: SequenceLayout, sizes: AttentionSizes) -> tuple[RingForm, int | None]:
    """As the kernel has it."""
    if not sizes.is_causal:
        return "all", None
    if layout != "contiguous":
        return ("halves" if sizes.window is None else "all"), None
    if sizes.window is None:
        return "earlier", None
    held = sizes.length // sizes.ranks
    return "near", min(sizes.ranks - 1, math.ceil((sizes.window - 1) / held))


def _token_ring(
    config: TokenRingConfig, sizes: AttentionSizes, rows: float, is_backward: bool
) -> Iterator[Message]:
    """Queries and results: `rows` heads of tokens of each rank."""
    visits: Visits = "every"
    if sizes.is_causal:
        visits = "later" if config.layout == "contiguous" else "halves"
    schedule = TokenRingSchedule(ranks=sizes.ranks, visits=visits, form=config.form)
    rows /= len(schedule.pieces)
    width, itemsize = sizes.head_dim, sizes.itemsize
    is_running = config.form == "co_travelling"
    if is_backward:
        out, home = 2 * width * itemsize + 8, 4 * width
    else:
        out, home = width * itemsize, width * (4 if is_running else itemsize) + 4
    for step in range(sizes.ranks):
        for piece in schedule.pieces:
            yield Message(rows * out, schedule.hop(step, piece))
            yield Message(rows * home, schedule.homeward(step, piece))
