# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Progressive sparsification: a larger K in the lowest layers until a given step.

    k(layer, step) = early_top_k[layer]   before switch_step, in the lowest MoE layers
                   = final_top_k          otherwise

Scores are softmax over all experts. MoEConfig.top_k is K_max, the slots of a token; slots past
k(layer, step) are empty, so the switch does not recompile. The step is router state: an evaluation
uses the K of the training step that it follows.

Source: Sigma-MoE-Tiny (arXiv 2512.16248): with one expert per token the lowest layers do not learn
to spread their load from the start. The list of K and the switch are not published in full; a
switch at 0.9 of the steps follows a secondary account, and is what `sized_for` sets.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import draw
from jaxmoe.routing.base import Arrays, Key, RouterInputs, RouterStatistics, Traits
from jaxmoe.routing.routers.linear import linear_logits
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoice,
    TokenChoiceBase,
    preferred_experts,
    score_logits,
    traits_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgressiveTopKConfig(TokenChoiceBase):
    """Softmax top-k whose K is larger in the lowest layers until a given step."""

    name: ClassVar[str] = "progressive_topk"

    early_top_k: tuple[int, ...] = ()
    """K of the first, second, ... MoE layer before the switch; other layers use final_top_k."""
    final_top_k: int = 1
    """K of every layer after the switch."""
    switch_step: int = 0
    """First step at which every layer uses final_top_k; late in training in the paper."""

    def __post_init__(self):
        for field, value in self.schedule():
            if value < 1:
                raise ValueError(f"router.{field}={value} must be at least 1")
        if self.switch_step < 0:
            raise ValueError(f"router.switch_step={self.switch_step} must be 0 or more")

    def schedule(self) -> list[tuple[str, int]]:
        """Return the name and the value of each K."""
        early = [(f"early_top_k[{i}]", k) for i, k in enumerate(self.early_top_k)]
        return [("final_top_k", self.final_top_k), *early]

    @property
    def traits(self) -> Traits:
        """Causal; ends with `final_top_k` experts per token."""
        return dataclasses.replace(traits_of(None), final_top_k=self.final_top_k)

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the softmax of the logits."""
        del top_k, train, key
        return score_logits(linear_logits(params, inputs), "softmax")

    def sized_for(self, *, steps: int, rows_per_expert: float) -> ProgressiveTopKConfig:
        """Return the config with the switch at 0.9 of the steps."""
        del rows_per_expert
        return dataclasses.replace(self, switch_step=round(0.9 * steps))


@dataclasses.dataclass(frozen=True)
class ProgressiveTopK(TokenChoice):
    """The router: softmax top-k of K_max experts, cut to the current K.

    Raises:
        ValueError: A K of the schedule exceeds `top_k`, the slots of a token.
    """

    def __post_init__(self):
        config = self.config
        for field, value in config.schedule():
            if value > self.top_k:
                raise ValueError(
                    f"router.{field}={value} exceeds top_k={self.top_k}, the slots of a token: set"
                    f" moe.top_k to the largest of the schedule,"
                    f" {max(config.final_top_k, *config.early_top_k, 1)}"
                )
        TokenChoice.__post_init__(self)

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return random parameters, and the state `step`, 0."""
        return draw(self.declarations(), key), {"step": jnp.zeros((), jnp.int32)}

    def preferences(
        self, preference: Float[Array, "T E"], state: Any, inputs: RouterInputs
    ) -> Int[Array, "T K"]:
        """Return the k best experts of each token, and empty slots after them."""
        ids = preferred_experts(preference, top_k=self.top_k)
        slot = jnp.arange(self.top_k, dtype=jnp.int32)[None, :]
        is_used = slot < self.current_top_k(state["step"], inputs.context.get("layer"))
        return jnp.where(is_used, ids, self.num_experts)

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Return the state with the step counted; skipped steps do not call this."""
        del statistics, step
        return {"step": state["step"] + 1}

    def current_top_k(self, step: Int[Array, ""], layer: Int[Array, ""] | None) -> Int[Array, ""]:
        """Return k(layer, step); a missing layer counts as the first."""
        config = self.config
        layer = jnp.zeros((), jnp.int32) if layer is None else layer
        final = jnp.full((), config.final_top_k, jnp.int32)
        if not config.early_top_k:
            return final
        table = jnp.asarray(config.early_top_k, jnp.int32)
        early = table.at[layer].get(mode="fill", fill_value=config.final_top_k)
        return jnp.where(step < config.switch_step, early, final)


ProgressiveTopKConfig.router = ProgressiveTopK
