# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the best choice of feed-forward sizes of each sequence by trying all (Duo-LLM).

With O options in each of L layers there are O^L patterns. The oracle of a budget b takes for each
sequence the pattern with at most b big feed-forwards and the least loss; a router takes the pattern
that its probabilities prefer.

Source: arXiv 2410.10846.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.depth.two_sizes import TwoSizesConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.measures import Details
from jaxmoe.training.cross_entropy import token_nll
from jaxmoe.training.state import TrainState

_MOST_PATTERNS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SizeDetails(Details):
    """The losses of all choices of sizes on the first held-out batch, a row for each budget."""

    name: ClassVar[str] = "two_sizes"

    def rows(self, assembly: Assembly, state: TrainState) -> list[dict[str, Any]]:
        """Return a row for each budget."""
        batch = next(iter(assembly.held_out()))
        model = assembly.plan.model
        execution = assembly.execution
        return find_oracle(model, state.params, batch, execution=execution).rows()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SizeOracle:
    """Losses of sequences by pattern, in nats per token."""

    losses: Float[np.ndarray, "patterns B"]
    """Loss of each sequence with each pattern."""
    num_big: Int[np.ndarray, " patterns"]
    """Big feed-forwards of each pattern."""
    preferred: Int[np.ndarray, " B"]
    """Pattern that the router prefers for each sequence; all big without a router."""

    def oracle(self) -> Float[np.ndarray, " budgets"]:
        """Return the mean loss of the best patterns with at most 0, 1, ... big feed-forwards."""
        budgets = range(int(self.num_big.max()) + 1)
        return np.array(
            [self.losses[self.num_big <= budget].min(axis=0).mean() for budget in budgets]
        )

    def router(self) -> tuple[float, float]:
        """Return the mean loss of the preferred patterns, and their mean number of big ones."""
        chosen = self.losses[self.preferred, np.arange(len(self.preferred))]
        return float(chosen.mean()), float(self.num_big[self.preferred].mean())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each budget, with the preferred patterns beside the oracle."""
        loss, number = self.router()
        return [
            {"budget": budget, "oracle": float(value), "preferred": loss, "big": number}
            for budget, value in enumerate(self.oracle())
        ]


def find_oracle(
    model: ModelConfig,
    params: Any,
    batch: Batch,
    *,
    execution: ExecutionConfig | None = None,
) -> SizeOracle:
    """Return the losses of all patterns.

    Args:
        model: Model whose layers all have one feed-forward of several sizes.
        params: Its parameters.
        batch: Sequences, each with a token that is predicted.
        execution: How it is computed; defaults when None.

    Raises:
        ValueError: Layers differ, have one size, or there are too many patterns.
    """
    feed_forward = model.kinds[0].feed_forward
    options = feed_forward.num_sizes if isinstance(feed_forward, TwoSizesConfig) else 1
    number = options**model.num_layers
    if len(model.stacks) > 1 or options == 1 or number > _MOST_PATTERNS:
        raise ValueError(
            f"an oracle of sizes tries {options} options in each of {model.num_layers} layers of"
            f" {len(model.stacks)} kinds: it needs equal layers with the feed-forward two_sizes,"
            f" and at most {_MOST_PATTERNS} patterns"
        )
    execution = execution or ExecutionConfig()

    @jax.jit
    def losses_of(params: Any, batch: Any, pattern: Array) -> Array:
        context = {"size_pattern": jnp.zeros_like(batch.tokens) + pattern}
        inputs: Any = {"segment_ids": batch.segment_ids, "context": context}
        logits = forward(model, execution, params, batch.tokens, **inputs).logits
        assert logits is not None  # asked for by default
        placed = execution.placement.place(logits.astype(jnp.float32), (None, None, None))
        targets, weights = (
            execution.placement.place(x, (None, None)) for x in (batch.targets, batch.loss_weights)
        )
        nll = token_nll(placed, targets) * weights
        return jnp.sum(nll, axis=1) / jnp.sum(weights, axis=1)

    def run(pattern: int) -> np.ndarray:
        row_losses = losses_of(params, batch, jnp.int32(pattern))
        return np.asarray(jax.device_get(row_losses), np.float64)

    losses = np.stack([run(pattern) for pattern in range(number)])
    digits = np.arange(number)[:, None] // options ** np.arange(model.num_layers) % options
    return SizeOracle(
        losses=losses,
        num_big=np.sum(digits == options - 1, axis=1),
        # The preferred pattern is one of those that were tried, with the same loss.
        preferred=np.argmin(np.abs(losses - run(-1)), axis=0),
    )
