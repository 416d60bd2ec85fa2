# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Folded meshes: attention and experts use two layouts of the same devices (arXiv 2504.14960).

Within one replica, devices in their order are read twice as a mixed-radix number, tensor and
expert_tensor being the fastest digits:

    attention   data  x seq    x tensor
    experts     rest  x expert x expert_tensor        rest: devices with the same experts

The axes of the resulting mesh are the common refinement: a cut wherever either reading has one.
Cuts must divide one another, as powers of two always do:

    data=8, seq=2, tensor=4 and expert=64      cuts 4, 8, 64      expert = data x seq x tensor
    data=4, tensor=2 and expert=4              cuts 2, 4, 8       expert = data_1 x tensor
    data=4, tensor=6 and expert=3, tensor 8    cuts 6, 8: 8 is no multiple of 6, an error

Rules name whole axes or pieces of them, so no array moves between the two readings: a token that
attention leaves on a device enters the experts' all-to-all there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from sharding.axes import DATA, EXPERT, SEQ, TENSOR

_DENSE = (DATA, SEQ, TENSOR)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEMesh:
    """Layout of the devices of one replica for the experts."""

    expert: int = 1
    """Devices that share the routed experts."""
    expert_tensor: int = 1
    """Devices that share the hidden units of each expert."""
    seq_inner: int = 1
    """Devices of mesh.seq among which `usp` exchanges heads: another cut, not for experts."""
    seq_cuts: tuple[int, ...] = ()
    """Further numbers of devices at which mesh.seq is cut; `levels` sets them."""

    def __post_init__(self):
        for name in ("expert", "expert_tensor", "seq_inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"fold.{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Refinement:
    """Common refinement of both readings: names of mesh axes, the slowest first."""

    dense: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    """Each axis of attention with the (name, size) of its pieces."""
    expert: tuple[str, ...]
    """Pieces that split the experts."""
    expert_tensor: tuple[str, ...]
    """Pieces that split the hidden units of an expert."""
    expert_data: tuple[str, ...]
    """Pieces that split neither."""

    @property
    def without_sizes(self) -> Refinement:
        """The same with the names of the pieces and no sizes: many meshes share it."""
        dense = tuple((axis, tuple((name, 1) for name, _ in parts)) for axis, parts in self.dense)
        return dataclasses.replace(self, dense=dense)

    def names(self, axis: str) -> tuple[str, ...]:
        """Return the pieces of a mesh axis, or the axis itself where it is not cut."""
        parts = dict(self.dense).get(axis)
        return (axis,) if parts is None else tuple(name for name, _ in parts)


def refine(sizes: Mapping[str, int], fold: MoEMesh) -> Refinement:
    """Cut the axes of a mesh so that both readings are products of pieces.

    Args:
        sizes: Sizes of the mesh axes of attention.
        fold: Layout for the experts.

    Raises:
        ValueError: A size is open (that of data may be where experts are not folded), mesh.expert
            is not 1, the experts' sizes do not divide the devices of a replica, or there is no
            common refinement.
    """
    return _refine(tuple(sizes.items()), fold)


@functools.lru_cache(maxsize=4096)  # a search asks for each of thousands many times
def _refine(items: tuple[tuple[str, int], ...], fold: MoEMesh) -> Refinement:
    sizes = dict(items)
    is_open = sizes[DATA] == -1 and fold.expert * fold.expert_tensor == 1
    if is_open:  # cut nowhere, whatever its size
        sizes = {**sizes, DATA: 2}
    if -1 in sizes.values():
        raise ValueError("a folded mesh needs the size of every axis, and one is -1: give it")
    if sizes[EXPERT] != 1:
        way = "" if fold.expert > 1 else f" and fold.expert to {sizes[EXPERT]}"
        raise ValueError(
            f"mesh.expert={sizes[EXPERT]} and fold.expert={fold.expert} both spread experts: set"
            f" mesh.expert to 1{way}"
        )
    for cut in fold.seq_cuts:
        if cut < 1 or sizes[SEQ] % cut:
            raise ValueError(
                f"fold.seq_cuts={fold.seq_cuts} must be divisors of mesh.seq={sizes[SEQ]}: leave"
                " them to execution.sequence_parallel:levels"
            )
    if sizes[SEQ] % fold.seq_inner:
        raise ValueError(
            f"fold.seq_inner={fold.seq_inner} must divide mesh.seq={sizes[SEQ]}: choose a divisor"
        )
    devices = math.prod(sizes[axis] for axis in _DENSE)
    moe = fold.expert * fold.expert_tensor
    if devices % moe:
        raise ValueError(
            f"fold.expert={fold.expert} x fold.expert_tensor={fold.expert_tensor} must divide the"
            f" {devices} devices of a replica (mesh data x seq x tensor): choose divisors of"
            f" {devices}"
        )
    ends = {}  # the cuts below and above each axis of attention
    below = 1
    for axis in reversed(_DENSE):
        ends[axis] = (below, below * sizes[axis])
        below *= sizes[axis]
    inner = {sizes[TENSOR] * cut for cut in (fold.seq_inner, *fold.seq_cuts)}
    sides = {cut for pair in ends.values() for cut in pair}
    cuts = sorted({1, fold.expert_tensor, moe, *inner, *sides})
    for low, high in zip(cuts, cuts[1:], strict=False):
        if high % low:
            raise ValueError(
                f"fold.expert={fold.expert}, fold.expert_tensor={fold.expert_tensor} and mesh"
                f" data={sizes[DATA]}, seq={sizes[SEQ]}, tensor={sizes[TENSOR]} have no common"
                f" refinement: {high} devices do not divide into groups of {low}; choose sizes of"
                " which each product divides the next, such as powers of two"
            )
    dense = []
    starts = {}
    for axis in _DENSE:
        low, high = ends[axis]
        cuts_inside = [cut for cut in cuts if low <= cut <= high]
        steps = list(zip(cuts_inside, cuts_inside[1:], strict=False))[::-1]
        names = [axis] if len(steps) < 2 else [f"{axis}_{i}" for i in range(len(steps))]
        starts |= {name: start for name, (start, _) in zip(names, steps, strict=False)}
        parts = [(name, end // start) for name, (start, end) in zip(names, steps, strict=False)]
        if is_open and axis == DATA:
            parts = [(DATA, -1)]
        dense.append((axis, tuple(parts) or ((axis, 1),)))

    def between(low: int, high: int) -> tuple[str, ...]:
        return tuple(name for name, start in starts.items() if low <= start < high)

    return Refinement(
        dense=tuple(dense),
        expert=between(fold.expert_tensor, moe),
        expert_tensor=between(1, fold.expert_tensor),
        expert_data=between(moe, devices),
    )
