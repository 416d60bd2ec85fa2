# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs code that is Manual over one mesh axis and Explicit over the others.

Pipelines run in a region over `stage`: arrays are those of one stage, the layers inside go on with
their layouts over the other axes, and collectives over `stage` are written by hand.

Rules inside:

    no collective over the region's axis is differentiated: take `jax.vjp` of functions of one
    place, and put the collectives around it
    no array from outside is closed over: pass it as an argument, PRNG keys as key data
    no branch depends on the place in the axis: a collective permute in such a branch computes wrong
    numbers (jax 0.10.2 and 0.12.0 on CPUs)
    sums over the axis are those of `sum_over`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, explicit_axes
from jaxtyping import Array

from sharding.constrain import lie_at


def region(function: Callable[..., Any], *, axis: str, out_specs: Any) -> Callable[..., Any]:
    """Return `function` on the parts of its arguments at one place of a mesh axis.

    Args:
        function: Called with arrays that are local in `axis` and global in the other axes.
        axis: Mesh axis; Explicit outside.
        out_specs: Specs of the whole results, as a tree or a prefix of one. A result whose spec
            leaves `axis` out must be equal at every place.

    Returns:
        A function of whole arrays, which enter as they lie.
    """

    def run(*arguments: Any) -> Any:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arguments)
        free_axes = tuple(
            name for name in jax.sharding.get_abstract_mesh().axis_names if name != axis
        )
        inside = jax.tree.map(lambda spec: _split(spec, axis)[1], specs, is_leaf=_is_spec)

        def body(*local: Any) -> Any:
            return explicit_axes(function, axes=free_axes, in_sharding=inside)(*local)

        def only(tree: Any) -> Any:
            return jax.tree.map(lambda spec: _split(spec, axis)[0], tree, is_leaf=_is_spec)

        # Differentiating a region inside fails to lower where the region checks what varies.
        mapped = jax.shard_map(
            body,
            in_specs=only(specs),
            out_specs=only(out_specs),
            axis_names={axis},
            check_vma=False,
        )
        # Auto axes at the border: from Explicit ones jax 0.10 gathers every argument.
        return lie_at(mapped, axes=free_axes, specs=out_specs)(*arguments)

    return run


def sum_over(axis: str, tree: Any) -> Any:
    """Return the sums of arrays over the axis of a region, equal at every place.

    Args:
        axis: Axis of the region.
        tree: Arrays that are local in the axis.
    """

    def add(x: Array) -> Array:
        return jax.lax.psum(x, axis)

    def add_wide(x: Array) -> Array:
        return add(x.astype(jnp.float32)).astype(x.dtype)

    def one(x: Array) -> Array:
        if x.dtype != jnp.bfloat16:
            return add(x)
        # XLA for CPUs aborts where it widens this sum: the reducer in a region has a constraint.
        return jax.lax.platform_dependent(x, cpu=add_wide, default=add)

    return jax.tree.map(one, tree)


def _split(spec: PartitionSpec, axis: str) -> tuple[PartitionSpec, PartitionSpec]:
    """Return the spec of one mesh axis alone, and the spec of the others."""

    def without(entry: Any) -> Any:
        if not isinstance(entry, tuple):
            return None if entry == axis else entry
        return tuple(name for name in entry if name != axis) or None

    has = [axis == entry or isinstance(entry, tuple) and axis in entry for entry in spec]
    return PartitionSpec(*(axis if at else None for at in has)), PartitionSpec(*map(without, spec))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
