# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`buckets`: every document at the lowest level that holds it.

    d(s) = 2^ceil(log2(s / C))

Documents of a level are in the same micro-batches, in descending order of length, so that the
groups of a micro-batch take about equally long. Levels with few documents leave micro-batches
half empty: where that takes longer, a packing leaves its rows as they are (`rows.py`). Source:
ByteScale (arXiv 2502.21231), which gives a document any number of devices; here powers of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxmoe.contrib.levels.cost import LevelCost
from jaxmoe.contrib.levels.plan import LevelAssigner, LevelPlan, Room, plan_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketsConfig(LevelAssigner):
    """The lowest level that holds a document (ByteScale)."""

    name: ClassVar[str] = "buckets"

    def assign(self, lengths: Sequence[int], room: Room, cost: LevelCost) -> LevelPlan:
        """Return the micro-batches of a step."""
        return plan_of([room.lowest(length) for length in lengths], lengths, room, cost)
