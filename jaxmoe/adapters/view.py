# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies adapters of the view form: parameters rewritten where they are used.

    params of one layer, with the adapter's own among them -> params that the layer computes with

Own parameters are rows of the parameter table whose name has a colon: `attention/q:places` beside
`attention/q`, with the leading dimension of its layers; or `adapter:store` at the root, which all
layers read. So table, optimisers, sharding and checkpoints treat them as all others, and the scan
hands each layer its own. `forward` applies the rewriting after that of a `View` that is given, so
that estimators perturb own parameters too.

An adapter of this form defines `table`, `rewrite` and `has_view = True`; `prepare` for values that
all layers need, and `begin` for initial values that depend on the model's. The factor form
(`sharding/products/low_rank.py`) is cheaper where an addition is of low rank: here the gradient of
a whole matrix is formed for one layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax

from jaxmoe.adapters.base import Adapter, Layers
from jaxmoe.layers.view import Tree, View, view_outside


def adapted_view(
    adapter: Adapter, params: Tree, view: View | None, scans: Collection[str]
) -> tuple[Tree, View]:
    """Return parameters with those outside the layers rewritten, and the view of the layers.

    Args:
        adapter: Adapter with a view.
        params: Parameters of the adapted model.
        view: View that is applied before the adapter's; its part outside the layers has been.
        scans: Names of the scans of layers.
    """
    modules, shared = _split(params)
    rewrite = functools.partial(_both, adapter, shared, view)
    arrays = {} if view is None else view.own
    outside, _ = view_outside(modules, View(rewrite=rewrite, own={}), scans)
    return outside, View(rewrite=rewrite, own=arrays)


def viewed_outside(adapter: Adapter, params: Tree, scans: Collection[str]) -> Tree:
    """Return parameters with those outside the layers rewritten, for losses that read the head.

    Args:
        adapter: Adapter; without a view the parameters stay as they are.
        params: Parameters of the adapted model.
        scans: Names of the scans of layers.
    """
    if not adapter.has_view:
        return params
    _, shared = _split(params)
    return adapted_view(adapter, params, None, scans)[0] | shared


def viewed_everywhere(adapter: Adapter, params: Tree, layers: Layers) -> Tree:
    """Return all parameters rewritten, one layer after the other.

    Args:
        adapter: Adapter; without a view the parameters stay as they are.
        params: Parameters of the adapted model.
        layers: Numbers of the layers of each stack, by the path of the stack.
    """
    if not adapter.has_view:
        return params
    modules, shared = _split(params)
    scans = {path.partition("/")[0] for path, _ in layers}
    result = adapted_view(adapter, params, None, scans)[0]
    for path, _ in layers:
        scan, _, place = path.partition("/")
        stacked = modules[scan][place] if place else modules[scan]
        rewritten = jax.lax.map(
            lambda layer_arrays, path=path: adapter.rewrite(layer_arrays, shared, path), stacked
        )
        result[scan] = (result[scan] | {place: rewritten}) if place else rewritten
    return result


def _split(params: Tree) -> tuple[Tree, Tree]:
    """Return the modules of the model, and own parameters at the root."""
    shared = {name: leaf for name, leaf in params.items() if ":" in name}
    return {name: node for name, node in params.items() if name not in shared}, shared


def _both(
    adapter: Adapter, shared: Tree, view: View | None, params: Tree, arrays: Any, part: str
) -> Tree:
    """Return the parameters of a part, rewritten by a view with own ones there, and the adapter."""
    if view is not None and arrays:
        params = view.rewrite(params, arrays, part)
    return adapter.rewrite(params, shared, part)
