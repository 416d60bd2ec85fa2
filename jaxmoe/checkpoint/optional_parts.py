# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint into a run that begins or stops to keep a part of the training state.

The parts of a run may change when it goes on. A part that the checkpoint lacks starts as
zeros, as in a new run; a part that the run no longer keeps is read and dropped. Every other
difference between a checkpoint and the target is an error.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.state_tree import SEPARATOR

logger = logging.getLogger(__name__)

OPTIONAL = {
    "layer_norms": "gradient norms of the layers, which weight neighbours of a lost one",
    "mirror": "rows of the vocabulary of the stages before, the copies for a lost stage",
}
"""Keys of `TrainState.parts`, and their meaning; each is all zeros in a new run."""


def without_optional(manifest: CheckpointManifest, target: Any) -> Any:
    """Return the target with the optional parts that the checkpoint has.

    Args:
        manifest: Manifest of the checkpoint.
        target: State; anything else is returned unchanged.
    """
    changes: dict[str, Any] = dict.fromkeys(_missing(manifest, target))
    for name in _to_drop(manifest, target):
        placed = getattr(target.step, "sharding", None)
        start = _path(name)
        leaves = {
            path.removeprefix(start): jax.ShapeDtypeStruct(
                manifest.arrays[path]["shape"], manifest.arrays[path]["dtype"], sharding=placed
            )
            for path in _arrays_of(manifest, name)
        }
        tree = {path.removeprefix(SEPARATOR): leaf for path, leaf in leaves.items() if path}
        changes[name] = leaves.get("") or traverse_util.unflatten_dict(tree, sep=SEPARATOR)
    return _with_parts(target, changes) if changes else target


def with_optional(manifest: CheckpointManifest, state: Any, target: Any, where: str) -> Any:
    """Return the restored state with the optional parts of the target.

    Those that the checkpoint lacks are zeros, with a warning for each.

    Args:
        manifest: Manifest of the checkpoint.
        state: State restored to `without_optional(manifest, target)`.
        target: State with all arrays, or `jax.ShapeDtypeStruct`.
        where: Name of the checkpoint in messages.
    """
    missing = _missing(manifest, target)
    dropped = _to_drop(manifest, target)
    if not missing and not dropped:
        return state
    for name in missing:
        text = "%s has no %s (%s): it starts as zeros"
        logger.warning(text, where, _path(name), OPTIONAL[name])
    zeros = {name: jax.tree.map(_zeros, target.parts[name]) for name in missing}
    return _with_parts(state, zeros | dict.fromkeys(dropped))


def _missing(manifest: CheckpointManifest, target: Any) -> list[str]:
    parts = getattr(target, "parts", {})
    return [name for name in OPTIONAL if name in parts and not _arrays_of(manifest, name)]


def _to_drop(manifest: CheckpointManifest, target: Any) -> list[str]:
    parts = getattr(target, "parts", OPTIONAL)  # without parts it is no state
    return [name for name in OPTIONAL if name not in parts and _arrays_of(manifest, name)]


def _with_parts(state: Any, changes: dict[str, Any]) -> Any:
    """Return the state with other parts; those that are None are left out."""
    parts = {name: part for name, part in {**state.parts, **changes}.items() if part is not None}
    return dataclasses.replace(state, parts=parts)


def _path(name: str) -> str:
    return f"parts{SEPARATOR}{name}"


def _arrays_of(manifest: CheckpointManifest, name: str) -> list[str]:
    """Return the paths of a part's arrays in the checkpoint."""
    path = _path(name)
    return [p for p in manifest.arrays if p == path or p.startswith(path + SEPARATOR)]


def _zeros(leaf: Any) -> Any:
    placed = getattr(leaf, "sharding", None)
    make = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=placed)
    return make()
