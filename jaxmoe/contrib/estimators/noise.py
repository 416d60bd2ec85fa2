# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Normal noise in the shape of the parameters, made anew from a key wherever it is needed.

    z(path, layer) = normal(fold_in(fold_path(key, path), layer))

A parameter of the layers has one key for each layer, so that a device makes the noise of one layer
alone, in a loop over layers, and noise never travels and is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.declarations import MatrixAxes, fold_path
from jaxmoe.layers.view import View
from jaxmoe.models.stacks import Scan
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding.constrain import place_at, place_like, surroundings

KEYS = "keys"
SCALE = "scale"
"""Names of the own parameters of a view that adds noise."""

Draw = Callable[[Array, tuple[int, ...], MatrixAxes | None], Array]
"""(key, shape of a parameter of one layer, dimensions of its matrix) -> f32 noise of that shape."""


def normal(key: Array, shape: tuple[int, ...], matrix: MatrixAxes | None) -> Array:
    """Return independent normal noise; see `Draw`."""
    del matrix
    return jax.random.normal(key, shape, jnp.float32)


def noise_view(
    table: ParameterTable,
    scans: Sequence[Scan],
    key: Array,
    scale: Float[Array, ""],
    draw: Draw = normal,
) -> View:
    """Return the view `parameters + scale * z` of the trained parameters.

    Args:
        table: Parameters of the model.
        scans: Scans of the model.
        key: PRNG key of the noise.
        scale: Factor on the noise.
        draw: Distribution of the noise of one parameter of one layer.
    """
    arrays: dict[str, Any] = {}
    matrices: dict[str, MatrixAxes | None] = {}
    for row in table.trained_rows:
        *parents, name = _split(row, scans)
        node = arrays
        for parent in parents:
            node = node.setdefault(parent, {})
        keys = _keys(row, key)
        node.setdefault(KEYS, {})[name] = keys
        node[SCALE] = jnp.broadcast_to(scale, keys.shape)
        matrices["/".join((*parents, name))] = row.declaration.matrix
    return View(rewrite=partial(_add_noise, draw, matrices), own=arrays)


def _add_noise(
    draw: Draw,
    matrices: Mapping[str, MatrixAxes | None],
    params: dict[str, Any],
    arrays: Any,
    part: str,
) -> dict[str, Any]:
    """Return parameters of one layer, or of a module outside the layers, with noise added."""
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    for path, key in arrays.get(KEYS, {}).items():
        leaf = flat[path]
        z = place_like(draw(key, leaf.shape, matrices[f"{part}/{path}"]), leaf)
        flat[path] = leaf + (arrays[SCALE] * z).astype(leaf.dtype)
    return traverse_util.unflatten_dict(flat, sep="/")


def noise_sum(
    table: ParameterTable,
    params: Any,
    keys: Array,
    factors: Float[Array, " n"],
    draw: Draw = normal,
) -> dict[str, Any]:
    """Return the sum of factor times noise over keys, laid out as the parameters.

    One layer of one parameter is made at a time.

    Args:
        table: Parameters of the model; frozen ones are masked in the result.
        params: Parameters, for their layout.
        keys: PRNG keys [n].
        factors: Factor on the noise of each key.
        draw: Distribution of the noise of one parameter of one layer.
    """
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")

    def of(row: ParameterSpec) -> Any:
        if row.is_frozen:
            return optax.MaskedNode()
        leaf = flat[row.path]
        is_stacked = row.declaration.is_stacked
        shape = row.shape[1:] if is_stacked else row.shape
        spec = PartitionSpec()
        if surroundings() == "explicit":
            leaf_spec = jax.typeof(leaf).sharding.spec
            spec = PartitionSpec(*leaf_spec[1:]) if is_stacked else leaf_spec

        def total(keys_of_row: Array) -> Array:
            def add(partial: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
                key, factor = pair
                z = place_at(draw(key, shape, row.declaration.matrix), spec)
                return partial + factor * z, None

            first = place_at(jnp.zeros(shape, jnp.float32), spec)
            return jax.lax.scan(add, first, (keys_of_row, factors))[0]

        keys_of_row = jax.vmap(lambda key: _keys(row, key), out_axes=-1)(keys)
        return place_like(
            jax.lax.map(total, keys_of_row) if is_stacked else total(keys_of_row), leaf
        )

    return table.tree(of)


def _keys(row: ParameterSpec, key: Array) -> Array:
    """Return the key of a parameter, or those of its layers [L]."""
    row_key = fold_path(key, row.path)
    if not row.declaration.is_stacked:
        return row_key
    layers = jnp.arange(row.shape[0], dtype=jnp.uint32)
    return jax.vmap(lambda layer: jax.random.fold_in(row_key, layer))(layers)


def _split(row: ParameterSpec, scans: Sequence[Scan]) -> list[str]:
    """Return the parts in which a view finds a parameter, and its path inside of the last."""
    module, *remaining = row.path.split("/")
    is_cycle = any(scan.name == module and scan.is_cycle for scan in scans)
    if is_cycle:
        return [module, remaining[0], "/".join(remaining[1:])]
    return [module, "/".join(remaining)]
