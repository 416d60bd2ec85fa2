# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares ring and token ring by the bytes over the busiest link, by GQA ratio.

For one attention layer with a fixed number of query heads and fewer and fewer key heads:

    ring          all heads of keys and values one way round
    ring, both    half of them each way
    token_ring    queries one way, results the other, or behind them if that loads less

Keys shrink with the ratio and queries do not, so above some ratio the token ring loads the links
more. Through a switch (GPU) the ratio is 2 on any number of devices: the token ring's float32
gradients of queries are half of the ring's of keys and values at equal heads, and both directions
give no gain there. On a torus (TPU) it is 2 for up to four devices, and 1 beyond, where results
travel farther than keys, which only visit neighbours.
Bytes come from `sharding.sequence_parallel.traffic`, without latency or overlap.
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
    """None if the number of key heads is odd."""
    token_ring: float

    @property
    def best_ring(self) -> float:
        """Smaller load of the two ring directions."""
        return self.ring if self.both is None else min(self.ring, self.both)


def links_of(chip: Chip) -> Links:
    """Return how devices of a kind are connected."""
    return "torus" if chip.torus else "switch"


def direction_bandwidth(chip: Chip) -> float:
    """Return the bytes per second of one link in one direction."""
    return chip.link_bandwidth / (2 if chip.torus else 1)


def by_ratio(sizes: AttentionSizes, links: Links) -> list[RatioRow]:
    """Return a row for every ratio that gives each device whole key heads.

    Args:
        sizes: Attention with the query heads.
        links: Links between the devices that share a sequence.
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
    """Return the smallest ratio at which keys are cheaper to send than queries, or None.

    Args:
        rows: Result of `by_ratio`.
    """
    dearer = [row.ratio for row in rows if row.token_ring > row.best_ring]
    return dearer[0] if dearer else None
