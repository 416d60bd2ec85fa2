# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fills in arrays of a training state that older checkpoints lack.

Such arrays start as zeros, as in a new run. Every other difference between a checkpoint and the
target is an error.

To add an array, or a tree of them: `jaxmoe/checkpoint/later_arrays.py` (a line in `LATER`). It must
be all zeros in a new run, and may be None in `TrainState`.
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

LATER = {
    "recent_norms": "gradient norms of the last steps, which bound that of the next",
    "parts/layer_norms": "gradient norms of the layers, which weight neighbours of a lost one",
    "parts/mirror": "rows of the vocabulary of the stages before, the copies for a lost stage",
}
"""Fields of the state, or entries of one of its dictionaries, and their meaning."""
_CHOSEN = ("parts/layer_norms", "parts/mirror")
"""Fields that a run may stop to keep; a checkpoint that has them is read without them."""


def without_later(manifest: CheckpointManifest, target: Any) -> Any:
    """Return the target with the later arrays that the checkpoint has.

    Args:
        manifest: Manifest of the checkpoint.
        target: State; anything else is returned unchanged.
    """
    changed: dict[str, Any] = dict.fromkeys(_missing(manifest, target))
    for name in _find_unwanted(manifest, target):
        placed = getattr(target.step, "sharding", None)
        leaves = {
            path.removeprefix(name): jax.ShapeDtypeStruct(
                manifest.arrays[path]["shape"], manifest.arrays[path]["dtype"], sharding=placed
            )
            for path in _save(manifest, name)
        }
        tree = {path.removeprefix(SEPARATOR): leaf for path, leaf in leaves.items() if path}
        changed[name] = leaves.get("") or traverse_util.unflatten_dict(tree, sep=SEPARATOR)
    return _change(target, changed) if changed else target


def with_later(manifest: CheckpointManifest, state: Any, target: Any, where: str) -> Any:
    """Return the restored state with the later arrays of the target.

    Those that the checkpoint lacks are zeros, with a warning for each.

    Args:
        manifest: Manifest of the checkpoint.
        state: State restored to `without_later(manifest, target)`.
        target: State with all arrays, or `jax.ShapeDtypeStruct`.
        where: Name of the checkpoint in messages.
    """
    missing, unwanted = _missing(manifest, target), _find_unwanted(manifest, target)
    if not missing and not unwanted:
        return state
    for name in missing:
        logger.warning("%s has no %s (%s): it starts as zeros", where, name, LATER[name])
    empty = {name: jax.tree.map(_empty, _value(target, name)) for name in missing}
    return _change(state, empty | dict.fromkeys(unwanted))


def _missing(manifest: CheckpointManifest, target: Any) -> list[str]:
    return [
        name for name in LATER if _value(target, name) is not None and not _save(manifest, name)
    ]


def _find_unwanted(manifest: CheckpointManifest, target: Any) -> list[str]:
    return [
        name
        for name in _CHOSEN
        if _is_state(target) and _value(target, name) is None and _save(manifest, name)
    ]


def _is_state(target: Any) -> bool:
    return all(hasattr(target, name.partition(SEPARATOR)[0]) for name in LATER)


def _value(target: Any, name: str) -> Any:
    """Return a field of the state, or an entry of one; None if there is none."""
    field, _, key = name.partition(SEPARATOR)
    value = getattr(target, field, None)
    return value.get(key) if key and value is not None else value


def _change(state: Any, changes: dict[str, Any]) -> Any:
    """Return the state with other fields and entries; entries that are None are left out."""
    for name, value in changes.items():
        field, _, key = name.partition(SEPARATOR)
        if key:
            entries = {**getattr(state, field), key: value}
            value = {key: entry for key, entry in entries.items() if entry is not None}
        state = dataclasses.replace(state, **{field: value})
    return state


def _save(manifest: CheckpointManifest, name: str) -> list[str]:
    """Return the paths of a field's arrays in the checkpoint."""
    return [p for p in manifest.arrays if p == name or p.startswith(name + SEPARATOR)]


def _empty(leaf: Any) -> Any:
    placed = getattr(leaf, "sharding", None)
    make = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=placed)
    return make()
