# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Congestion of collectives on a leaf-spine network, by how flows are spread over the spines.

Every leaf switch has one link to every spine. A flow goes from a device to one under another leaf,
up over one spine and down again; flows within a leaf use no spine. The load of a link is the bytes
on it, and the congestion of a spread is its largest load over that of the ideal, where every flow
is cut over all spines (packet spraying).

    hashed       each flow over one spine, drawn at random (ECMP)
    assigned     each flow over one spine, those of a pair of leaves in turn
    split k      the sender cuts each flow into k equal parts, which go in turn
    exact        k = spines / gcd(flows of the pair of leaves, spines): equal to spraying

n flows of equal size of a pair of leaves over s spines put ceil(n k / s) / k of them on the fullest
spine instead of n / s. Parts in turn are even if s divides n k; the least such k is s / gcd(n, s)
(after Ethereal, arXiv 2407.00550; the bounds are worked out here). For one path (k = 1) the ratio
is s ceil(n / s) / n: s / n for few flows, below 1 + s / n for many. Loads are sums over pairs of
leaves, so the congestion of a link is at most the largest ratio of its pairs.

Devices are under leaves in the order of the mesh. All flows of a collective are counted at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """A leaf-spine network."""

    devices_per_leaf: int
    """Devices under one leaf switch."""
    spines: int
    """Spine switches; every leaf has a link to each."""
    link_bandwidth: float
    """Bytes per second of a link between a leaf and a spine."""

    def __post_init__(self):
        for field in ("devices_per_leaf", "spines", "link_bandwidth"):
            if not getattr(self, field) > 0:
                raise ValueError(f"fabric.{field}={getattr(self, field)} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flows:
    """Flows of equal size between leaves, by pair of leaves."""

    count: Int[np.ndarray, "leaves leaves"]
    """Number of flows from a leaf to another; 0 on the diagonal."""
    bytes: float
    """Bytes of one flow."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Load of the links under one way to spread flows."""

    name: str
    largest: float
    """Bytes on the fullest link."""
    congestion: float
    """The largest load over that of spraying; 1 if nothing crosses leaves."""


def flows_of(
    kind: str, axes: Sequence[str], sent: float, mesh: Mapping[str, int], fabric: Fabric
) -> Flows:
    """Return the flows of a collective between leaves.

    Args:
        kind: Kind of `jaxmoe.planning.hlo.KINDS`. All-to-all: every device to all others of its
            group; all others: to the next one in a ring.
        axes: Mesh axes of a group.
        sent: Bytes that one device sends, such as `AxisBytes.wire_bytes`.
        mesh: Size by axis, in the order of the devices.
        fabric: Network.
    """
    names = list(mesh)
    size = math.prod(mesh[axis] for axis in axes)
    at = [names.index(axis) for axis in names if axis in axes]
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    leaves = np.moveaxis(places, at, range(-len(at), 0)).reshape(-1, size)
    leaves = leaves // fabric.devices_per_leaf
    number = -(-places.size // fabric.devices_per_leaf)
    count = np.zeros((number, number), np.int64)
    steps = range(1, size) if kind in _ALL_TO_ALL else range(1, min(2, size))
    for step in steps:
        np.add.at(count, (leaves, np.roll(leaves, -step, axis=1)), 1)
    np.fill_diagonal(count, 0)
    return Flows(count=count, bytes=sent / max(1, len(steps)))


def spray_bytes(flows: Flows, fabric: Fabric) -> float:
    """Return the bytes on the fullest link when every flow is cut over all spines.

    Args:
        flows: Flows between leaves.
        fabric: Network.
    """
    up = flows.count.sum(axis=1)
    down = flows.count.sum(axis=0)
    return float(max(up.max(), down.max())) * flows.bytes / fabric.spines


def split_loads(
    flows: Flows, fabric: Fabric, parts: Callable[[int], int]
) -> Float[np.ndarray, "2 leaves spines"]:
    """Return the bytes on every link up and down when flows are cut and go over spines in turn.

    The turn starts at another spine for each pair of leaves, by the sum of their numbers.

    Args:
        flows: Flows between leaves.
        fabric: Network.
        parts: Returns the parts of a flow from the number of flows of its pair of leaves.
    """
    loads = np.zeros((2, len(flows.count), fabric.spines))
    for source, target in np.argwhere(flows.count).tolist():
        number = int(flows.count[source, target])
        cut = parts(number)
        per_spine, remainder = divmod(number * cut, fabric.spines)
        units = np.full(fabric.spines, per_spine)
        units[(source + target + np.arange(remainder)) % fabric.spines] += 1
        loads[0, source] += units * flows.bytes / cut
        loads[1, target] += units * flows.bytes / cut
    return loads


def hashed_loads(
    flows: Flows, fabric: Fabric, seed: int = 0
) -> Float[np.ndarray, "2 leaves spines"]:
    """Return the bytes on every link up and down when each flow draws its spine.

    Args:
        flows: Flows between leaves.
        fabric: Network.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    even = np.full(fabric.spines, 1 / fabric.spines)
    drawn = rng.multinomial(flows.count, even) * flows.bytes
    return np.stack([drawn.sum(axis=1), drawn.sum(axis=0)])


def exact_parts(number: int, spines: int) -> int:
    """Return the least number of parts of a flow with which the spread equals spraying.

    Args:
        number: Flows of the pair of leaves.
        spines: Spine switches.
    """
    return spines // math.gcd(number, spines)


def single_path_bound(flows: Flows, fabric: Fabric) -> float:
    """Return the largest congestion of flows that go over one spine each, in turn.

    Args:
        flows: Flows between leaves.
        fabric: Network.
    """
    numbers = np.unique(flows.count[flows.count > 0])
    ratios = -(-numbers // fabric.spines) * fabric.spines / numbers
    return float(ratios.max()) if ratios.size else 1.0


def spreads(flows: Flows, fabric: Fabric, splits: Sequence[int] = (2, 4)) -> list[Spread]:
    """Return the congestion of each way to spread the flows.

    Args:
        flows: Flows between leaves.
        fabric: Network.
        splits: Fixed numbers of parts to consider.
    """
    ways = {
        "hashed": hashed_loads(flows, fabric),
        "assigned": split_loads(flows, fabric, lambda _: 1),
        **{f"split {k}": split_loads(flows, fabric, lambda _, k=k: k) for k in splits},
        "exact": split_loads(flows, fabric, lambda number: exact_parts(number, fabric.spines)),
    }
    ideal = spray_bytes(flows, fabric)
    return [
        Spread(
            name=name,
            largest=float(loads.max()),
            congestion=float(loads.max()) / ideal if ideal else 1.0,
        )
        for name, loads in ways.items()
    ]
