# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Accumulates gradients over the micro-batches of one step.

Micro-batch i holds rows i, i+accumulation, ... of the batch, so that every device keeps its own
rows and the rows of a micro-batch do not depend on the mesh. A row keeps its number, so that the
noise of routers does not depend on the accumulation.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.layers.observer import Observations
from jaxmoe.routing import RouterStatistics
from jaxmoe.training.host_arrays import add
from sharding import axes as ax
from sharding.constrain import Placement


class Rows(NamedTuple):
    """Rows of a step, and how they are divided."""

    batch: Batch
    total_weight: Float[Array, ""]
    """Sum of the loss weights."""
    accumulation: int
    """Number of micro-batches."""
    first_row: Any
    """Number of the first row."""


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class MicroBatch:
    """Rows of one micro-batch."""

    batch: Batch
    row_ids: Int[Array, " B"]
    """Number of each row in the whole batch."""
    number: Int[Array, ""] | None = None
    """Number among the micro-batches of the step; None where it is not one of several."""


@typing.no_type_check
@struct.dataclass
class GradientSums:
    """Sums over the micro-batches of one step."""

    grads: Any
    loss: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    statistics: RouterStatistics | None
    observations: Observations | None = None
    """What the observer has seen."""
    row_nll: Float[Array, " B"] | None = None
    """Sum of row i of each micro-batch, which one worker holds, if the losses of workers are
    reported."""
    extra_args: dict[str, Any] = struct.field(default_factory=dict)
    """Further arguments of the optimiser's update; see `MeasuringTransformation.backward`."""

    def __add__(self, other: GradientSums) -> GradientSums:
        # Some observations are maxima: the record defines its own sum.
        return jax.tree.map(_add, self, other, is_leaf=_is_observations)


def _add(x: Any, y: Any) -> Any:
    return x + y if _is_observations(x) else add(x, y)


def _is_observations(node: Any) -> bool:
    return isinstance(node, Observations)


Share = float | Float[Array, ""]
"""Share of a micro-batch in the tokens of a step."""
GradientsOf = Callable[[MicroBatch, Share, RouterStatistics | None], GradientSums]
"""(rows, their share of the step, statistics of other micro-batches) -> their part of the step."""


def accumulate(
    gradients_of: GradientsOf,
    batch: Batch,
    accumulation: int,
    placement: Placement,
    *,
    first_row: Any = 0,
    statistics_of: Callable[[MicroBatch], RouterStatistics] | None = None,
) -> GradientSums:
    """Sum `gradients_of` over micro-batches.

    Args:
        gradients_of: Receives the statistics of the previous micro-batches, None for the first;
            with `statistics_of`, those of the whole batch.
        batch: Rows of the step.
        accumulation: Number of micro-batches.
        placement: Layout of the rows.
        first_row: Number of the first row.
        statistics_of: Statistics of a micro-batch, in a pass over all of them before the gradients.

    Raises:
        ValueError: `accumulation` does not divide the batch.
    """
    rows = batch.tokens.shape[0]
    single = MicroBatch(batch=batch, row_ids=first_row + jnp.arange(rows, dtype=jnp.int32))
    if accumulation == 1:
        return gradients_of(single, 1.0, None)
    parts = jax.tree.map(lambda rows: split_rows(rows, accumulation, placement), single)
    parts = dataclasses.replace(parts, number=jnp.arange(accumulation, dtype=jnp.int32))
    first = jax.tree.map(lambda a: a[0], parts)
    later = jax.tree.map(lambda a: a[1:], parts)
    if batch.level is not None:
        return _accumulate_used(gradients_of, parts, statistics_of)
    share = 1.0 / accumulation
    summed = None
    if statistics_of is not None:
        summed, _ = jax.lax.scan(
            lambda total, part: (total + statistics_of(part), None), statistics_of(first), later
        )

    def body(total: GradientSums, part: MicroBatch) -> tuple[GradientSums, None]:
        statistics = total.statistics if summed is None else summed
        return total + gradients_of(part, share, statistics), None

    total, _ = jax.lax.scan(body, gradients_of(first, share, summed), later)
    return total


def _accumulate_used(
    gradients_of: GradientsOf,
    parts: MicroBatch,
    statistics_of: Callable[[MicroBatch], RouterStatistics] | None,
) -> GradientSums:
    """Sum over the micro-batches that have a level: the first ones, as many as a step needs.

    The number is an array, so that one program serves every step. No gradient goes through the
    loop. The share of a micro-batch is that of its tokens.

    Args:
        gradients_of: See `accumulate`.
        parts: All micro-batches, with a leading dimension; the first is used.
        statistics_of: See `accumulate`.
    """
    tokens = level_tokens(parts.batch.segment_ids)
    shares = tokens / jnp.maximum(jnp.sum(tokens), 1.0)
    num_used = jnp.sum(level_of(parts.batch.level) >= 0, dtype=jnp.int32)

    def part(i: Any) -> MicroBatch:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), parts)

    summed = None
    if statistics_of is not None:
        summed = jax.lax.fori_loop(
            1, num_used, lambda i, total: total + statistics_of(part(i)), statistics_of(part(0))
        )

    def body(i: Array, total: GradientSums) -> GradientSums:
        statistics = total.statistics if summed is None else summed
        return total + gradients_of(part(i), shares[i], statistics)

    return jax.lax.fori_loop(1, num_used, body, gradients_of(part(0), shares[0], summed))


def level_of(level: Any) -> Int[Array, " M"]:
    """Return the level of each micro-batch; -1 for those that are left out.

    Args:
        level: `Batch.level` of every micro-batch, [M B].
    """
    return jnp.max(jnp.asarray(level), axis=1)


def level_tokens(segment_ids: Any) -> Float[Array, " M"]:
    """Return the tokens of each micro-batch that are not padding.

    Args:
        segment_ids: `Batch.segment_ids` of every micro-batch, [M B S].

    Raises:
        ValueError: There are none.
    """
    if segment_ids is None:
        raise ValueError("batch.level needs batch.segment_ids: give the document of each token")
    return jnp.sum(jnp.asarray(segment_ids) != 0, axis=(1, 2), dtype=jnp.float32)


def first_micro_batch(rows: Array, accumulation: int, placement: Placement) -> Array:
    """Return the rows of an array that belong to the first micro-batch.

    Args:
        rows: [B ...].
        accumulation: Number of micro-batches.
        placement: Layout of the rows.
    """
    return rows if accumulation == 1 else split_rows(rows, accumulation, placement)[0]


def split_rows(rows: Array, accumulation: int, placement: Placement) -> Array:
    """Return the rows of every micro-batch, [accumulation B/accumulation ...].

    Args:
        rows: [B ...].
        accumulation: Number of micro-batches.
        placement: Layout of the rows.

    Raises:
        ValueError: `accumulation` does not divide B.
    """
    number = rows.shape[0]
    if number % accumulation:
        raise ValueError(f"accumulation={accumulation} must divide the batch of {number} sequences")
    strided = rows.reshape(number // accumulation, accumulation, *rows.shape[1:])
    micro = jnp.moveaxis(strided, 1, 0)
    return placement.place(micro, (None, ax.ACT_BATCH) + (None,) * (micro.ndim - 2))


def join_rows(parts: Array, placement: Placement) -> Array:
    """Undo `split_rows`.

    Args:
        parts: [accumulation B/accumulation ...].
        placement: Layout of the rows.
    """
    strided = jnp.moveaxis(parts, 0, 1)
    rows = strided.reshape(-1, *parts.shape[2:])
    return placement.place(rows, (ax.ACT_BATCH,) + (None,) * (rows.ndim - 1))


def accumulation_of(rows: int, batch_size: int, accumulation: int) -> int:
    """Return the micro-batches of `rows` rows, none larger than those of a full batch."""
    return -(-accumulation * rows // batch_size)
