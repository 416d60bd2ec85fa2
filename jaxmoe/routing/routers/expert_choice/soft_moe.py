# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Soft MoE: experts read mixtures of all tokens of a sequence, tokens read mixtures of all outputs.

    z        = x Phi                                   [S E P], P slots for each expert
    dispatch = softmax of z over the tokens            each slot's column sums to 1
    slot_ep  = sum_s dispatch_sep x_s                  what expert e computes on
    combine  = softmax of z over all E*P slots         each token's row sums to 1
    y_s      = sum_ep combine_sep expert_e(slot_ep)

Nothing is chosen: every weight is positive and has a gradient, every expert computes exactly P rows
a sequence, and there is neither balance loss nor drop. The work is that of E*P rows a sequence,
whatever its length; `moe.top_k` says nothing here (E*P = S*K would cost what top-K costs).
Mixtures go over the whole row of the batch, later tokens and packed neighbours included, hence
only for masked diffusion and encoders. Padding enters no mixture and receives none.

Source: Soft MoE (arXiv 2308.00951, section 2), also the SoftMoE gate of FSMoE (arXiv 2501.10714).
Not taken over: the paper's normalisation of x and Phi with a trained scale, which it needs at large
widths (section 2.3); our x is normed already, and Phi has variance 1/D. For the records, an
expert's logit is the logsumexp over its slots, and its probability the sum of `combine` over them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.parameters import Declaration, draw
from jaxmoe.routing.base import (
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Selection,
    Slots,
    Traits,
    sum_statistics,
)
from jaxmoe.routing.routers.token_choice.token_choice import check_sizes
from jaxmoe.routing.scopes import join_scopes, split_scopes
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftMoEConfig:
    """Experts read mixtures of all tokens of a row: nothing is chosen, not causal."""

    name: ClassVar[str] = "soft_moe"

    slots_per_expert: int = 1
    """P, rows that each expert computes for a sequence."""

    def __post_init__(self):
        if self.slots_per_expert < 1:
            raise ValueError(f"router.slots_per_expert={self.slots_per_expert} must be at least 1")

    @property
    def traits(self) -> Traits:
        """Not causal; gates and loads of its own."""
        return Traits(
            is_causal=False,
            sees_others=True,
            has_own_gates=True,
            has_own_load=True,
            is_token_major=False,
            mixes_tokens=True,
        )

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> SoftMoE:
        """The router for these sizes."""
        check_sizes(num_experts=num_experts, top_k=top_k)
        return SoftMoE(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class SoftMoE:
    """The router with its sizes."""

    config: SoftMoEConfig
    num_experts: int
    top_k: int
    embed_dim: int

    def declarations(self) -> dict[str, Declaration]:
        """One vector for each slot."""
        phi = Declaration(
            shape=(self.embed_dim, self.num_experts, self.config.slots_per_expert),
            axes=(ax.EMBED, ax.ROUTER_OUT, ax.ROUTER_SLOTS),
            role="router",
            matrix=((-3,), (-2, -1)),
        )
        return {"weight": phi}

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Random parameters, no state."""
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
        """Two softmaxes of the same logits.

        Raises:
            ValueError: the positions of a sequence are spread over devices.
        """
        del state, train, key
        if inputs.extent.sequence_axes:
            raise ValueError(
                "moe.router=soft_moe mixes all tokens of a sequence and needs them on one device:"
                f" set the mesh axes {', '.join(inputs.extent.sequence_axes)} to 1, or take"
                " expert_choice"
            )
        # Inputs of padding may be anything: they must not reach a product with a weight of 0.
        x = jnp.where(inputs.token_mask[:, None], inputs.x.astype(jnp.float32), 0.0)
        weight = params["weight"].astype(jnp.float32)
        z_TEP = jnp.einsum("td,dep->tep", x, weight, preferred_element_type=jnp.float32)
        z = split_scopes(z_TEP, inputs.extent, "sequence")
        groups, length, number = *z.shape[:2], z.shape[2] * z.shape[3]
        z = z.reshape(groups, length, number)  # G, S, E*P
        mask = split_scopes(inputs.token_mask, inputs.extent, "sequence")[:, :, None]
        # A row of padding alone: its softmax over nothing is NaN, which `where` replaces.
        is_seen = mask | ~mask.any(1, keepdims=True)
        dispatch = jnp.where(mask, jax.nn.softmax(z, axis=1, where=is_seen), 0.0)
        combine = jnp.where(mask, jax.nn.softmax(z, axis=-1), 0.0)
        logits = jax.nn.logsumexp(z_TEP, axis=-1)
        probs = jax.nn.softmax(logits, axis=-1)
        experts = jnp.arange(number, dtype=jnp.int32) // self.config.slots_per_expert
        is_real = mask.any(1)  # G, 1
        expert_ids = jnp.where(is_real, experts[None, :], self.num_experts)
        scores = jnp.where(is_real, jnp.zeros((1, number), jnp.float32), -jnp.inf)
        selection = Selection(
            token_ids=jnp.arange(groups * number, dtype=jnp.int32),
            expert_ids=join_scopes(expert_ids),
            scores=join_scopes(scores),
        )
        statistics = sum_statistics(logits, probs, selection.expert_ids, inputs.token_mask)
        return RouterOutput(
            selection=selection,
            logits=logits,
            probs=probs,
            statistics=statistics,
            slots=Slots(dispatch=dispatch, combine=combine),
        )

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """There is no state."""
        del statistics, step
        return state
