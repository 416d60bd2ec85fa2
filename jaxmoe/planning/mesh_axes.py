# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the mesh axes along which the collectives of a compiled program run.

Devices are numbered by their places in the mesh, the last axis fastest. A set of groups belongs to
the axes along which the places of one group differ; a permutation to those along which source and
target differ. Groups that are no product of whole axes (a part of an axis) belong to every axis
along which they differ. `jaxmoe.planning.hlo` reads the groups.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxmoe.planning.hlo import Collective, Groups


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisBytes:
    """All collectives of one kind along the same axes, in one run of the program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes."""
    count: int
    """Executions; one in a loop with an unknown trip count counts once."""
    result_bytes: int
    """Bytes of the results on one device, over all executions."""
    wire_bytes: float
    """Bytes that one device sends, over all executions."""


def axes_of_groups(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which the devices of a group differ.

    Args:
        groups: Device numbers.
        mesh: Size by axis, in order.
    """
    if not groups:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    members = np.asarray([device for group in groups for device in group])
    firsts = np.repeat([group[0] for group in groups], [len(group) for group in groups])
    if members.max() >= math.prod(mesh.values()):
        return ()
    shape = tuple(mesh.values())
    places = zip(np.unravel_index(members, shape), np.unravel_index(firsts, shape), strict=True)
    differs = [bool((place != first).any()) for place, first in places]
    return tuple(axis for axis, differ in zip(mesh, differs, strict=True) if differ)


def bytes_by_axes(collectives: Iterable[Collective], mesh: Mapping[str, int]) -> list[AxisBytes]:
    """Return the collectives of a program summed by kind and axes, most bytes first.

    Args:
        collectives: Result of `collectives`.
        mesh: Size by axis, in the order of the devices.
    """
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0] * 3)
    for collective in collectives:
        times = 1 if collective.trip_count is None else collective.trip_count
        total = sums[collective.kind, axes_of_groups(collective.groups, mesh)]
        total[0] += times
        total[1] += times * collective.result_bytes
        total[2] += times * collective.wire_bytes
    rows = [
        AxisBytes(
            kind=kind, axes=axes, count=int(t[0]), result_bytes=int(t[1]), wire_bytes=float(t[2])
        )
        for (kind, axes), t in sums.items()
        if axes
    ]
    return sorted(rows, key=lambda row: -row.wire_bytes)
