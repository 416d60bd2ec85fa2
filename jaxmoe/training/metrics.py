# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The record of metrics that a training step returns."""

from __future__ import annotations

import typing

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
    """Balancers' losses, weighted, summed over layers."""
    grad_norm: Float[Array, ""]
    """Global norm before clipping."""
    num_tokens: Float[Array, ""]
    """Sum of the loss weights."""
    is_skipped: Bool[Array, ""]
    """Whether the guard refused this step."""
    skipped_in_a_row: Array
    """Steps refused in a row, including this one."""
    router: dict[str, Float[Array, ""]]
    """Scalars of `watch_routers` for the whole batch; empty for a dense model."""
    load: Float[Array, "L E"] | None
    """Share of the assignments of each expert, per MoE layer."""
    indicators: dict[str, Float[Array, " L"]] = struct.field(default_factory=dict)
    """Indicators per layer, with detailed telemetry; NaN for a layer without one, a single number
    without layers. See `jaxmoe/layers/indicators.py` and `jaxmoe/training/indicators.py`."""
    quality: Float[Array, "L E"] | None = None
    """Mean log probability of each expert, per MoE layer, with detailed telemetry."""
    norm_limit: Float[Array, ""] | None = None
    """Largest gradient norm that the guard accepts; infinite without a bound."""
    worker_loss: Float[Array, " W"] | None = None
    """Cross-entropy of the rows of each worker, nats per token, if workers are watched; NaN without
    tokens. See `jaxmoe/training/dispersion.py`."""
    exchange: dict[str, Float[Array, " R"]] = struct.field(default_factory=dict)
    """Measures of the last exchange between workers; empty without. See
    `jaxmoe/training/workers/step.py`."""
