# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selective Sinkhorn routing: a random share of training steps uses an even transport plan.

    cost = z ("logits") or softmax_E(z) ("probs")
    plan_ti = exp(cost_ti / xi + row_t + column_i)          `transport.py`
    with probability rho:  q = plan;   otherwise, and in evaluation:  q = softmax_E(z)
    the K experts of largest q;  gate_ti = q_ti / sum of q over the K chosen

The even steps replace a balance loss, which is refused. Each layer draws from its own key of the
step, the same on every device. rho = 0 equals `softmax_topk` bit for bit, with the softmax after
the choice (before it if K = 1). The paper's optional noise on the costs is not implemented.

Source: arXiv 2511.08972, eq. 3 to 6 and algorithm 2. Readings chosen: the scalings row and column
are constants for the gradient, which passes through exp(cost / xi), as in the known implementation;
with K = 1, where the gate would be constant, it is q itself (a row of the plan sums to 1, and the
slope is that of a softmax).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Arrays, Key, RouterBase, RouterInputs, RouterOutput, Traits
from jaxmoe.routing.routers.assignment.transport import check_iterations, scalings
from jaxmoe.routing.routers.linear import SizedRouter, linear_logits, token_output
from jaxmoe.routing.routers.noise import require_key
from jaxmoe.routing.scopes import Scope


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveSinkhornConfig(RouterBase):
    """Softmax top-k, replaced in a share of the training steps by an even transport plan."""

    name: ClassVar[str] = "selective_sinkhorn"

    probability: float = 0.01
    """Share rho of the training steps that are routed by the plan."""
    cost: Literal["logits", "probs"] = "logits"
    """Quantity that the plan maximises: logits, or probabilities over all experts."""
    entropy: float = 0.5
    """Weight xi of the plan's entropy; the larger, the more uniform the plan."""
    iterations: int = 20
    """Iterations of Sinkhorn's algorithm."""
    scope: Scope = "sequence"
    """Tokens over which the plan is even: each row of the batch, or the micro-batch."""

    def __post_init__(self):
        check_iterations(self.iterations)
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"router.probability={self.probability} must lie between 0 and 1")
        if not 0.0 < self.entropy < float("inf"):
            raise ValueError(f"router.entropy={self.entropy} must be finite and above 0")

    @property
    def traits(self) -> Traits:
        """Evens the choice over the tokens of a scope in training; its scores are the gates."""
        return Traits(
            sees_others=True,
            evens_load=True,
            has_own_gates=True,
            needs_key=self.probability > 0.0,
        )


@dataclasses.dataclass(frozen=True)
class SelectiveSinkhorn(SizedRouter):
    """The router."""

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the K experts of largest q."""
        del state
        logits = log_q = linear_logits(params, inputs)
        if train and self.config.probability > 0.0:
            is_even = jax.random.uniform(require_key(key)) < self.config.probability
            log_q = jax.lax.cond(is_even, self._log_plan, lambda logits, _: logits, logits, inputs)
        _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(log_q), self.top_k)
        if self.top_k == 1:
            log_gates = jnp.take_along_axis(jax.nn.log_softmax(log_q, axis=1), expert_ids, axis=1)
        else:
            log_gates = jax.nn.log_softmax(jnp.take_along_axis(log_q, expert_ids, axis=1), axis=1)
        probs = jax.nn.softmax(logits, axis=-1)
        return token_output(expert_ids, log_gates, inputs, logits=logits, probs=probs)

    def _log_plan(self, logits: Float[Array, "T E"], inputs: RouterInputs) -> Float[Array, "T E"]:
        config = self.config
        cost = logits if config.cost == "logits" else jax.nn.softmax(logits, axis=-1)
        cost = cost / config.entropy
        return cost + scalings(cost, inputs, scope=config.scope, iterations=config.iterations)


SelectiveSinkhornConfig.router = SelectiveSinkhorn
