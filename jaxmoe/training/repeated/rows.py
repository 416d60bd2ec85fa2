# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Passes over the rows of a step that an adapter compares with each other (REINFORCE).

An adapter with M = `passes` above 1 draws its additions at random, and trains the distribution q of
the draws J by the losses of several draws, each compared with the mean of all (leave-one-out):

    gradient of E L  ~  sum_m a_m grad log q(J_m)      a_m = (L_m - mean L) / (M - 1)

Row b becomes rows M b to M b + M - 1, with numbers of their own, from which random numbers are
drawn. A pass without gradient finds their losses, L; the pass with gradient draws the same, and the
adapter reads `a` of each token as `ADVANTAGE`. All other gradients are means over the M rows. Each
row is compared with itself alone: rows must not change each other's losses, as they do where tokens
compete for room in an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch
from jaxmoe.layers.mixing import ADVANTAGE
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.accumulation import MicroBatch, split_rows
from sharding import axes as ax
from sharding.constrain import Placement


def repeated(rows: Any, passes: int, placement: Placement) -> Any:
    """Return the arrays of a tree with each row several times, one after the other.

    Args:
        rows: Arrays [B ...].
        passes: Number of times M.
        placement: Layout of the rows.
    """

    def repeat(array: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        return jnp.repeat(array, passes, axis=0)

    def one(array: Any) -> Array:
        array = jnp.asarray(array)
        axes = (ax.ACT_BATCH,) + (None,) * (array.ndim - 1)
        return placement.island(repeat, in_axes=(axes,), out_axes=axes)(array)

    return jax.tree.map(one, rows)


class Rows(NamedTuple):
    """Rows of a step, and how they are divided."""

    batch: Batch
    total_weight: Float[Array, ""]
    """Sum of the loss weights."""
    accumulation: int
    """Number of micro-batches."""
    first_row: Any
    """Number of the first row."""


def compared(
    rows: Rows,
    row_losses: Callable[[MicroBatch], Float[Array, " b"]],
    passes: int,
    placement: Placement,
) -> Rows:
    """Return each row several times, with `ADVANTAGE` in `extra`; as they are for one pass.

    A micro-batch's share of the losses of a step is 1 / accumulation; the advantages are multiplied
    with their number, so that the sum over all of them remains.

    Args:
        rows: Rows of a step.
        row_losses: Summed losses of the rows of a micro-batch, nats.
        passes: Number of times M.
        placement: Layout of the rows.

    Raises:
        ValueError: The batch is packed by level: shares of micro-batches then differ.
    """
    if passes == 1:
        return rows
    if rows.batch.level is not None:
        raise ValueError(
            "data.packing levels makes micro-batches of unequal shares, and the adapter compares"
            " several passes over each: set data.packing to best_fit"
        )
    batch, first_row = repeated(rows.batch, passes, placement), passes * rows.first_row
    total_weight, accumulation = passes * rows.total_weight, passes * rows.accumulation
    number = batch.tokens.shape[0]
    micro = MicroBatch(batch=batch, row_ids=first_row + jnp.arange(number, dtype=jnp.int32))
    split = partial(split_rows, accumulation=accumulation, placement=placement)
    losses = jax.lax.map(row_losses, jax.tree.map(split, micro))
    losses = placement.place(jax.lax.stop_gradient(losses), (None, None))
    own = advantages(losses.T.reshape(-1, passes)) * (passes * accumulation / total_weight)
    wide = jnp.broadcast_to(own.reshape(number, 1), batch.tokens.shape)
    placed = placement.place(wide, (ax.ACT_BATCH, ax.ACT_SEQ))
    batch = dataclasses.replace(batch, extra=batch.extra | {ADVANTAGE: placed})
    return Rows(batch, total_weight, accumulation, first_row)


def advantages(losses: Float[Array, "*B M"]) -> Float[Array, "*B M"]:
    """Return the factors of the gradients of log q: (L_m - mean L) / (M - 1).

    Args:
        losses: Losses of M draws, M at least 2.
    """
    centred = losses - jnp.mean(losses, axis=-1, keepdims=True)
    return centred / (losses.shape[-1] - 1)


def num_passes(model: ModelConfig) -> int:
    """Return the passes over each row of a step that the adapter of a model compares."""
    return 1 if model.adapter is None else model.adapter.passes


def check_repeated(model: ModelConfig, *, name: str, is_backward: bool) -> None:
    """Refuse what an adapter that compares passes cannot be trained with.

    Args:
        model: Model with its adapter.
        name: Name of the estimator of the gradient.
        is_backward: Whether it has a backward pass.

    Raises:
        ValueError: A gradient without a backward pass, or a loop over layers, whose turns but the
            last report no losses.
    """
    if num_passes(model) == 1 or model.adapter is None:
        return
    start = f"adapter:{model.adapter.name} trains a router by the losses of several draws, and"
    if not is_backward:
        raise ValueError(
            f"{start} training.gradients:{name} has no backward pass: set training.gradients to"
            " backprop"
        )
    if model.loop is not None:
        raise ValueError(
            f"{start} model.loop draws anew in each turn and keeps the last: set model.loop to None"
        )
