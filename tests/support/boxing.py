# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes the transitions of `sharding/sbp.py` on arrays, so that tests can compile each of them.

JAX's types keep the rest of the algebra: what is not linear refuses a partial operand, as does a
product of two.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Shaped

from sharding.sbp import BROADCAST, PARTIAL, AxisState, split


def placement(x: Shaped[Array, "*dims"], axis: str) -> AxisState:
    """Return the state of an array on an axis of the current Explicit mesh.

    Args:
        x: Traced or concrete array.
        axis: Name of a mesh axis.

    Raises:
        ValueError: There is no such axis, or it is not Explicit.
    """
    _check_axis(axis)
    spec = jax.typeof(x).sharding.spec
    if axis in spec.unreduced:
        return PARTIAL
    for dim, names in enumerate(_entries(spec, x.ndim)):
        if axis in names:
            return split(dim)
    return BROADCAST


def box(x: Shaped[Array, "*dims"], axis: str, to: AxisState) -> Shaped[Array, "*dims"]:
    """Return the array in another state on one axis: one row of TRANSITIONS.

    Args:
        x: Array on the current Explicit mesh.
        axis: Axis of that mesh; states on the other axes stay.
        to: `split(dim)`, BROADCAST or PARTIAL.

    Raises:
        ValueError: The axis or dimension does not exist or does not divide; the axis splits a
            dimension together with others and is not the innermost; booleans cannot be partial.
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
    return jax.sharding.reshard(x, target)


def _entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Return the names of the axes over each dimension."""
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


def _check_target(x: Array, axis: str, to: AxisState, entries: list[tuple[str, ...]]) -> None:
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
