# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the held-out loss; the same batches in the same order give the same bits."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe import combinations
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.pipeline import held_out_parts, pipeline_forward


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Held-out loss."""

    nats_per_token: float
    num_tokens: int

    @property
    def bits_per_token(self) -> float:
        """Held-out loss in bits per token."""
        return self.nats_per_token / math.log(2.0)


def make_eval_step(
    model: ModelConfig,
    *,
    execution: ExecutionConfig | None = None,
    objective: Objective | None = None,
) -> Callable[[Any, Any, Batch], tuple[Array, Array]]:
    """Return a jitted function (params, router_state, batch) -> (summed nll in nats, weights).

    Args:
        model: Model to evaluate.
        execution: How it is computed; defaults when None.
        objective: Training objective; the next token when None. Under masked diffusion the sum is
            the bound on the nll of whole rows.

    Raises:
        ValueError: The model does not fit the objective.
    """
    execution = execution or ExecutionConfig()
    objective = objective or NextTokenConfig()
    objective.check(model)
    combinations.check(model=model, training=types.SimpleNamespace(objective=objective))

    def step(params: Any, router_state: Any, batch: Batch) -> tuple[Array, Array]:
        def one(index: Array) -> Array:
            prepared = objective.examine(model, batch, index, execution.placement)
            if execution.mesh.stage > 1:
                nll, _ = pipeline_forward(
                    params,
                    router_state,
                    prepared,
                    model=model,
                    execution=execution,
                    objective=objective,
                    micro_batches=held_out_parts(model, execution, batch.tokens.shape[0]),
                )
                return nll
            nll, _ = forward_and_nll(
                model,
                execution,
                params,
                prepared,
                objective=objective,
                router_state=router_state,
            )
            return nll

        number = objective.num_examined
        if number == 1:
            return one(jnp.int32(0)), objective.num_tokens(batch)
        total = jax.lax.map(one, jnp.arange(number, dtype=jnp.int32)).mean()
        return total, objective.num_tokens(batch)

    return jax.jit(step)


def evaluate(
    eval_step: Callable[[Any, Any, Batch], tuple[Array, Array]],
    params: Any,
    router_state: Any,
    batches: Iterable[Batch],
) -> Evaluation:
    """Return the mean held-out loss over some batches.

    Args:
        eval_step: Function from `make_eval_step`.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        batches: Batches on the devices.

    Raises:
        ValueError: No token has a weight above 0.
    """
    sums = [eval_step(params, router_state, batch) for batch in batches]
    nll = math.fsum(float(part) for part, _ in sums)
    weight = math.fsum(float(part) for _, part in sums)
    if weight <= 0.0:
        raise ValueError("there is nothing to evaluate: no held-out token has a loss weight")
    return Evaluation(nats_per_token=nll / weight, num_tokens=round(weight))
