# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces lost layers by weighted means of their neighbours (CheckFree, arXiv 2506.15461).

    W_i = (g_after W_after + g_before W_before) / (g_after + g_before),    g = norm + 1e-4

with the norm of the clipped gradient in the last accepted step, over all layers that one such W
has. Lost layers that follow one another are replaced together, by as many layers before and after
them: layer j of a lost stage becomes the mean of the layers j of the stages beside it. At an end,
or beside other lost layers, the only neighbour is copied; with `training.skipping.order` of
CheckFree+, swapped_ends, it was trained for the place of the end as well as for its own.

No mean replaces rows of the vocabulary, which stages hold parts of. As CheckFree+ copies embedding
and head to neighbouring stages, each stage keeps the rows of the one before it, in a ring.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Bool, Float

from jaxmoe.models.config import ModelConfig
from jaxmoe.training.pipeline.stages import ModelParts
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.constrain import place_like

RATE = 1.1
"""Factor on the learning rate after a replacement."""
_LEAST = 1e-4
"""Number added to every norm."""

Sources = Mapping[int, tuple[tuple[int, float], ...]]
"""Layers from which each lost layer is made, with their weights, whose sum is 1."""


def remember_layers(
    model: ModelConfig, state: TrainState, grads: Any, is_good: Bool[Array, ""]
) -> TrainState:
    """Return the state with the gradient norms of its layers, if it keeps them.

    Args:
        model: Model of the state.
        state: State after the step.
        grads: Clipped gradients; frozen parameters may be masked.
        is_good: Whether the step was accepted; the norms stay as they were otherwise.
    """
    if state.layer_norms is None:
        return state
    layers = jax.tree.leaves(grads[ModelParts.of(model).staged.name])
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))
        for leaf in layers
    ]
    if not squares:
        return state
    norms = place_like(jnp.sqrt(sum(squares[1:], squares[0])), state.layer_norms)
    norms = jnp.where(is_good, norms, state.layer_norms)
    return dataclasses.replace(state, layer_norms=norms)


def mirror_rows(state: TrainState) -> TrainState:
    """Return the state with the rows that the stage before each holds, if it keeps them.

    Args:
        state: State after the step; on a mesh with stages, which cut the mirrored parameters.
    """
    if state.mirror is None:
        return state
    flat: dict[Any, Any] = dict(traverse_util.flatten_dict(state.params))
    kept = {path: _from_before(flat[path]) for path in traverse_util.flatten_dict(state.mirror)}
    return dataclasses.replace(state, mirror=traverse_util.unflatten_dict(kept))


def _from_before(x: Array) -> Array:
    spec = jax.typeof(x).sharding.spec
    stages = jax.sharding.get_abstract_mesh().shape[ax.STAGE]
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]
    send = jax.shard_map(
        lambda own: jax.lax.ppermute(own, ax.STAGE, ring), in_specs=spec, out_specs=spec
    )
    return send(x)


def sources_of(lost: Collection[int], norms: Float[np.ndarray, " layers"]) -> Sources:
    """Return the layers from which lost layers are made.

    Args:
        lost: Numbers of the lost layers.
        norms: Gradient norm of each layer; zeros, which give plain means, if unknown.

    Raises:
        ValueError: Lost layers have not as many layers on one side that survive.
    """
    found = {}
    for first, last in _runs(sorted(lost)):
        size, sides = last - first, []
        for start in (first - size, last):
            layers = range(start, start + size)
            if start >= 0 and layers.stop <= len(norms) and not set(layers) & set(lost):
                sides.append((start, math.hypot(*norms[start : start + size]) + _LEAST))
        if not sides:
            raise ValueError(
                f"layers {first} to {last - 1} of {len(norms)} are lost, and neither the {size}"
                " before nor the same number after them survive"
            )
        total = sum(weight for _, weight in sides)
        for place in range(size):
            found[first + place] = tuple((s + place, weight / total) for s, weight in sides)
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return numbers that follow one another as (first, last + 1)."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [(run[0], run[-1] + 1) for run in runs]
