# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SparseMixer's choice: experts one after the other, each weighed among those close behind it.

    z   = x W
    i_1 = the largest logit          g_1 = softmax of z at i_1, over R_1
    i_2 = the largest without i_1    g_2 = softmax of z at i_2, over R_2, without i_1

    R_k holds the experts j with (z_{i_k} - z_j) / max(|z_j|, z_{i_k}) <= margin

The gates of a token do not sum to 1: two experts that are far ahead of the others and of each other
have both the gate 1.

This is the choice in evaluation, for any K. The paper draws the experts in training, among those of
the margin, and estimates the router's gradient by Heun's method; here training chooses as
evaluation does, and the gradient is the gates' own, with R_k held constant.

Source: GRIN (arXiv 2409.12136), as Phi-3.5-MoE computes it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.routing.base import Arrays, Key, RouterBase, RouterInputs, RouterOutput, Traits
from jaxmoe.routing.routers.linear import SizedRouter, linear_logits, token_output


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SparseMixerConfig(RouterBase):
    """The K experts of highest logit, each weighed by a softmax over those within a margin."""

    name: ClassVar[str] = "sparse_mixer"

    margin: float = 0.02
    """Largest distance from the best logit at which an expert shares its weight, relative to the
    larger of the best logit and the expert's absolute one; twice `router_jitter_noise`."""

    def __post_init__(self):
        if not 0.0 <= self.margin < float("inf"):
            raise ValueError(f"router.margin={self.margin} must be finite and at least 0")

    @property
    def traits(self) -> Traits:
        """Causal; its scores are the gates."""
        return Traits(has_own_gates=True)


@dataclasses.dataclass(frozen=True)
class SparseMixer(SizedRouter):
    """The router."""

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the best expert of each token, then the best of the others."""
        del state, train, key
        logits = linear_logits(params, inputs)
        expert_ids = list[Array]()
        log_gates = list[Array]()
        remaining = logits
        for _ in range(self.top_k):
            best = jnp.argmax(jax.lax.stop_gradient(remaining), axis=1)[:, None].astype(jnp.int32)
            expert_ids.append(best)
            log_gates.append(self._log_gate(logits, remaining, best))
            experts = jnp.arange(self.num_experts, dtype=jnp.int32)[None, :]
            remaining = jnp.where(experts == best, -jnp.inf, remaining)
        return token_output(
            jnp.concatenate(expert_ids, axis=1),
            jnp.concatenate(log_gates, axis=1),
            inputs,
            logits=logits,
            probs=jax.nn.softmax(logits, axis=-1),
        )

    def _log_gate(
        self, logits: Float[Array, "T E"], remaining: Float[Array, "T E"], best: Int[Array, "T 1"]
    ) -> Float[Array, "T 1"]:
        """Return the logarithm of the gate of an expert, the best of those that remain."""
        top = jnp.take_along_axis(remaining, best, axis=1)
        still_top, still = jax.lax.stop_gradient((top, remaining))
        scale = jnp.maximum(jnp.abs(jax.lax.stop_gradient(logits)), still_top)
        # Where both logits are 0 the scale is 0 as well.
        is_far = still_top - still > self.config.margin * scale
        close = jnp.where(is_far, -jnp.inf, remaining)
        return top - jax.nn.logsumexp(close, axis=1, keepdims=True)


SparseMixerConfig.router = SparseMixer
