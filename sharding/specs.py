# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shardings of whole trees, from the types that their leaves already carry."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of NamedSharding from a tree of PartitionSpec.

    Args:
        specs: PartitionSpec leaves.
        mesh: on which they are meant.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def abstract(tree: Any, mesh: Mesh | None = None) -> Any:
    """`jax.ShapeDtypeStruct` leaves with the shardings of concrete or traced arrays.

    Args:
        tree: arrays, or the result of `jax.eval_shape` under a current Explicit mesh.
        mesh: the concrete mesh to put in place of an abstract one.
    """

    def describe(leaf):
        placed = leaf.sharding
        if mesh is not None and isinstance(placed, NamedSharding):
            placed = NamedSharding(mesh, placed.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    return jax.tree.map(describe, tree)
