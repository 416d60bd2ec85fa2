# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost model of a micro-batch at a level: attention, rings, and everything else.

    T = other + max( max over groups of  pair * sum s (s + 1) / 2 / d ,  ring(d) )

for groups of d devices with documents of s tokens. Linear layers and experts compute C tokens on
each device at every level, padding included, so `other` does not depend on the documents. A ring
sends keys beside the arithmetic, so its slower part counts. FlexSP (arXiv 2412.01523) adds the two;
with `max` short documents gain less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelCost:
    """Seconds of the parts of a micro-batch, forward and backward, over all layers."""

    pair: float
    """Attention of one query to one key."""
    other: float
    """All but attention, for the C tokens of a device."""
    rings: tuple[float, ...]
    """Messages of the rings of each level, from level 0."""
    near_level: int = 0
    """Highest level whose groups do not leave the fast network of a host."""

    def attention(self, lengths: Iterable[int], level: int) -> float:
        """Return the seconds in which a group attends to its documents.

        Args:
            lengths: Tokens of the documents of the group.
            level: Log2 of its devices.
        """
        return self.pair * sum(s * (s + 1) / 2 for s in lengths) / 2**level

    def micro_batch(self, attention: float, level: int) -> float:
        """Return the seconds of a micro-batch.

        Args:
            attention: Seconds of its slowest group.
            level: Its level.
        """
        return self.other + max(attention, self.rings[level])
