# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice by softmax: each token takes the K experts of highest logit.

    z = x W                                        [T E], f32
    before:  score_ti = softmax_E(z_t)_i           over all experts (Switch, OLMoE, Qwen3-MoE)
    after:   score_ti = softmax_K(z_t)_i           over the chosen K (Mixtral, ArchScale)

The chosen experts are the same; ties go to the lower expert id. Renormalising `before` over the K
is `after` exactly, and is the business of the gate. With K = 1 `after` is the constant 1 and the
language-model loss gives the router no gradient.

Sources: Switch Transformers (arXiv 2101.03961, section 2.1), Mixtral (arXiv 2401.04088, section
2.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.parameters import Declaration, draw
from jaxmoe.routing.base import (
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    sum_statistics,
    token_major,
)
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxTopKConfig:
    """The K experts of highest softmax probability."""

    name: ClassVar[str] = "softmax_topk"

    softmax: Literal["before", "after"] = "before"
    """Softmax over all experts before the choice, or over the chosen ones after it."""

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> SoftmaxTopK:
        """The router for these sizes."""
        return SoftmaxTopK(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class SoftmaxTopK:
    """`SoftmaxTopKConfig` with its sizes."""

    config: SoftmaxTopKConfig
    num_experts: int
    top_k: int
    embed_dim: int

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and num_experts={self.num_experts}"
            )

    def declarations(self) -> dict[str, Declaration]:
        """One matrix, without bias."""
        weight = Declaration(
            shape=(self.embed_dim, self.num_experts),
            axes=(ax.EMBED, ax.ROUTER_OUT),
            role="router",
        )
        return {"weight": weight}

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Random weights; no state."""
        return draw(self.declarations(), key), {}

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The K best experts of each token; deterministic, so `train` and `key` change nothing."""
        del state, train, key
        x, weight = inputs.x.astype(jnp.float32), params["weight"].astype(jnp.float32)
        logits = jnp.einsum("td,de->te", x, weight, preferred_element_type=jnp.float32)
        chosen, expert_ids = jax.lax.top_k(logits, self.top_k)
        if self.config.softmax == "before":
            scores = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        else:
            scores = jax.nn.log_softmax(chosen, axis=-1)
        selection = token_major(expert_ids, scores, inputs.token_mask, self.num_experts)
        probs = jax.nn.softmax(logits, axis=-1)
        statistics = sum_statistics(logits, probs, selection.expert_ids, inputs.token_mask)
        return RouterOutput(selection=selection, logits=logits, probs=probs, statistics=statistics)

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Nothing to keep."""
        del statistics, step
        return state
