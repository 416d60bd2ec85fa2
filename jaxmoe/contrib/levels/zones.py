# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`zones`: three levels, within a device, within a host and across hosts, by thresholds of length.

A document moves to the next zone, from groups of d devices to groups of d', where its length does
not fit, or where the attention that the zone saves hides the messages that it adds:

    pair s (s + 1) / 2 (1 / d - 1 / d') >= ring(d') - ring(d)

Source: Zeppelin (arXiv 2509.21841), read in summaries: its thresholds are said to lie where
computation crosses communication within and between hosts, and this formula is that reading.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from jaxmoe.contrib.levels.cost import LevelCost
from jaxmoe.contrib.levels.plan import LevelAssigner, LevelPlan, Room, plan_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZonesConfig(LevelAssigner):
    """One device, one host or all hosts, by the length of a document (Zeppelin)."""

    name: ClassVar[str] = "zones"

    def assign(self, lengths: Sequence[int], room: Room, cost: LevelCost) -> LevelPlan:
        """Return the micro-batches of a step."""
        top = len(room.degrees) - 1
        zones = sorted({0, min(cost.near_level, top), top})
        levels = []
        for length in lengths:
            zone = zones[0]
            for low, high in itertools.pairwise(zones):
                saved = cost.attention([length], low) - cost.attention([length], high)
                is_hidden = saved >= cost.rings[high] - cost.rings[low]
                if room.lowest(length) > low or is_hidden:
                    zone = high
                else:
                    break
            levels.append(zone)
        return plan_of(levels, lengths, room, cost)
