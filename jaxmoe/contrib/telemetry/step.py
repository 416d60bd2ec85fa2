# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes indicators of instability of a training step.

    head_z                 mean over predicted tokens of logsumexp(output logits)^2
    head_max_logit         largest output logit
    update_ratio/<role>    |W' - W| / |W| (Frobenius) of all parameters of one role in one layer;
                           the embedding, the head and the last norm under their own names
    direction_coupling     mean over experts of the cosine of router row and mean gate neuron, of
                           the parameters before the step (jaxmoe/contrib/telemetry/geometry.py);
                           in steps 1, 11, 21, ..., NaN in the others

Under MuonH the ratio of a matrix is its learning rate. They exist with
`ExecutionConfig(telemetry="detailed")` only; those of the head cost one more product with the head.
Observations of layers are defined in `jaxmoe/contrib/telemetry/indicators.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.telemetry.congestion import EVERY
from jaxmoe.contrib.telemetry.geometry import direction_coupling, gate_directions, row_similarity
from jaxmoe.contrib.telemetry.indicators import summarise_indicators, token_means
from jaxmoe.contrib.telemetry.routing import mean_log_prob, summarise_detailed
from jaxmoe.data.batch import Batch
from jaxmoe.declarations import Role
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.observer import Observations
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.parameters import ParameterSpec, ParameterTable
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.cross_entropy import chunk_length, in_chunks
from jaxmoe.training.loss import lay_out_batch
from jaxmoe.training.parts.base import Outcome, StepPart
from jaxmoe.training.step import Step
from sharding import axes as ax
from sharding.constrain import Placement


def observe_head(
    params: Any,
    hidden: Float[Array, "B S D"],
    batch: Batch,
    model: ModelConfig,
    execution: ExecutionConfig,
) -> Observations:
    """Return indicators of the output logits, with a leading dimension of 1 in place of L.

    Args:
        params: Parameters of the model.
        hidden: Activations after the final norm, in the order of `lay_out_batch`.
        batch: Rows; tokens with weight 0 are left out.
        model: Logit multiplier.
        execution: `loss_chunk`, dtype and placement.
    """
    weight, hidden = jax.lax.stop_gradient((head_weight(params, model), hidden))

    def observe(hidden: Array, loss_weights: Array) -> Observations:
        logits = output_logits(hidden, weight, model, execution, is_stream=is_whole)
        z = jax.nn.logsumexp(logits, axis=-1) ** 2
        return token_means(
            {"head_z": z}, loss_weights > 0.0, peaks={"head_max_logit": jnp.max(logits, axis=-1)}
        )

    loss_weights = jnp.asarray(lay_out_batch(batch, model, execution)[0].loss_weights)
    chunk = chunk_length(execution, hidden.shape[1])
    is_whole = chunk == hidden.shape[1]
    if is_whole:
        return jax.tree.map(lambda leaf: leaf[None], observe(hidden, loss_weights))
    rows = (ax.ACT_BATCH, None)
    gathered = (
        execution.placement.place(hidden, (*rows, None)),
        execution.placement.place(loss_weights, rows),
    )
    parts = jax.lax.map(lambda part: observe(*part), in_chunks(gathered, chunk))
    return Observations(
        sums=jax.tree.map(lambda leaf: leaf.sum(keepdims=True), parts.sums),
        counts=jax.tree.map(lambda leaf: leaf.sum(keepdims=True), parts.counts),
        peaks=jax.tree.map(lambda leaf: leaf.max(keepdims=True), parts.peaks),
    )


def update_ratios(
    table: ParameterTable, model: ModelConfig, updates: Any, params: Any
) -> dict[str, Float[Array, " L"]]:
    """How far a step moves the parameters of each role, relative to their size.

    Args:
        table: of the model's parameters.
        model: whose layers they are.
        updates: what is added to the parameters.
        params: before that.

    Returns:
        By `update_ratio/<role>`, NaN for a layer without parameters of that role, or all zero.
    """
    moved: dict[str, Any] = traverse_util.flatten_dict(updates, sep="/")
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    layers_of = {stack.path: np.array(stack.layers) for stack in model.stacks}
    squares: dict[str, Array] = {}
    for row in table:
        squared_norms = jnp.stack(
            [_squares(row, tree[row.path]) for tree in (moved, flat)]
        )  # 2, layers
        if not row.declaration.is_stacked:
            top = row.path.partition("/")[0]
            squares[top] = squares.get(top, jnp.zeros((2, 1), jnp.float32)) + squared_norms
            continue
        name = row.declaration.role
        layers = next(n for path, n in layers_of.items() if row.path.startswith(f"{path}/"))
        past = squares.get(name, jnp.zeros((2, model.num_layers), jnp.float32))
        squares[name] = past.at[:, layers].add(squared_norms)
    ratios = {}
    for name, (step, size) in squares.items():
        ratio = jnp.sqrt(step / jnp.where(size > 0.0, size, 1.0))
        ratios[f"update_ratio/{name}"] = jnp.where(size > 0.0, ratio, jnp.nan)
    return ratios


def _squares(row: ParameterSpec, value: Array) -> Float[Array, " layers"]:
    """Return the sum of squares of each layer, replicated on every device."""
    value = value.astype(jnp.float32)
    if row.declaration.is_stacked:
        return jnp.sum(value**2, axis=tuple(range(1, value.ndim)))
    return jnp.sum(value**2)[None]


def watch_layers(
    model: ModelConfig,
    indicators: Observations,
    updates: Any,
    params: Any,
    is_good: Bool[Array, ""],
    placement: Placement,
    *,
    step: Int[Array, ""],
) -> dict[str, Float[Array, " L"]]:
    """Return the indicators of a step by name.

    Args:
        model: Model that has the parameters.
        indicators: Observations of the layers, summed over the batch.
        updates: Updates of the parameters.
        params: Parameters before the step.
        is_good: Whether the step is applied; a refused one has update ratios of 0.
        placement: Operations that place arrays.
        step: Optimiser steps done before this one.
    """
    table = parameter_table(model)
    ratios = update_ratios(table, model, updates, params)
    summary = summarise_indicators(
        indicators, residual_multiplier=model.forward_multipliers.residual
    )
    summary |= {name: jnp.where(is_good, ratio, 0.0) for name, ratio in ratios.items()}
    return summary | coupled_directions(table, model, params, placement, step=step)


def coupled_directions(
    table: ParameterTable,
    model: ModelConfig,
    params: Any,
    placement: Placement,
    *,
    step: Int[Array, ""],
) -> dict[str, Float[Array, " L"]]:
    """Return the mean cosine of router rows and their experts' gate neurons, `geometry.py`.

    Args:
        table: Table of the parameters, which names routers and experts by role.
        model: Model that has the parameters.
        params: Parameters of the model.
        placement: Operations that place arrays.
        step: Optimiser steps done; the cosines are computed in the first step after each multiple
            of `EVERY`, and are NaN in the others.

    Returns:
        By `direction_coupling`, NaN for a layer without router matrix or experts; empty if all are.
    """
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    pairs = []
    for stack in model.stacks:
        rows = [row for row in table if row.path.startswith(f"{stack.path}/")]
        # Of the matrices of a router, the one that has a row of the stream for each expert.
        router = [row for row in rows if _has_role(row, "router", ax.EMBED, ax.ROUTER_OUT)]
        experts = [row for row in rows if row.declaration.role == "expert_in"]
        if router and experts:
            weights = (flat[router[0].path], flat[experts[0].path])
            pairs.append((np.array(stack.layers), *weights))
    if not pairs:
        return {}
    unknown = jnp.full((model.num_layers,), jnp.nan, jnp.float32)

    def compute() -> Array:
        coupled = unknown
        axes = (None, None, None)
        for layers, weight, gate_up in pairs:
            directions = placement.place(gate_directions(gate_up), axes)
            rows = placement.place(weight.astype(jnp.float32), axes)[..., : gate_up.shape[1]]
            coupled = coupled.at[layers].set(direction_coupling(rows, directions).mean(-1))
        return coupled

    return {"direction_coupling": jax.lax.cond(step % EVERY == 0, compute, lambda: unknown)}


def _has_role(row: ParameterSpec, role: Role, *axes: str) -> bool:
    """Return whether a stacked parameter has a role and, after the layers, these logical axes."""
    return row.declaration.role == role and row.declaration.axes[1:] == axes


def watch_params(params: Any) -> dict[str, Float[Array, ""]]:
    """Return the mean cosine of two router rows, over all layers whose router has one matrix.

    Args:
        params: Parameters of the model; the matrices are the leaves `router/weight`.

    Returns:
        `row_similarity`; empty if there is no such matrix.
    """
    rows = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(params)
        if tuple(getattr(key, "key", None) for key in path[-2:]) == ("router", "weight")
    ]
    if not rows:
        return {}
    similarities = [row_similarity(weight.astype(jnp.float32)).reshape(-1) for weight in rows]
    return {"row_similarity": jnp.concatenate(similarities).mean()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetailedMeasures(StepPart):
    """Indicators of layers, scalars of detailed routing statistics, and quality of the experts."""

    name: ClassVar[str] = "detailed_measures"

    def measure(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        """Return `indicators` and `quality` among the measures, and further scalars of routers."""
        summed = outcome.gradients.summed
        params = outcome.before.params
        measures = {}
        router = {}
        if summed.observations is not None:
            measures["indicators"] = watch_layers(
                step.model,
                summed.observations,
                outcome.updates,
                params,
                outcome.is_accepted,
                step.execution.placement,
                step=outcome.after.step - 1,
            )
        if summed.statistics is not None:
            measures["quality"] = mean_log_prob(summed.statistics)
            router = summarise_detailed(summed.statistics) | watch_params(outcome.after.params)
        return {"measures": measures, "router": router}
