# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds the seconds that the parameters of a step are under way from below.

On one layout they are linear in the passes through each stack, so that a search sums over all
parameters once, for all micro-batches, remats, schedules and dispatchers:

    once + sum over groups of  gathers * gather + reductions * reduction + trained * copies

To add a message: `jaxmoe/planning/traffic.py`; what is left out here makes the bound smaller.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Sequence

from jaxmoe.planning.device_layout import ParameterShares
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import compute_seconds, seconds_of
from jaxmoe.planning.traffic import (
    Traffic,
    copies_traffic,
    gathered_as,
    gathers_of,
    parameter_traffic,
)

_BELOW = 1 - 1e-9  # a sum in another order may differ in its last digits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LikeParameters:
    """Parameters that a step passes through, and gathers, equally often."""

    shares: ParameterShares
    """One of them."""
    seconds: dict[str, float]
    """Seconds of all of them for each of `gathers`, `once`, `reductions` and `copies`."""

    def at(self, sizes: Sizes) -> float:
        """Return the seconds of a step."""
        passes = sizes.parameter_passes(self.shares)
        times = {
            "gathers": gathers_of(sizes, self.shares, passes),
            "once": 1.0,
            "reductions": passes.weights,
            "copies": passes.trained,
        }
        return sum(times[kind] * seconds for kind, seconds in self.seconds.items())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSeconds:
    """Seconds in which the parameters of a layout and their gradients are under way."""

    groups: tuple[_LikeParameters, ...]

    @classmethod
    def of(cls, sizes: Sizes, chip: Chip) -> ParameterSeconds:
        """Return the seconds of a layout.

        Args:
            sizes: Sizes of a step with the layout.
            chip: Properties of each device.
        """
        members: dict[Hashable, list[ParameterShares]] = defaultdict(list)
        for shares in sizes.parameters.values():
            row, stack = shares.row, shares.stack
            scan = row.path.partition("/")[0]
            layers = row.shape[0] if row.declaration.is_stacked else 0
            path = "" if stack is None else stack.path
            members[scan, layers, path, gathered_as(shares)].append(shares)
        met: set[Hashable] = set()
        groups = []
        for shares_of_group in members.values():
            entries: list[tuple[str, Traffic]] = [
                entry
                for shares in shares_of_group
                for entry in parameter_traffic(sizes, shares, 1.0, 1.0)
            ]
            for shares in shares_of_group:
                for entry in _of_copies(sizes, shares):
                    # One message may carry the gradients of a whole layer.
                    key = shares.row.path.partition("/")[0], entry.axes
                    if key in met:
                        entry.messages = 0.0
                    met.add(key)
                    entries.append(("copies", entry))
            groups.append(
                _LikeParameters(shares=shares_of_group[0], seconds=_sum(entries, sizes, chip))
            )
        return cls(groups=tuple(groups))

    def at(self, sizes: Sizes) -> float:
        """Return the seconds of a step at least.

        Args:
            sizes: Sizes of a step with the layout.
        """
        return sum(group.at(sizes) for group in self.groups)

    def unhidden(self, sizes: Sizes, chip: Chip) -> float:
        """Return the seconds that no product hides at least.

        Args:
            sizes: Sizes of a step with the layout.
            chip: Properties of each device.
        """
        hidden = chip.overlap * compute_seconds(sizes, chip) if chip.overlap else 0.0
        return max(0.0, self.at(sizes) - hidden) * _BELOW


def _of_copies(sizes: Sizes, shares: ParameterShares) -> list[Traffic]:
    """Return the traffic of summing the gradients of a parameter over copies once."""
    if shares.row.is_frozen:
        return []
    size = shares.local * sizes.itemsize / shares.layers
    return list(copies_traffic(sizes, shares.replicated_axes, size, 1.0))


def _sum(entries: Sequence[tuple[str, Traffic]], sizes: Sizes, chip: Chip) -> dict[str, float]:
    """Return the seconds of each kind; those along the same axes are linear in what is sent."""
    sums: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for kind, entry in entries:
        total = sums.setdefault((kind, entry.axes), entry)
        if total is not entry:
            total.bytes += entry.bytes
            total.messages += entry.messages
    seconds: dict[str, float] = defaultdict(float)
    for (kind, _), entry in sums.items():
        seconds[kind] += seconds_of(entry, sizes.mesh, chip)
    return dict(seconds)
