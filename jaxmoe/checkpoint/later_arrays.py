# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that a training state has been given since there are checkpoints.

A checkpoint that was written before lacks them: it stays readable, and they begin empty, as in a
new run. Every other difference between a checkpoint and what is wanted of it stays an error.

To add one: a line in LATER, for an array of the state that is all zeros when it is empty, and that
may be None in `TrainState`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint.manifest import CheckpointManifest

logger = logging.getLogger(__name__)

LATER = {"recent_norms": "gradient norms of the last steps, which bound that of the next"}
"""Field of the state, and what it holds."""


def without_later(manifest: CheckpointManifest, target: Any) -> Any:
    """The target without the arrays that the checkpoint is too old to have.

    Args:
        manifest: of the checkpoint.
        target: a state; anything else is returned as it is.
    """
    missing = _missing(manifest, target)
    return dataclasses.replace(target, **dict.fromkeys(missing)) if missing else target


def with_later(manifest: CheckpointManifest, state: Any, target: Any, where: str) -> Any:
    """The restored state with those arrays, empty, and a line that says so.

    Args:
        manifest: of the checkpoint.
        state: restored to `without_later(manifest, target)`.
        target: with the arrays, or `jax.ShapeDtypeStruct`.
        where: what to call the checkpoint.
    """
    missing = _missing(manifest, target)
    if not missing:
        return state
    for name in missing:
        logger.warning("%s has no %s (%s): it begins empty", where, name, LATER[name])
    return dataclasses.replace(state, **{name: _empty(getattr(target, name)) for name in missing})


def _missing(manifest: CheckpointManifest, target: Any) -> list[str]:
    return [
        name
        for name in LATER
        if getattr(target, name, None) is not None and name not in manifest.arrays
    ]


def _empty(leaf: Any) -> Any:
    placed = getattr(leaf, "sharding", None)
    make = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=placed)
    return make()
