# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Forward passes of estimators without a backward pass: losses of rewritten parameters.

Sums of the cross-entropy and of the routing statistics are taken over all rows of a step first, and
the balance losses are those of these sums: with micro-batches they are exact.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxmoe import combinations
from jaxmoe.data.batch import Batch
from jaxmoe.layers.view import View, view_outside
from jaxmoe.models.transformer import balance_losses
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.accumulation import GradientSums, MicroBatch, split_rows
from jaxmoe.training.estimators.backward import backward_of
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class Sums:
    """Sums over rows."""

    nll: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    """Losses of weights, averaged over micro-batches."""
    statistics: RouterStatistics | None


@typing.no_type_check
@struct.dataclass
class Losses:
    """Losses of one pass, or of several with a leading dimension."""

    total: Float[Array, " *n"]
    loss: Float[Array, " *n"]
    """Cross-entropy per unit of loss weight."""
    losses: dict[str, Float[Array, " *n"]]
    statistics: RouterStatistics | None


@typing.no_type_check
@struct.dataclass
class Given:
    """Arrays that a pass reads; `key` is key data, so that a region can take it."""

    params: Any
    router_state: Any
    key: Array
    parts: MicroBatch
    """Micro-batches, with a leading dimension."""
    total_weight: Float[Array, ""]


def check_forward(step: Step) -> None:
    """Refuse what forward passes of a view cannot compute.

    Args:
        step: With the mesh resolved.

    Raises:
        ValueError: Pipeline stages, a layout that gathers parameters or cuts them over replicas,
            parameters in host memory, detailed telemetry, or an adapter of several draws.
    """
    combinations.check(model=step.model, execution=step.execution, training=step)
    backward_of(step).check(step)


def table_of(step: Step) -> ParameterTable:
    """Return the table of the parameters; without one, that of the model, which trains all."""
    return parameter_table(step.model) if step.table is None else step.table


def prepare(
    step: Step, state: TrainState, batch: Batch, first_row: Any
) -> tuple[Float[Array, ""], Given]:
    """Return the sum of the loss weights, and what passes read.

    Args:
        step: What is evaluated.
        state: State before the step.
        batch: Rows of the step.
        first_row: Number of the first row.

    Raises:
        ValueError: The batch is packed by level, or the micro-batches do not divide it.
    """
    if batch.level is not None:
        raise ValueError("batch.level is for backward passes: give a batch without levels")
    placement = step.execution.placement
    number = step.accumulation
    weight = step.objective.num_tokens(batch)
    key = jax.random.fold_in(state.rng, state.step)
    batch = step.objective.prepare(step.model, batch, key, placement)
    row_ids = first_row + jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    micro = MicroBatch(batch=jax.tree.map(jnp.asarray, batch), row_ids=row_ids)
    inputs = Given(
        params=state.params,
        router_state=state.router_state,
        key=jax.random.key_data(key),
        parts=jax.tree.map(lambda rows: split_rows(rows, number, placement), micro),
        total_weight=jnp.where(weight > 0.0, weight, 1.0),
    )
    return weight, inputs


def summed_pass(step: Step, inputs: Given, view: View) -> Sums:
    """Return the sums of one pass over all micro-batches.

    Args:
        step: What is evaluated.
        inputs: Parameters and rows.
        view: View of the parameters.
    """
    layers = [scan.name for scan in step.model.scans]
    params, of_layers = view_outside(inputs.params, view, layers)
    number = inputs.parts.row_ids.shape[0]

    def one(part: MicroBatch) -> Sums:
        nll, _, output = forward_and_row_nll(
            step.model,
            step.execution,
            params,
            part.batch,
            has_rows=False,
            objective=step.objective,
            router_state=inputs.router_state,
            row_ids=part.row_ids,
            train=True,
            key=jax.random.wrap_key_data(inputs.key),
            view=of_layers,
        )
        wide = balance_losses(step.model, output.statistics)
        losses = {name: x / number for name, x in output.losses.items() if name not in wide}
        return Sums(nll=nll, losses=losses, statistics=output.statistics)

    first = one(jax.tree.map(lambda x: x[0], inputs.parts))
    if number == 1:
        return first
    later = jax.tree.map(lambda x: x[1:], inputs.parts)
    return jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), first, later
    )[0]


def losses_of(step: Step, inputs: Given, sums: Sums, share: float = 1.0) -> Losses:
    """Return the losses of sums.

    Args:
        step: What is evaluated.
        inputs: Weight of the step.
        sums: Sums over rows.
        share: Share of these rows in the losses that are no sums over tokens.
    """
    losses = sums.losses | balance_losses(step.model, sums.statistics)
    losses = {name: share * value for name, value in losses.items()}
    loss = sums.nll / inputs.total_weight
    total = loss + sum(losses.values())
    return Losses(total=total, loss=loss, losses=losses, statistics=sums.statistics)


def gradients_with(grads: Any, losses: Losses) -> GradientSums:
    """Return gradients with the means over passes of losses and statistics.

    Args:
        grads: Gradients.
        losses: Losses of all passes, with leading dimensions.
    """

    def mean(tree: Any, lead: int) -> Any:
        return jax.tree.map(
            lambda x: jnp.mean(x.astype(jnp.float32), axis=tuple(range(lead))).astype(x.dtype), tree
        )

    passes = dataclasses.replace(losses, total=None)
    passes = mean(passes, losses.total.ndim)
    return GradientSums(
        grads=grads, loss=passes.loss, losses=passes.losses, statistics=passes.statistics
    )
