# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of one step: the loss of the micro-batches, differentiated and summed.

`MicroBatchBackward` takes them one after the other; the other members of `Backward` are in
`jaxmoe/catalog/executions.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.gather import gather_once, use_outside_layers
from jaxmoe.layers.observer import observer_of, unite
from jaxmoe.layers.view import View
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.accumulation import GradientSums, MicroBatch, Rows, Share, accumulate
from jaxmoe.training.balance import buffered_losses, linearized_losses, takes_two_passes
from jaxmoe.training.estimators.backward import Backward, backward_of
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


def batch_gradients(
    step: Step,
    state: TrainState,
    batch: Batch,
    first_row: Any = 0,
) -> tuple[Float[Array, ""], GradientSums]:
    """Return the gradients of the loss of one step, over its micro-batches.

    Args:
        step: Model, objective, execution and micro-batches.
        state: Parameters, router state, randomness.
        batch: Rows of the step.
        first_row: Number of the first row, where the batch is part of a larger one.

    Returns:
        The sum of the loss weights, and the sums over the micro-batches.
    """
    model = step.model
    execution = step.execution
    objective = step.objective
    weight = objective.num_tokens(batch)
    key = jax.random.fold_in(state.rng, state.step)
    batch = objective.prepare(model, batch, key, execution.placement)
    total_weight = jnp.where(weight > 0.0, weight, 1.0)
    rows = Rows(batch, total_weight, step.accumulation, first_row)
    gathered = _gather_whole(model, state.params, execution)
    return weight, backward_of(step).sums(step, state, rows, gathered)


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatchBackward(Backward):
    """One micro-batch after the other."""

    name: ClassVar[str] = "micro_batches"

    def sums(self, step: Step, state: TrainState, rows: Rows, gathered: Any) -> GradientSums:
        """Return the sums over the micro-batches of one step; see the base class."""
        is_whole = takes_two_passes(step.model, step.accumulated_balance)
        return accumulate(
            partial(
                compute_gradients,
                step,
                state,
                rows.total_weight,
                is_whole=is_whole,
                gathered=gathered,
                backward=self,
            ),
            rows.batch,
            rows.accumulation,
            step.execution.placement,
            first_row=rows.first_row,
            statistics_of=partial(batch_statistics, step, state, gathered=gathered)
            if is_whole
            else None,
        )

    def differentiate(
        self,
        step: Step,
        loss_of: Callable[..., tuple[Array, Any]],
        trained: Any,
        batch: Batch,
    ) -> tuple[Any, dict[str, Any], Any]:
        """Return gradients of a micro-batch, further arguments of the update, and what is aside.

        Args:
            step: What is trained, and how.
            loss_of: (trained parameters, view=None) -> (loss, what is aside).
            trained: Parameters that are trained.
            batch: Rows of the micro-batch.
        """
        del step, batch
        grads, aside = jax.grad(loss_of, has_aux=True)(trained)
        return grads, {}, aside


def compute_gradients(
    step: Step,
    state: TrainState,
    total_weight: Float[Array, ""],
    micro: MicroBatch,
    share: Share,
    other_statistics: RouterStatistics | None,
    *,
    is_whole: bool,
    gathered: Any = None,
    backward: MicroBatchBackward = MicroBatchBackward(),
) -> GradientSums:
    """Return the gradients of one micro-batch's part of the loss.

    Args:
        step: What is trained, and how.
        state: Parameters, router state, randomness.
        total_weight: Sum of the loss weights of the whole batch.
        micro: Rows.
        share: Share of this micro-batch in the step.
        other_statistics: Those of the micro-batches before this one, or of the whole batch; or
            None.
        is_whole: Whether they are those of the whole batch.
        gathered: Gathered parameters, with a layout that gathers them once a step.
        backward: How the loss is differentiated.
    """
    model = step.model
    table = step.table

    def loss_of(
        trained: Any, view: View | None = None
    ) -> tuple[Array, tuple[Array, dict[str, Array], Any, Any, Any]]:
        params = trained if table is None else table.merge(trained, state.params)
        nll, rows, output = _forward(
            step, params, state, micro, gathered, has_rows=step.reads_row_losses, view=view
        )
        loss = nll / total_weight
        terms = {name: term / total_weight for name, term in output.further.items()}
        losses = output.losses
        if output.statistics is not None and other_statistics is not None and is_whole:
            wide = linearized_losses(model, output.statistics, other_statistics, share)
            losses = {name: share * value for name, value in losses.items()} | wide
        else:
            if output.statistics is not None:
                # In place of the model's losses, which know the tokens of this micro-batch alone:
                # those of the whole batch also count the tokens of the micro-batches before.
                losses = losses | buffered_losses(model, output.statistics, other_statistics)
            losses = {name: share * value for name, value in losses.items()}
        head = observer_of(step.execution).head(params, output.hidden, micro.batch, step)
        observations = unite(output.observations, head)
        whole = loss + sum(losses.values())
        likelihood = loss - sum(terms.values()) if terms else loss
        return whole, (likelihood, losses | terms, output.statistics, observations, rows)

    trained = state.params if table is None else table.select_trained(state.params)
    grads, extra_args, (loss, losses, *aside) = backward.differentiate(
        step, loss_of, trained, micro.batch
    )
    statistics, observations, rows = jax.lax.stop_gradient(aside)
    return GradientSums(
        grads=grads,
        loss=loss,
        losses=losses,
        statistics=statistics,
        observations=observations,
        row_nll=rows,
        extra_args=extra_args,
    )


def batch_statistics(
    step: Step, state: TrainState, micro: MicroBatch, *, gathered: Any = None
) -> RouterStatistics:
    """Return the statistics of some rows as training sees them, without a gradient."""
    _, _, output = _forward(step, state.params, state, micro, gathered)
    assert output.statistics is not None  # only models with balancers take two passes
    return jax.lax.stop_gradient(output.statistics)


def row_losses(
    step: Step, state: TrainState, micro: MicroBatch, *, gathered: Any
) -> Float[Array, " B"]:
    """Return the summed cross-entropy of each row as training sees it, without a gradient.

    Args:
        step: Model and objective.
        state: Parameters, router state, randomness.
        micro: Rows.
        gathered: Gathered parameters, with a layout that gathers them once a step.
    """
    _, rows, _ = _forward(step, state.params, state, micro, gathered, has_rows=True)
    assert rows is not None  # asked for
    return rows


def _forward(
    step: Step,
    params: Any,
    state: TrainState,
    micro: MicroBatch,
    gathered: Any,
    *,
    has_rows: bool = False,
    view: View | None = None,
) -> tuple[Array, Array | None, Output]:
    if gathered is not None:
        params, gathered = use_outside_layers(
            params, gathered, [scan.name for scan in step.model.scans]
        )
    paths = step.gradients.paths(step.accumulation)
    rows = None
    if paths is not None and micro.number is not None:
        rows = paths.rows(step.model, micro.number)
    return forward_and_row_nll(
        step.model,
        step.execution,
        params,
        micro.batch,
        has_rows=has_rows,
        objective=step.objective,
        router_state=state.router_state,
        row_ids=micro.row_ids,
        rows=rows,
        train=True,
        key=jax.random.fold_in(state.rng, state.step),
        gathered=gathered,
        view=view,
    )


def _gather_whole(model: ModelConfig, params: Any, execution: ExecutionConfig) -> Any:
    """Return all parameters gathered, if the layout gathers once a step; None otherwise."""
    if execution.state_layout.gathered != "step":
        return None
    declarations = parameter_table(model).tree(lambda row: row.declaration)
    return gather_once(params, declarations, execution)
