# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Split, broadcast, partial: how an array lies on one mesh axis, and what a change of that costs.

OneFlow (arXiv 2110.15032) describes a tensor on each axis of devices as split along a
dimension, S(i), the same everywhere, B, or partial, P: terms whose sum it is. JAX spells the three
`PartitionSpec("axis", ...)`, nothing, and `PartitionSpec(unreduced={"axis"})`; a product contracted
over a split dimension is partial when its `out_sharding` says so. A change is one collective over
the axis, and so is its gradient. With n devices and |T| bytes of the whole array, all n together
send, by the best algorithm for each:

    from  to     collective       bytes           gradient's collective
    S(i)  S(j)   all-to-all       |T| (n-1)/n     all-to-all
    S     B      all-gather       |T| (n-1)       none, a slice
    P     S      reduce-scatter   |T| (n-1)       all-gather
    P     B      all-reduce       |T| 2(n-1)      none
    B     S      none, a slice    0               all-gather
    B     P      none, zeros      0               none
    S     P      none, zeros      0               none, a slice

On the CPU, P to S is an all-reduce and a slice, |T| 2(n-1): XLA forms no reduce-scatter there. The
GPU prints one, and the TPU a fusion of its own (`jaxmoe/planning/hlo.py` reads all three).

JAX's types keep the rest of the algebra: what is not linear refuses a partial operand, as does a
product of two. Not here: P(max), which jax 0.10 cannot say; and the choice of the cheapest
signature per operation, which Explicit axes leave to whoever writes the model.

To add a transition: a row in TRANSITIONS; the tests compile every row.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Literal

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Shaped

from sharding.constrain import move

Kind = Literal["split", "broadcast", "partial"]


@dataclasses.dataclass(frozen=True, slots=True)
class AxisPlacement:
    """How an array lies on one mesh axis."""

    kind: Kind
    dim: int | None = None
    """Of a split: the dimension, from 0."""

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "split" else self.kind[0].upper()


BROADCAST = AxisPlacement("broadcast")
PARTIAL = AxisPlacement("partial")


def split(dim: int) -> AxisPlacement:
    """S(dim): every device of the axis has an equal part of this dimension, from 0."""
    return AxisPlacement("split", dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """What one change of placement is."""

    collective: str | None
    """Its kind as XLA prints it on accelerators; None where nothing is sent."""
    factor: tuple[int, int]
    """(a, b): all devices together send |T| (n-1) a / n^b bytes."""
    gradient: str | None
    """The collective of its gradient."""
    on_cpu: str | None
    """The kind that XLA prints on the CPU."""

    def bytes(self, size: int, devices: int) -> int | Fraction:
        """What all devices of the axis together send.

        Args:
            size: bytes of the whole array, |T|.
            devices: n, on the axis.
        """
        a, b = self.factor
        sent = Fraction(size * (devices - 1) * a, devices**b)
        return int(sent) if sent.denominator == 1 else sent


TRANSITIONS: dict[tuple[Kind, Kind], Transition] = {
    ("split", "split"): Transition("all-to-all", (1, 1), "all-to-all", "all-to-all"),
    ("split", "broadcast"): Transition("all-gather", (1, 0), None, "all-gather"),
    ("split", "partial"): Transition(None, (0, 0), None, None),
    ("broadcast", "split"): Transition(None, (0, 0), "all-gather", None),
    ("broadcast", "partial"): Transition(None, (0, 0), None, None),
    ("partial", "split"): Transition("reduce-scatter", (1, 0), "all-gather", "all-reduce"),
    ("partial", "broadcast"): Transition("all-reduce", (2, 0), None, "all-reduce"),
}
"""Every change of placement on one axis; a change to itself is none."""


def placement(x: Shaped[Array, "*dims"], axis: str) -> AxisPlacement:
    """How an array lies on an axis of the current Explicit mesh.

    Args:
        x: traced or concrete.
        axis: of the mesh.

    Raises:
        ValueError: there is no such axis, or it is not Explicit.
    """
    _check_axis(axis)
    spec = jax.typeof(x).sharding.spec
    if axis in spec.unreduced:
        return PARTIAL
    for dim, names in enumerate(_entries(spec, x.ndim)):
        if axis in names:
            return split(dim)
    return BROADCAST


def box(x: Shaped[Array, "*dims"], axis: str, to: AxisPlacement) -> Shaped[Array, "*dims"]:
    """The same array, otherwise placed on one axis: one row of TRANSITIONS.

    Args:
        x: on the current Explicit mesh.
        axis: of that mesh; how x lies on the others stays.
        to: `split(dim)`, BROADCAST or PARTIAL.

    Raises:
        ValueError: no such axis; a dimension that x has not or that does not divide; an axis that
            splits a dimension together with others and is not the innermost of them; a partial
            placement of values that do not add up (booleans).
    """
    before = placement(x, axis)
    if before == to:
        return x
    spec = jax.typeof(x).sharding.spec
    entries = _entries(spec, x.ndim)
    _check_target(x, axis, to, entries)
    if before.kind == "split":
        names = entries[before.dim or 0]
        if names[-1] != axis:
            raise ValueError(
                f"mesh axes {', '.join(names)} split dimension {before.dim} together, {names[-1]!r}"
                f" innermost: box that one first, then {axis!r}"
            )
        entries[before.dim or 0] = names[:-1]
    if to.kind == "split":
        entries[to.dim or 0] += (axis,)
    unreduced = spec.unreduced | {axis} if to == PARTIAL else spec.unreduced - {axis}
    target = PartitionSpec(*entries, unreduced=unreduced, reduced=spec.reduced - {axis})
    return move(x, target)


def _entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Names of the axes over each dimension."""
    given = [*spec.partitions, *(None,) * (ndim - len(spec.partitions))]
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in given]


def _check_axis(axis: str) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if not mesh.empty else {}
    if types.get(axis) != AxisType.Explicit:
        there = [name for name, kind in types.items() if kind == AxisType.Explicit]
        raise ValueError(
            f"{axis!r} is no Explicit axis of the current mesh ({', '.join(there) or 'there is no'}"
            f"{'' if there else ' such mesh'}): placements are read off types; make a mesh with"
            " sharding.make_mesh and set it with jax.set_mesh"
        )


def _check_target(x: Array, axis: str, to: AxisPlacement, entries: list[tuple[str, ...]]) -> None:
    if to == PARTIAL and x.dtype == bool:
        raise ValueError(
            f"booleans cannot be partial on {axis!r}, as they do not add up: convert them first"
        )
    if to.kind != "split":
        return
    if to.dim is None or not 0 <= to.dim < x.ndim:
        raise ValueError(
            f"{to} of an array of {x.ndim} dimensions: the dimension must be from 0 to {x.ndim - 1}"
        )
    mesh_shape = jax.sharding.get_abstract_mesh().shape
    parts = mesh_shape[axis]
    for name in entries[to.dim]:
        parts *= mesh_shape[name] if name != axis else 1
    if x.shape[to.dim] % parts:
        raise ValueError(
            f"dimension {to.dim} of size {x.shape[to.dim]} must be divisible by its {parts} parts"
            f" to be split over {axis!r}: choose a multiple of {parts}, or another dimension"
        )
