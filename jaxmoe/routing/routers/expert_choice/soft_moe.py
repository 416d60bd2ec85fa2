# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Soft MoE: experts read mixtures of all tokens of a sequence, tokens mixtures of all outputs.

    z        = x Phi                                   [S E P], P slots for each expert
    dispatch = softmax of z over the tokens            each slot's column sums to 1
    slot_ep  = sum_s dispatch_sep x_s                  input of expert e
    combine  = softmax of z over all E*P slots         each token's row sums to 1
    y_s      = sum_ep combine_sep expert_e(slot_ep)

There is no choice: every weight is positive and differentiable, every expert computes exactly P
rows per sequence, and there are neither balance losses nor drops. The cost is that of E*P rows per
sequence, whatever its length; `moe.top_k` has no effect (E*P = S*K has the cost of top-K). Mixtures
span the whole row of the batch, later tokens and other packed documents included, so the router is
for masked diffusion and encoders. Padding enters no mixture and receives none.

Source: Soft MoE (arXiv 2308.00951, section 2), also the SoftMoE gate of FSMoE (arXiv 2501.10714).
Not implemented: the normalisation of x and Phi with a trained scale, which the paper needs at large
widths (section 2.3); here x is normed already, and Phi has variance 1/D. For statistics, an
expert's logit is the logsumexp over its slots, and its probability the sum of `combine` over them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    Selection,
    Slots,
    Traits,
    sum_statistics,
)
from jaxmoe.routing.routers.expert_choice.expert_choice import EXPERT_TRAITS
from jaxmoe.routing.routers.linear import SizedRouter
from jaxmoe.routing.scopes import join_scopes, split_scopes
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftMoEConfig(RouterBase):
    """Experts read mixtures of all tokens of a row: no choice, not causal."""

    name: ClassVar[str] = "soft_moe"

    slots_per_expert: int = 1
    """Rows P that each expert computes per sequence."""

    def __post_init__(self):
        if self.slots_per_expert < 1:
            raise ValueError(f"router.slots_per_expert={self.slots_per_expert} must be at least 1")

    @property
    def traits(self) -> Traits:
        """Not causal; its scores are the gates, and its load is even; mixes tokens."""
        return dataclasses.replace(EXPERT_TRAITS, mixes_tokens=True)

    def sized_for(self, *, steps: int, rows_per_expert: float) -> SoftMoEConfig:
        """Return the config with as many slots as a top-k router has assignments."""
        del steps
        return dataclasses.replace(self, slots_per_expert=max(1, round(rows_per_expert)))


@dataclasses.dataclass(frozen=True)
class SoftMoE(SizedRouter):
    """The router."""

    def declarations(self) -> dict[str, Declaration]:
        """Return `weight [D E P]`, one vector for each slot."""
        phi = Declaration(
            shape=(self.embed_dim, self.num_experts, self.config.slots_per_expert),
            axes=(ax.EMBED, ax.ROUTER_OUT, ax.ROUTER_SLOTS),
            role="router",
            matrix=((-3,), (-2, -1)),
        )
        return {"weight": phi}

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Compute both mixtures, softmaxes of the same logits.

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
        # Padding may hold any value, and 0 * inf is NaN.
        x = jnp.where(inputs.token_mask[:, None], inputs.x.astype(jnp.float32), 0.0)
        weight = params["weight"].astype(jnp.float32)
        z_TEP = jnp.einsum("td,dep->tep", x, weight, preferred_element_type=jnp.float32)
        z = split_scopes(z_TEP, inputs.extent, "sequence")
        groups, length, number = *z.shape[:2], z.shape[2] * z.shape[3]
        z = z.reshape(groups, length, number)  # G, S, E*P
        mask = split_scopes(inputs.token_mask, inputs.extent, "sequence")[:, :, None]
        # In a row of padding alone all terms are kept, so that its softmax is finite.
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


SoftMoEConfig.router = SoftMoE
