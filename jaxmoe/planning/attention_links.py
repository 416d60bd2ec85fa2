# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ring against token ring: bytes over the busiest link in its busiest direction, by GQA ratio.

Of one attention layer with a fixed number of query heads, whose key heads become fewer:

    ring          all heads of keys and values one way round
    ring, both    half of them each way
    token_ring    queries one way, results the other, or behind them where that loads less

Keys grow fewer with the ratio, queries do not: there is a ratio from which on the token ring loads
the links more. Through a switch (GPU) it is 2, on any number of devices: the token ring's float32
gradients of queries are half of the ring's of keys and values while both have as many heads, and
both ways round is no gain there. On a torus (TPU) it is 2 for up to four devices, and 1 beyond,
where results go farther than keys, which only visit neighbours.
The bytes are those of `sharding.sequence_parallel.traffic`; no latency, no overlap.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.planning.hardware import Chip
from sharding.sequence_parallel import AttentionSizes, RingConfig, TokenRingConfig
from sharding.sequence_parallel.traffic import Links, link_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RatioRow:
    """One ratio of query heads to key heads; bytes of a layer, forward and backward."""

    ratio: int
    ring: float
    both: float | None
    """None where half of the key heads is no whole number."""
    token_ring: float

    @property
    def best_ring(self) -> float:
        """Of the two ways to send keys round."""
        return self.ring if self.both is None else min(self.ring, self.both)


def links_of(chip: Chip) -> Links:
    """How devices of a kind are joined."""
    return "torus" if chip.torus else "switch"


def direction_bandwidth(chip: Chip) -> float:
    """Bytes per second of one link in one direction."""
    return chip.link_bandwidth / (2 if chip.torus else 1)


def by_ratio(sizes: AttentionSizes, links: Links) -> list[RatioRow]:
    """A row for every ratio that leaves each device whole key heads.

    Args:
        sizes: whose query heads are kept.
        links: between the devices that share a sequence.
    """
    heads = sizes.local_heads
    return [
        _row(dataclasses.replace(sizes, num_kv_heads=sizes.num_heads // ratio), ratio, links)
        for ratio in range(1, heads + 1)
        if heads % ratio == 0
    ]


def _row(sizes: AttentionSizes, ratio: int, links: Links) -> RatioRow:
    def load(form: RingConfig | TokenRingConfig) -> float:
        return link_bytes(form, sizes, links)

    is_even = sizes.local_kv_heads % 2 == 0
    return RatioRow(
        ratio=ratio,
        ring=load(RingConfig()),
        both=load(RingConfig(directions="both")) if is_even else None,
        token_ring=min(
            load(TokenRingConfig(form="direct")), load(TokenRingConfig(form="co_travelling"))
        ),
    )


def crossover(rows: list[RatioRow]) -> int | None:
    """The smallest ratio from which on keys are cheaper to send than queries; None: never.

    Args:
        rows: of `by_ratio`.
    """
    dearer = [row.ratio for row in rows if row.token_ring > row.best_ring]
    return dearer[0] if dearer else None
