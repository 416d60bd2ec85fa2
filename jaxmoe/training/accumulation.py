# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: one step over several micro-batches, added up exactly.

Micro-batch i holds rows i, i+accumulation, ... of the batch: every device then keeps its own rows,
and which rows go together does not depend on the mesh. A row keeps its number, so that what a
router draws for its tokens does not depend on the cut.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.layers.indicators import Indicators
from jaxmoe.routing import RouterStatistics
from sharding import axes as ax
from sharding.constrain import Placement


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class MicroBatch:
    """Some rows of a batch."""

    batch: Batch
    row_ids: Int[Array, " B"]
    """Number of each row in the whole batch."""


@typing.no_type_check
@struct.dataclass
class Gradients:
    """Sums over the micro-batches of one step."""

    grads: Any
    loss: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    statistics: RouterStatistics | None
    indicators: Indicators | None = None
    """With detailed telemetry."""
    row_nll: Float[Array, " B"] | None = None
    """Where the losses of workers are watched: row i of each micro-batch together, which one worker
    holds."""

    def __add__(self, other: Gradients) -> Gradients:
        # Some indicators are maxima: the record itself knows how two of them are added.
        return jax.tree.map(operator.add, self, other, is_leaf=_is_indicators)


def _is_indicators(node: Any) -> bool:
    return isinstance(node, Indicators)


GradientsOf = Callable[[MicroBatch, float, RouterStatistics | None], Gradients]
"""(rows, their share of the step, statistics of other micro-batches) -> their part of the step."""


def accumulate(
    gradients_of: GradientsOf,
    batch: Batch,
    accumulation: int,
    placement: Placement,
    *,
    statistics_of: Callable[[MicroBatch], RouterStatistics] | None = None,
) -> Gradients:
    """Sums `gradients_of` over micro-batches.

    Args:
        gradients_of: is given the statistics of the micro-batches before, None for the first; or,
            where there is a `statistics_of`, those of the whole batch.
        batch: of the step.
        accumulation: number of micro-batches.
        placement: where rows lie.
        statistics_of: makes a pass of its own over all micro-batches before the first gradient.

    Raises:
        ValueError: `accumulation` does not divide the batch.
    """
    rows = batch.tokens.shape[0]
    whole = MicroBatch(batch=batch, row_ids=jnp.arange(rows, dtype=jnp.int32))
    if accumulation == 1:
        return gradients_of(whole, 1.0, None)
    if rows % accumulation:
        raise ValueError(f"accumulation={accumulation} must divide the batch of {rows} sequences")
    parts = jax.tree.map(lambda rows: _split(rows, accumulation, placement), whole)
    first, rest = jax.tree.map(lambda a: a[0], parts), jax.tree.map(lambda a: a[1:], parts)
    share, summed = 1.0 / accumulation, None
    if statistics_of is not None:
        summed, _ = jax.lax.scan(
            lambda total, part: (total + statistics_of(part), None), statistics_of(first), rest
        )

    def body(total: Gradients, part: MicroBatch) -> tuple[Gradients, None]:
        others = total.statistics if summed is None else summed
        return total + gradients_of(part, share, others), None

    total, _ = jax.lax.scan(body, gradients_of(first, share, summed), rest)
    return total


def first_micro_batch(rows: Array, accumulation: int, placement: Placement) -> Array:
    """The rows of an array that the first micro-batch holds.

    Args:
        rows: [B ...].
        accumulation: number of micro-batches.
        placement: where rows lie.
    """
    return rows if accumulation == 1 else _split(rows, accumulation, placement)[0]


def _split(rows: Array, accumulation: int, placement: Placement) -> Array:
    strided = rows.reshape(rows.shape[0] // accumulation, accumulation, *rows.shape[1:])
    micro = jnp.moveaxis(strided, 1, 0)
    return placement.place(micro, (None, ax.ACT_BATCH) + (None,) * (micro.ndim - 2))
