# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts the rows of every device into two halves for the layers (TokenWeave, arXiv 2505.11329).

Half h holds rows h, h + 2, ... of the batch: whole sequences, half of those of each device.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from sharding import axes as ax
from sharding.constrain import Placement

LEAST_TOKENS: Final = 1024
"""Fewest tokens of one device: products of fewer rows leave its units idle. Not measured here."""


def begin_halves(
    model: ModelConfig, execution: ExecutionConfig, stream: Any, tokens: Any, *, has_cache: bool
) -> tuple[Any, Any]:
    """Return the stream and the inputs of all layers, each as two halves.

    Args:
        model: Model with the routers.
        execution: With two halves.
        stream: Stream before the first layer.
        tokens: Inputs of all layers.
        has_cache: Whether caches of earlier tokens are given.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    check_halves(model, execution, tokens.token_mask.shape, sizes, has_cache=has_cache)
    return split(stream, execution.placement), split(tokens, execution.placement)


def end_halves(execution: ExecutionConfig, stream: Any) -> Any:
    """Return the stream of all rows after the last layer."""
    first, second = stream
    return join(first, second, execution.placement)


def check_halves(
    model: ModelConfig,
    execution: ExecutionConfig,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    *,
    has_cache: bool,
) -> None:
    """Refuse rows that cannot be halved, or whose halves compute something else.

    Args:
        model: Model with the routers.
        execution: With two halves.
        shape: Sequences and tokens of each, over all devices.
        sizes: Size of each axis of the current mesh.
        has_cache: Whether caches of earlier tokens are given.

    Raises:
        ValueError: A device has an odd number of sequences or too few tokens, or a router or
            capacity compares the tokens of a batch.
    """

    def devices(axis: str) -> int:
        return math.prod(sizes.get(name, 1) for name in execution.axis_rules.mesh_axes(axis))

    if has_cache:
        raise ValueError(
            "execution.halves=2 computes whole sequences, and a cache was given: decode with"
            " execution.halves 1"
        )
    carried = model.carries(execution)
    wide = [name for name, array in carried.items() if not array.is_by_token]
    if wide:
        raise ValueError(
            "execution.halves=2 splits what flows from layer to layer by positions, and shared"
            f" {' and '.join(wide)} of model.attention are split by heads: set execution.halves to"
            " 1"
        )
    if model.kinds[0].mixer.merges_streams:
        raise ValueError(
            "execution.halves=2 takes every other row, and the streams of a sequence are rows next"
            " to one another: set execution.halves to 1"
        )
    number, length = shape
    shards = devices(ax.ACT_BATCH)
    if number % (2 * shards):
        raise ValueError(
            f"execution.halves=2 cuts the sequences of each device in two: {number} sequences on"
            f" {shards} devices must be divisible by {2 * shards}: change training.batch_size or"
            " training.accumulation, or set execution.halves to 1"
        )
    tokens = number // shards * length // devices(ax.ACT_SEQ_INNER)
    if tokens < LEAST_TOKENS:
        raise ValueError(
            f"execution.halves=2 needs {LEAST_TOKENS} tokens on each device, and a micro-batch has"
            f" {tokens}: raise training.batch_size or training.sequence_length, lower"
            " training.accumulation, or set execution.halves to 1"
        )
    if model.moe is None:
        return
    traits, capacity = model.moe.router.traits, model.moe.capacity
    if traits.sees_others or traits.evens_load or capacity is not None:
        compares = f"model.moe.capacity={capacity}"
        if capacity is None:
            compares = f"model.moe.router {model.moe.router.name!r}"
        raise ValueError(
            f"execution.halves=2 routes the halves of a batch apart, and {compares} compares the"
            " tokens of a batch: choose another router, model.moe.capacity None, or set"
            " execution.halves to 1"
        )


def split(tree: Any, placement: Placement) -> tuple[Any, Any]:
    """Return the two halves of the rows of all arrays [B S ...]; other arrays are in both."""

    def halves(leaf: Array) -> Array:
        pairs = leaf.reshape(leaf.shape[0] // 2, 2, *leaf.shape[1:])
        rest = (ax.ACT_SEQ,) + (None,) * (leaf.ndim - 2)
        return placement.place(pairs, (ax.ACT_BATCH, None, *rest))

    leaves, structure = jax.tree.flatten(tree)
    cut = [
        (leaf, leaf) if leaf.ndim < 2 else tuple(jnp.moveaxis(halves(leaf), 1, 0))
        for leaf in leaves
    ]
    first, second = (structure.unflatten(pair[half] for pair in cut) for half in (0, 1))
    return first, second


def join(first: Any, second: Any, placement: Placement) -> Any:
    """Return the rows of two halves in their order."""

    def joined(one: Array, other: Array) -> Array:
        pairs = jnp.stack([one, other], axis=1)
        rows = pairs.reshape(-1, *one.shape[1:])
        return placement.place(rows, (ax.ACT_BATCH, ax.ACT_SEQ) + (None,) * (rows.ndim - 2))

    return jax.tree.map(joined, first, second)
