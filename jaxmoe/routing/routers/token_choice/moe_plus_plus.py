# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MoE++: softmax top-k whose logits add a learned transform of the previous MoE layer's logits.

    z^l = x W^l + z^{l-1} W_g^l             without the second term in the first MoE layer
    g   = softmax(z) at the K largest       the gates, not renormalised

The gating residual W_g [E E] starts at 0, which gives plain softmax top-k; gradients flow through z
of all earlier layers. The method's other parts are fields of MoEConfig: experts without computation
(`zero_computation`), their balance loss (`heterogeneous`) and capacity
(`capacity.computing_share`).

Source: arXiv 2410.07348, sections 3.1 to 3.3. Readings chosen: the equations are followed where the
published code sets the gate of the zero expert to 0 and renormalises the rest; the initial value of
W_g, which is not published, is 0.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import Arrays, Key, RouterInputs, Traits
from jaxmoe.routing.routers.linear import linear_declarations, linear_logits
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoiceBase,
    score_logits,
)
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEPlusPlusConfig(TokenChoiceBase):
    """Softmax top-k whose logits add those of the previous MoE layer, transformed."""

    name: ClassVar[str] = "moe_plus_plus"

    @property
    def traits(self) -> Traits:
        """Causal; its scores are the gates; carries logits."""
        return Traits(can_replay=True, has_own_gates=True, carries_logits=True)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Return the matrix `weight [D E]` and that of the gating residual, `residual [E E]`."""
        residual = Declaration(
            shape=(num_experts, num_experts),
            axes=(ax.ROUTER_OUT, ax.ROUTER_OUT),
            role="router_residual",
            init="zeros",
        )
        plain = linear_declarations(num_experts=num_experts, embed_dim=embed_dim)
        return {**plain, "residual": residual}

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the softmax of the logits with the gating residual."""
        del top_k, train, key
        logits = linear_logits(params, inputs)
        if inputs.previous_logits is not None:
            residual = params["residual"].astype(jnp.float32)
            logits = logits + jnp.einsum(
                "te,ef->tf",
                inputs.previous_logits,
                residual,
                preferred_element_type=jnp.float32,
            )
        return score_logits(logits, "softmax", is_log_first=True)
