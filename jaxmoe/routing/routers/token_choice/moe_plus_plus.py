# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MoE++: a router that remembers what the layer before it thought of each token.

    z^l = x W^l + z^{l-1} W_g^l             the first MoE layer without the second term
    g   = softmax(z) at the K largest       the gates, not renormalised

The gating residual W_g [E E] starts at 0, where the router is plain softmax top-k; gradients flow
through z of all layers before. The method's other parts are MoEConfig's: experts without
computation (`zero_computation`), their balance loss (`heterogeneous`) and capacity
(`capacity.computing_share`).

Source: arXiv 2410.07348, sections 3.1 to 3.3. Its code sets the gate of the zero expert to 0 and
renormalises the rest; the equations do not, and neither do we. The start of W_g is not given.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import RouterInputs, Traits
from jaxmoe.routing.biases import BiasConfig
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoice,
    linear_declarations,
    linear_logits,
)
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEPlusPlusConfig:
    """Softmax top-k whose logits add those of the MoE layer before, transformed."""

    name: ClassVar[str] = "moe_plus_plus"
    bias: ClassVar[BiasConfig | None] = None
    groups: ClassVar[GroupLimitConfig | None] = None

    @property
    def traits(self) -> Traits:
        """Its gates are the probabilities; it carries logits."""
        return Traits(has_own_gates=True, carries_logits=True)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> TokenChoice:
        """The router for these sizes."""
        return TokenChoice(self, num_experts, top_k, embed_dim)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """The router's matrix, and that of the residual."""
        residual = Declaration(
            shape=(num_experts, num_experts),
            axes=(ax.ROUTER_OUT, ax.ROUTER_OUT),
            role="router_residual",
            init="zeros",
        )
        plain = linear_declarations(num_experts=num_experts, embed_dim=embed_dim)
        return {**plain, "residual": residual}

    def score(
        self,
        params: dict[str, Array],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Scored:
        """Softmax of the logits with the residual."""
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
        return Scored(
            logits=logits,
            log_scores=jax.nn.log_softmax(logits, axis=-1),
            probs=jax.nn.softmax(logits, axis=-1),
            preference=logits,
        )
