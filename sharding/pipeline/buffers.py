# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads, stores and adds trees in slots: entries of arrays along their leading dimension."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sharding.constrain import zeros_of

Number = Int[Array, ""]


def read(slots: Any, index: Number) -> Any:
    """Return one entry of the leading dimension; the first for -1."""
    index = jnp.maximum(index, 0)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), slots)


def store(slots: Any, tree: Any, index: Number) -> Any:
    """Return the slots with one of them replaced; -1 replaces the last, which no stage reads."""

    def put(slots: Array, x: Array) -> Array:
        at = jnp.where(index < 0, slots.shape[0] - 1, index)
        return jax.lax.dynamic_update_index_in_dim(slots, x, at, 0)

    return jax.tree.map(put, slots, tree)


def add_to(totals: Any, tree: Any, chunk: Number) -> Any:
    """Return totals with a leading dimension of chunks, with the tree added to one of them.

    A total stays where the tree has None.
    """

    def add(x: Array | None, total: Any) -> Any:
        return total if x is None else store(total, read(total, chunk) + x, chunk)

    return jax.tree.map(add, tree, totals, is_leaf=lambda x: x is None)


def where(condition: Bool[Array, ""], tree: Any) -> Any:
    """Return the tree, or zeros."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def zeros(shapes: Any, *leading: int) -> Any:
    """Return zeros of some shapes, with leading dimensions before them."""
    return jax.tree.map(lambda shape: zeros_of(shape, *leading), shapes)
