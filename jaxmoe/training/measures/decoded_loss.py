# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the held-out loss of tokens that are decoded, to measure a selection of the cache.

The first half of a row is read as a prompt, and each further token through the cache, with the
given tokens instead of generated ones. Only the predictions of the second half are counted, which
attend as generated tokens do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.messages import TEXT_FILES
from jaxmoe.models.cache import check_reading, initial_cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.training.cross_entropy import token_nll
from jaxmoe.training.evaluate import Evaluation, evaluate
from sharding import axes as ax
from sharding.sequence_parallel import WHOLE_CACHE, CacheReading


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodedLoss:
    """Held-out loss of decoded tokens, with a selection of the cache and with all of it."""

    selected: Evaluation
    """Loss where each token attends to the selected pages."""
    complete: Evaluation
    """Loss of the same tokens where each attends to all earlier ones."""


def compare_readings(
    model: ModelConfig,
    params: Any,
    router_state: Any,
    batches: Iterable[Batch],
    *,
    execution: ExecutionConfig,
    reading: CacheReading,
) -> DecodedLoss:
    """Return the loss of decoded tokens with a selection and without.

    Args:
        model: Causal model.
        params: Parameters, laid out on the current mesh.
        router_state: Router state, stacked over MoE layers.
        batches: Held-out rows of one document each.
        execution: How the model is computed.
        reading: Part of the cache that is read.

    Raises:
        ValueError: The model is not causal, has caches without pages or is cut into stages, or
            rows hold several documents.
    """
    batches = list(batches)
    results = []
    for each in (reading, WHOLE_CACHE):
        step = make_decoded_loss(model, WholeRowsConfig.of(execution, each))
        results.append(evaluate(step, params, router_state, batches))
    selected, full = results
    return DecodedLoss(selected=selected, complete=full)


@functools.lru_cache(maxsize=4)
def make_decoded_loss(
    model: ModelConfig, execution: WholeRowsConfig
) -> Callable[[Any, Any, Batch], tuple[Array, Array]]:
    """Return a function (params, router_state, batch) -> (summed nll in nats, weights).

    Args:
        model: Causal model.
        execution: How it is computed; its mesh must be current in every call.

    Raises:
        ValueError: The model is not causal, has caches without pages or is cut into stages; the
            function raises it for rows with several documents.
    """
    if not model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=False: this model is computed without a cache, of which"
            " pages could be selected: leave --cache_pages out"
        )
    check_reading(model, execution)
    execution.check_one_stage("tokens are decoded by whole models")
    rows = (ax.ACT_BATCH, None)

    def place(x: Any) -> Array:
        return execution.placement.place(jnp.asarray(x), rows)

    def run(params: Any, router_state: Any, batch: Batch) -> tuple[Array, Array]:
        tokens, targets, weights = map(place, (batch.tokens, batch.targets, batch.loss_weights))
        size, length = tokens.shape
        prompt = max(length // 2, 1)

        def nll(new: Array, first: Array, cache: Any, goal: Array) -> tuple[Array, Any]:
            places = first + jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
            output = forward(
                model,
                execution,
                params,
                new,
                positions=jnp.broadcast_to(places, new.shape),
                router_state=router_state,
                cache=cache,
                logits_at=jnp.full((size,), new.shape[1] - 1, jnp.int32),
            )
            assert output.logits is not None  # asked for by default
            logits = execution.placement.place(output.logits.astype(jnp.float32), (None,) * 3)
            return place(token_nll(logits, goal))[:, 0], output.cache

        cache = initial_cache(model, execution, batch=size, length=length)
        _, cache = nll(tokens[:, :prompt], jnp.int32(0), cache, targets[:, prompt - 1 : prompt])

        def step(cache: Any, inputs: tuple[Array, Array, Array]) -> tuple[Any, Array]:
            position, token, goal = inputs
            losses, cache = nll(token[:, None], position, cache, goal[:, None])
            return cache, losses

        steps = jnp.arange(prompt, length, dtype=jnp.int32)
        _, losses = jax.lax.scan(step, cache, (steps, tokens[:, prompt:].T, targets[:, prompt:].T))
        counted = weights[:, prompt:]
        return jnp.sum(losses.T * counted), jnp.sum(counted)

    compiled = jax.jit(run)

    def check(params: Any, router_state: Any, batch: Batch) -> tuple[Array, Array]:
        if batch.segment_ids is not None:
            raise ValueError(
                "held-out rows hold several documents, and a cache holds one: evaluate"
                f" --cache_pages on text joined end to end, such as {TEXT_FILES}"
                " --data.packing concatenate"
            )
        return compiled(params, router_state, batch)

    return check
