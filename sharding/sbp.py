# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Split, broadcast, partial: states of an array on a mesh axis, and the cost of changing them.

OneFlow (arXiv 2110.15032) describes an array on each axis of devices as split along a dimension,
S(i), the same everywhere, B, or partial, P: terms whose sum it is. JAX spells the three
`PartitionSpec("axis", ...)`, no entry, and `PartitionSpec(unreduced={"axis"})`. A change is one
collective over the axis, and so is its gradient. With n devices and |T| bytes of the whole array,
all n together send, with the best algorithm for each:

    from  to     collective       bytes           gradient's collective
    S(i)  S(j)   all-to-all       |T| (n-1)/n     all-to-all
    S     B      all-gather       |T| (n-1)       none, a slice
    P     S      reduce-scatter   |T| (n-1)       all-gather
    P     B      all-reduce       |T| 2(n-1)      none
    B     S      none, a slice    0               all-gather
    B     P      none, zeros      0               none
    S     P      none, zeros      0               none, a slice

On the CPU, P to S is an all-reduce and a slice, |T| 2(n-1): XLA forms no reduce-scatter there. The
GPU prints one, and the TPU a fusion of its own (`jaxmoe/planning/hlo/` reads all three).

`changes` breaks a change between two layouts of an array into these rows;
`jaxmoe describe` prints them for every parameter of a recipe with a mesh.

Not covered: P(max), which jax 0.10 cannot express.

To add a transition: a row in TRANSITIONS of sharding/sbp.py, a row in ROWS of
tests/sharding/test_sbp.py, which compiles it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from jax.sharding import PartitionSpec

Kind = Literal["split", "broadcast", "partial"]


@dataclasses.dataclass(frozen=True, slots=True)
class AxisState:
    """State of an array on one mesh axis."""

    kind: Kind
    dim: int | None = None
    """Dimension of a split, from 0."""

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "split" else self.kind[0].upper()


BROADCAST = AxisState("broadcast")
PARTIAL = AxisState("partial")


def split(dim: int) -> AxisState:
    """Return S(dim): every device of the axis has an equal part of this dimension, from 0."""
    return AxisState("split", dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """Cost of one change of state on one axis."""

    collective: str | None
    """Kind of the collective as XLA prints it on accelerators; None where nothing is sent."""
    factor: tuple[int, int]
    """(a, b): all devices together send |T| (n-1) a / n^b bytes."""

    def bytes(self, size: int | Fraction, devices: int) -> int | Fraction:
        """Return the bytes that all devices of the axis together send.

        Args:
            size: Bytes of the whole array, |T|.
            devices: n, devices on the axis.
        """
        a, b = self.factor
        sent = Fraction(size * (devices - 1) * a, devices**b)
        return int(sent) if sent.denominator == 1 else sent


TRANSITIONS: dict[tuple[Kind, Kind], Transition] = {
    ("split", "split"): Transition("all-to-all", (1, 1)),
    ("split", "broadcast"): Transition("all-gather", (1, 0)),
    ("split", "partial"): Transition(None, (0, 0)),
    ("broadcast", "split"): Transition(None, (0, 0)),
    ("broadcast", "partial"): Transition(None, (0, 0)),
    ("partial", "split"): Transition("reduce-scatter", (1, 0)),
    ("partial", "broadcast"): Transition("all-reduce", (2, 0)),
}
"""Every change of state on one axis; a change to the same state costs nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Layout of an array on all axes of a mesh."""

    splits: tuple[tuple[str, ...], ...]
    """For each dimension the mesh axes that split it, the slowest first."""
    partial: tuple[str, ...] = ()
    """Mesh axes on which it is partial."""

    @classmethod
    def of_spec(cls, spec: PartitionSpec) -> ArrayLayout:
        """Return the layout that a PartitionSpec describes.

        Args:
            spec: One entry for each dimension.
        """
        return cls(tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec))

    def state(self, axis: str) -> AxisState:
        """Return the state on one axis.

        Args:
            axis: Name of a mesh axis.
        """
        if axis in self.partial:
            return PARTIAL
        return next((split(d) for d, axes in enumerate(self.splits) if axis in axes), BROADCAST)

    def split_axes(self) -> tuple[str, ...]:
        """Return the axes that split it, the slowest first within each dimension."""
        return tuple(axis for axes in self.splits for axis in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutChange:
    """One change of state on one axis."""

    axis: str
    before: AxisState
    after: AxisState
    collective: str | None
    """Kind of the collective; None where nothing is sent."""
    bytes: float
    """Bytes that each device sends."""


def changes(
    before: ArrayLayout, after: ArrayLayout, mesh: Mapping[str, int], size: int
) -> list[LayoutChange]:
    """Return the changes of state that lead from one layout to another, in order.

    What makes the array of a device smaller comes first, so that later changes move less; splits
    are made from the slowest axis on and undone from the fastest. All-reduces over several axes are
    counted one after the other; XLA merges them into one, which sends less.

    Args:
        before: Layout at the start.
        after: Layout at the end.
        mesh: Devices along each mesh axis.
        size: Bytes of the whole array.
    """
    shrinking = [a for a in after.split_axes() if before.state(a).kind != "split"]
    growing = [a for a in reversed(before.split_axes()) if after.state(a).kind != "split"]
    order = [*shrinking, *before.partial, *before.split_axes(), *after.partial]
    order = [axis for axis in dict.fromkeys(order) if axis not in growing] + growing
    cut = set(before.split_axes())
    collectives = []
    for axis in order:
        start = before.state(axis)
        end = after.state(axis)
        if start == end or mesh[axis] == 1:
            continue
        local_size = Fraction(size)
        for cut_axis in cut - {axis}:
            local_size /= mesh[cut_axis]
        transition = TRANSITIONS[start.kind, end.kind]
        sent = transition.bytes(local_size, mesh[axis])
        collectives.append(
            LayoutChange(axis, start, end, transition.collective, float(sent / mesh[axis]))
        )
        cut = cut | {axis} if end.kind == "split" else cut - {axis}
    return collectives
