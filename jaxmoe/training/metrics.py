# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The record of metrics that a training step returns."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class StepMetrics:
    """Metrics of a step; the arrays stay on the device."""

    loss: Float[Array, ""]
    """Cross-entropy, nats per token."""
    losses: dict[str, Float[Array, ""]]
    """Losses of balancers and adapter, weighted, summed over layers."""
    grad_norm: Float[Array, ""]
    """Global norm before clipping."""
    num_tokens: Float[Array, ""]
    """Sum of the loss weights."""
    is_skipped: Bool[Array, ""]
    """Whether the guard refused this step."""
    skipped_in_a_row: Array
    """Steps refused in a row, including this one."""
    router: dict[str, Float[Array, ""]] = struct.field(default_factory=dict)
    """Scalars of `RouterMeasures` for the whole batch; empty for a dense model."""
    load: Float[Array, "L E"] | None = None
    """Share of the assignments of each expert, per MoE layer."""
    measures: dict[str, Any] = struct.field(default_factory=dict)
    """Further measures of parts of the step, by name."""
    norm_limit: Float[Array, ""] | None = None
    """Largest gradient norm that the guard accepts; infinite without a bound."""
    judged_norm: Float[Array, ""] | None = None
    """Norm that the guard compared with it: without embeddings, if there is a bound."""
    worker_loss: Float[Array, " W"] | None = None
    """Cross-entropy of the rows of each worker, nats per token, if workers are watched; NaN without
    tokens. See `jaxmoe/training/parts/worker_losses.py`."""
    levels: dict[str, Float[Array, ""]] = struct.field(default_factory=dict)
    """Micro-batches and shares of tokens by level, of batches packed by level; see
    `jaxmoe/contrib/levels/measures.py`."""
    exchange: dict[str, Float[Array, " R"]] = struct.field(default_factory=dict)
    """Measures of the last exchange between workers; empty without. See
    `jaxmoe/contrib/slow_links/workers/step.py`."""
    disk: dict[str, Any] = struct.field(default_factory=dict)
    """Bytes of optimiser state that were read and written, and seconds of its update, where it lies
    in files; see `jaxmoe/contrib/offload/files_step.py`."""


def fetch_metrics(metrics: Sequence[StepMetrics]) -> tuple[StepMetrics, ...]:
    """Return the metrics of steps on the host, those of workers put together.

    Of workers, the loss is the mean over their tokens, tokens are added up, a step counts as
    refused if all refused it, and everything else is a mean. A process sees the workers whose
    devices it holds.

    Args:
        metrics: Metrics of steps, on the devices.
    """
    return tuple(map(_over_workers, jax.device_get(jax.tree.map(_here, list(metrics)))))


def _here(x: Any) -> Any:
    """Return an array, or the part of an array of workers that this process holds."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def _over_workers(metrics: StepMetrics) -> StepMetrics:
    """Return the metrics of one step of all workers, [R ...], as those of one."""
    if np.ndim(metrics.loss) == 0:
        return metrics
    in_a_row = metrics.skipped_in_a_row
    losses = metrics.loss
    tokens = metrics.num_tokens
    mean = jax.tree.map(
        lambda x: np.mean(x, axis=0), replace(metrics, skipped_in_a_row=np.zeros(1))
    )
    refused = np.asarray(metrics.is_skipped)
    counted = np.where(refused, 0.0, tokens) if not refused.all() else np.asarray(tokens)
    return replace(
        mean,
        loss=np.sum(np.where(counted > 0, losses * counted, 0.0)) / max(np.sum(counted), 1.0),
        num_tokens=np.sum(tokens),
        is_skipped=refused.all(),
        skipped_in_a_row=in_a_row,
        worker_loss=losses,
        exchange=mean.exchange | {"refused": np.sum(refused)},
    )
