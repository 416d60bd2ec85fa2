# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the summed loss of a batch from the cross-entropy of its tokens, in nats.

    nll = logsumexp(z) - z[target]

Sums are returned, not means, so that micro-batches and devices add up exactly. The loss of a token
is `token_loss` of the objective. With `ExecutionConfig.loss_chunk` the logits of only that many
positions exist at a time, once: their gradient is taken while they exist
(`jaxmoe.training.cross_entropy`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.adapters.view import viewed_outside
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.observer import observer_of
from jaxmoe.layers.sequences import current_order, inverse_of, lay_out, token_numbers
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import HeadWeight, head_weight, only_predicted, output_logits
from jaxmoe.models.transformer import Output, forward
from jaxmoe.routing.balancers.base import of_weights
from jaxmoe.routing.replay import EXPERTS, check_replayed
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.accumulation import join_rows, split_rows
from jaxmoe.training.cross_entropy import TokenPrediction, chunk_length, chunked_loss, token_nll
from jaxmoe.training.objective import LossCall, TokenGiven
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel import TokenOrder

_EXPERTS = ("expert_in", "expert_out")
"""Roles of the experts' matrices."""


def summed_loss(
    hidden: Float[Array, "B S D"],
    weight: HeadWeight,
    batch: Batch,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: Objective | None = None,
    has_rows: bool = False,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None]:
    """Return the sum of the losses of all tokens, and the sums of the rows.

    Args:
        hidden: Activations after the final norm.
        weight: Result of `head_weight`.
        batch: Targets, loss weights and extra arrays, in the order of `hidden`.
        model: Logit multiplier and vocabulary.
        execution: `loss_chunk`, dtype and placement.
        objective: Loss of a token and range of its predictions; the next token when None.
        has_rows: Whether to sum each row; the total stays bitwise the same.

    Returns:
        The total, and the sums of the rows or None.
    """
    objective = objective or NextTokenConfig()
    prediction = TokenPrediction(model=model, execution=execution, objective=objective)
    weights = jnp.asarray(batch.loss_weights)
    extra = jax.tree.map(jnp.asarray, batch.extra)
    targets = jnp.asarray(batch.targets)
    inputs = TokenGiven(weights=weights, extra=extra)
    chunk = chunk_length(execution, hidden.shape[1])
    if chunk < hidden.shape[1]:
        return chunked_loss(
            hidden, weight, targets, inputs, prediction, chunk=chunk, has_rows=has_rows
        )
    placement = execution.placement
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    nll = _all_nll(hidden, weight, targets, prediction)
    losses = objective.token_loss(nll, jax.tree.map(partial(_place, placement, rows), inputs))
    return jnp.sum(losses), jnp.sum(losses, axis=1) if has_rows else None


def _all_nll(
    hidden: Float[Array, "B S D"],
    weight: HeadWeight,
    targets: Int[Array, "B S"],
    prediction: TokenPrediction,
) -> Float[Array, "B S"]:
    """Return the negative log-likelihood of all targets, from all logits at once."""
    placement = prediction.execution.placement
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    vocab_axes = placement.mesh_axes(ax.ACT_VOCAB)
    region = placement.region(
        lambda logits, targets, batch_axes: token_nll(logits, targets, axes=vocab_axes),
        in_axes=((*rows, ax.ACT_VOCAB), rows),
        out_axes=rows,
    )
    model = prediction.model
    logits = output_logits(hidden, weight, model, prediction.execution)
    num_predicted = prediction.objective.num_predicted(model)
    return region(only_predicted(logits, num_predicted), targets)


def token_log_probs(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    objective: Objective,
    router_state: Any = None,
    micro_rows: int | None = None,
) -> Float[Array, "B S"]:
    """Return the log-probability of each target, as a training pass without noise computes it.

    Args:
        model: Model to compute.
        execution: How it is computed.
        params: Parameters of the model.
        batch: Rows.
        objective: Range of the predictions.
        router_state: State of the routers.
        micro_rows: Rows of a micro-batch, one after the other; all at once when None.

    Raises:
        ValueError: `micro_rows` does not divide the rows.
    """
    rows = batch.tokens.shape[0]
    if micro_rows is not None and micro_rows != rows:
        if rows % micro_rows:
            raise ValueError(f"micro_rows={micro_rows} must divide the batch of {rows} sequences")
        divide = partial(split_rows, accumulation=rows // micro_rows, placement=execution.placement)
        log_probs_of = partial(
            token_log_probs,
            model,
            execution,
            params,
            objective=objective,
            router_state=router_state,
        )
        parts = jax.lax.map(log_probs_of, jax.tree.map(divide, batch))
        return join_rows(parts, execution.placement)
    batch, order = lay_out_batch(batch, model, execution)
    if model.adapter is not None:
        params = viewed_outside(model.adapter, params, [scan.name for scan in model.scans])
    output = forward(
        model,
        execution,
        params,
        jnp.asarray(batch.tokens),
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        context=batch_context(model, batch),
        has_logits=False,
        router_state=router_state,
        order=order,
    )
    prediction = TokenPrediction(model=model, execution=execution, objective=objective)
    targets = jnp.asarray(batch.targets)
    log_probs = -_all_nll(output.hidden, head_weight(params, model), targets, prediction)
    return lay_out(log_probs, None if order is None else inverse_of(order), execution)


def forward_and_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    objective: Objective | None = None,
    **options: Any,
) -> tuple[Float[Array, ""], Output]:
    """Return the summed loss of a batch and the output of the model.

    Args:
        model: Model to compute.
        execution: How it is computed.
        params: Parameters of the model.
        batch: Rows; tokens with loss weight 0 are left out.
        objective: See `summed_loss`.
        **options: Further arguments of `jaxmoe.models.transformer.forward`.

    Returns:
        The sum in nats, and the output in the order of `lay_out_batch`.
    """
    nll, _, output = forward_and_row_nll(
        model, execution, params, batch, objective=objective, has_rows=False, **options
    )
    return nll, output


def forward_and_row_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    objective: Objective | None = None,
    has_rows: bool = True,
    row_ids: Int[Array, " B"] | None = None,
    **options: Any,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None, Output]:
    """Return the result of `forward_and_nll`, with the sums of the rows in the middle.

    Args:
        model: Model to compute.
        execution: How it is computed.
        params: Parameters of the model.
        batch: Rows; tokens with loss weight 0 are left out.
        objective: See `summed_loss`.
        has_rows: Whether to sum each row; None stands in their place otherwise.
        row_ids: Number of each row in the batch of the step, for routers' noise; arange when None.
        **options: Further arguments of `jaxmoe.models.transformer.forward`.
    """
    batch, order = lay_out_batch(batch, model, execution)
    context = batch_context(model, batch)
    if row_ids is not None:
        context["index"] = token_numbers(row_ids, order, batch.tokens.shape[1])
    if model.adapter is not None:
        params = viewed_outside(model.adapter, params, [scan.name for scan in model.scans])
    output = forward(
        model,
        execution,
        _with_rounded_experts(model, execution, params),
        jnp.asarray(batch.tokens),
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        context=context,
        has_logits=False,
        order=order,
        **options,
    )
    summed = partial(
        summed_loss,
        weight=head_weight(params, model),
        model=model,
        execution=execution,
        objective=objective,
    )
    nll, rows = summed(output.hidden, batch=batch, has_rows=has_rows)
    if objective is not None and options.get("train"):
        call = LossCall(
            model=model,
            execution=execution,
            params=params,
            batch=batch,
            output=output,
            loss_of=lambda hidden, batch: summed(hidden, batch=batch)[0],
            order=order,
            context=context,
            options=options,
        )
        term, output = objective.further_loss(call)
        if term is not None:
            nll = nll + term
            output = dataclasses.replace(output, further={objective.name: term})
    return nll, rows, output


def _with_rounded_experts(model: ModelConfig, execution: ExecutionConfig, params: Any) -> Any:
    """Return the parameters with the experts' matrices in the compute dtype.

    Each layer rounds its matrices where it uses them. Before the loop over the layers they are
    rounded once, not again where layers are recomputed and differentiated, and their gradients
    leave the loop in the compute dtype. Values and gradients are the same, bit by bit, where each
    matrix is used once and only rounded; elsewhere the parameters are returned as they are.
    """
    dtype = execution.precision.compute_dtype
    reads_exact = model.moe is not None and of_weights(model.moe.balancers)
    if (
        reads_exact
        or model.loop is not None
        or execution.mesh.stage > 1
        or execution.parameter_memory == "host"
        or observer_of(execution).reads_weights
    ):
        return params
    experts = {spec.path for spec in parameter_table(model) if spec.declaration.role in _EXPERTS}

    def round_to(path: Any, leaf: Any) -> Any:
        is_wider = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > dtype.itemsize
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _round_to(leaf, dtype) if is_wider and name in experts else leaf

    return jax.tree.map_with_path(round_to, params)


def _round_to(x: Array, dtype: Any) -> Array:
    """Return an array in a narrower dtype; its gradient exists as an array before it is widened.

    XLA would make it anew, layer by layer, in each of the passes that read it: for the parameters,
    and for each of the moments.
    """
    wide = x.dtype

    @jax.custom_vjp
    def narrow(x: Array) -> Array:
        return x.astype(dtype)

    def backward(_: None, gradient: Array) -> tuple[Array]:
        return (jax.lax.optimization_barrier(gradient).astype(wide),)

    narrow.defvjp(lambda x: (narrow(x), None), backward)
    return narrow(x)


def batch_context(model: ModelConfig, batch: Batch) -> dict[str, Array]:
    """Return the arrays [B S ...] of a batch that routers and an adapter's mixtures read, by name.

    Args:
        model: Model that reads the batch.
        batch: Rows.

    Raises:
        ValueError: The batch has recorded experts that the model cannot replay.
    """
    view = model.context.view
    names = (EXPERTS,) if view is None else (EXPERTS, *view.reads)
    context = {name: batch.extra[name] for name in names if name in batch.extra}
    if EXPERTS in context:
        check_replayed(model, context[EXPERTS])
    if batch.mask_ratio is not None:
        context["mask_ratio"] = batch.mask_ratio
    return {name: jnp.asarray(array) for name, array in context.items()}


def lay_out_batch(
    batch: Batch,
    model: ModelConfig,
    execution: ExecutionConfig,
) -> tuple[Batch, TokenOrder | None]:
    """Return the batch in the order in which sequence-parallel devices hold its tokens.

    Args:
        batch: Rows in the order of their tokens.
        model: Model that reads the batch.
        execution: How it is computed.

    Returns:
        The batch, and for each token its position in the original row; None if nothing moved.

    Raises:
        ValueError: The rows have a level, and no documents.
    """
    segments = None if batch.segment_ids is None else jnp.asarray(batch.segment_ids)
    if batch.level is not None and segments is None:
        raise ValueError("batch.level needs batch.segment_ids: give the document of each token")
    arrays = {} if batch.level is None else {"level": jnp.max(jnp.asarray(batch.level))}
    order = current_order(model.context, execution, batch.tokens.shape[1], segments, arrays)
    return lay_out(dataclasses.replace(batch, level=None), order, execution), order


def _place(placement: Placement, axes: tuple[str | None, ...], array: Array) -> Array:
    return placement.place(array, axes + (None,) * (array.ndim - len(axes)))
