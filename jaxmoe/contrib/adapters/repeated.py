# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Passes over the rows of a step that an adapter compares with each other (REINFORCE).

An adapter with this backward draws its additions at random, and trains the distribution q of the
draws J by the losses of M = `draws` draws, each compared with the mean of all (leave-one-out):

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
from typing import TYPE_CHECKING, Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.training.accumulation import GradientSums, MicroBatch, Rows, split_rows
from jaxmoe.training.estimators.backward import Backward
from jaxmoe.training.gradients import row_losses
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.constrain import Placement

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

ADVANTAGE: Final = "pass_advantage"
"""Name of the array of `Batch.extra` by which the draws are trained."""


def repeat_rows(rows: Any, passes: int, placement: Placement) -> Any:
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
        return placement.region(repeat, in_axes=(axes,), out_axes=axes)(array)

    return jax.tree.map(one, rows)


def repeat_with_advantage(
    rows: Rows,
    row_losses: Callable[[MicroBatch], Float[Array, " b"]],
    passes: int,
    placement: Placement,
) -> Rows:
    """Return each row several times, with `ADVANTAGE` in `extra`.

    A micro-batch's share of the losses of a step is 1 / accumulation; the advantages are multiplied
    with their number, so that the sum over all of them remains.

    Args:
        rows: Rows of a step.
        row_losses: Summed losses of the rows of a micro-batch, nats.
        passes: Number of times M, at least 2.
        placement: Layout of the rows.

    Raises:
        ValueError: The batch is packed by level: shares of micro-batches then differ.
    """
    if rows.batch.level is not None:
        raise ValueError(
            "data.packing levels makes micro-batches of unequal shares, and the adapter compares"
            " several passes over each: set data.packing to best_fit"
        )
    batch = repeat_rows(rows.batch, passes, placement)
    first_row = passes * rows.first_row
    total_weight = passes * rows.total_weight
    accumulation = passes * rows.accumulation
    number = batch.tokens.shape[0]
    micro = MicroBatch(batch=batch, row_ids=first_row + jnp.arange(number, dtype=jnp.int32))
    split = partial(split_rows, accumulation=accumulation, placement=placement)
    losses = jax.lax.map(row_losses, jax.tree.map(split, micro))
    losses = placement.place(jax.lax.stop_gradient(losses), (None, None))
    weights = advantages(losses.T.reshape(-1, passes)) * (passes * accumulation / total_weight)
    wide = jnp.broadcast_to(weights.reshape(number, 1), batch.tokens.shape)
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


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedBackward(Backward):
    """Several passes over each row, which an adapter compares."""

    name: ClassVar[str] = "repeated"
    backward: Backward
    """How the rows of all passes are differentiated."""

    def check(self, step: Step) -> None:
        """Refuse what the backward pass inside does."""
        self.backward.check(step)

    def sums(self, step: Step, state: TrainState, rows: Rows, gathered: Any) -> GradientSums:
        """Return the sums over the micro-batches of all passes; see the base class."""
        losses_of = partial(row_losses, step, state, gathered=gathered)
        adapter: Any = step.model.adapter
        repeats = repeat_with_advantage(rows, losses_of, adapter.draws, step.execution.placement)
        sums = self.backward.sums(step, state, repeats, gathered)
        if sums.row_nll is None:
            return sums
        return dataclasses.replace(sums, row_nll=sums.row_nll / adapter.draws)
