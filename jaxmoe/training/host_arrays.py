# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes with arrays stacked over layers that lie in host memory, one layer at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

_HOST = jax.memory.Space.Host
_DEVICE = jax.memory.Space.Device


def is_on_host(leaf: Array) -> bool:
    """Return whether an array, which may be traced, lies in host memory."""
    return jax.typeof(leaf).memory_space == _HOST


def on_device(tree: Any) -> list[Array]:
    """Return the arrays of a tree that lie on the device."""
    return [leaf for leaf in jax.tree.leaves(tree) if not is_on_host(leaf)]


def layers_to_host(params: dict[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """Return parameters with some of their modules in host memory.

    Args:
        params: Nested dict of parameters.
        layers: Names of the modules.
    """
    return {
        name: jax.device_put(module, _HOST) if name in layers else module
        for name, module in params.items()
    }


def add(first: Array, second: Array) -> Array:
    """Return the sum of two arrays, in the memory of the first."""
    if not is_on_host(first):
        return first + second

    def body(_: None, pair: Any) -> tuple[None, Array]:
        ours, theirs = jax.device_put(pair, _DEVICE)
        return None, jax.device_put(ours + theirs, _HOST)

    return jax.lax.scan(body, None, (first, second))[1]


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the Euclidean norm of all values of a tree."""
    waiting = [leaf for leaf in jax.tree.leaves(tree) if is_on_host(leaf)]
    norm = optax.tree.norm(on_device(tree))
    if not waiting:
        return norm
    square = norm * norm
    for leaf in waiting:

        def body(total: Array, layer: Array) -> tuple[Array, None]:
            layer = jax.device_put(layer, _DEVICE)
            return total + jnp.sum(jnp.square(layer.astype(total.dtype))), None

        square, _ = jax.lax.scan(body, square, leaf)
    return jnp.sqrt(square)
