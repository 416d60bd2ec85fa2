# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the router statistics of a batch without masked tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.pipeline import pipeline_forward


@functools.partial(jax.jit, static_argnums=(0, 1))
def router_statistics(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    batch: Batch,
    domain: Int32[Array, "B S"] | None = None,
) -> Any:
    """Return the statistics of all MoE layers; None for a dense model.

    Args:
        model: Trained model.
        execution: Execution of the model.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        batch: Batch without masked tokens.
        domain: Domain of each token, for detailed telemetry; None without domains.
    """
    tokens = jnp.asarray(batch.tokens)
    # Nothing is masked; some capacity schedules follow this ratio.
    context: dict[str, Array] = {"mask_ratio": jnp.zeros(tokens.shape, jnp.float32)}
    if domain is not None:
        context["domain"] = domain
    if execution.mesh.stage > 1:
        _, statistics = pipeline_forward(
            params,
            router_state,
            dataclasses.replace(batch, mask_ratio=None),
            model=model,
            execution=execution,
            objective=NextTokenConfig(),
            context=context,
        )
        return statistics
    output = forward(
        model,
        execution,
        params,
        tokens,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        router_state=router_state,
        context=context,
        has_logits=False,
    )
    return output.statistics
