# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts without computation: routed like the others, at almost no cost (MoE++).

    zero        0
    copy        x
    constant j  a_1 x + a_2 v_j,   [a_1, a_2] = softmax(W_j x)

They are numbered after the E experts that compute: zero, copy, constant. Every device holds all of
them and applies them where the token is.

Source: MoE++ (arXiv 2410.07348, section 3.1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
from jaxmoe.routing import ZeroComputationConfig
from sharding import axes as ax
from sharding.assignments import Assignments


class ZeroComputationExperts(nn.Module):
    """Declares the parameters of the constant experts."""

    embed_dim: int
    free: ZeroComputationConfig

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """Return `constants [Z D]` and `mix [D Z 2]`, f32; empty without constant experts."""
        free = self.free
        if not free.num_constant:
            return {}
        number = free.num_constant
        constants = Declaration(
            shape=(number, self.embed_dim), axes=(ax.CONSTANTS, ax.EMBED), role="constant"
        )
        mix = Declaration(
            shape=(self.embed_dim, number, 2),
            axes=(ax.EMBED, ax.CONSTANTS, ax.GATE_UP),
            role="constant_mix",
            matrix=((-3,), (-2, -1)),
        )
        return {
            "constants": declare(self, "constants", constants),
            "mix": declare(self, "mix", mix),
        }


def apply_zero_computation(
    x: Float[Array, "T D"],
    assignments: Assignments,
    params: dict[str, Array],
    free: ZeroComputationConfig,
    num_experts: int,
) -> Float[Array, "T D"]:
    """Return the gated sum of what these experts return for each token.

    Args:
        x: Activations.
        assignments: Token-major assignments to all experts; those that compute are skipped.
        params: Parameters from `ZeroComputationExperts`.
        free: Numbers of experts of each kind.
        num_experts: E, experts that compute.

    Raises:
        ValueError: The assignments are not token-major.
    """
    if assignments.top_k is None:
        raise ValueError("zero_computation needs a router in which tokens choose experts")
    first = num_experts + free.num_zero
    ids = assignments.expert_ids.reshape(-1, assignments.top_k, 1)  # T, K
    places = first + jnp.arange(free.num_copy + free.num_constant, dtype=ids.dtype)
    gates_TK = assignments.gates.reshape(-1, assignments.top_k, 1)
    gates = jnp.sum(
        jnp.where(ids == places[None, None, :], gates_TK, 0.0), axis=1
    )  # T, copy and constant
    wide = x.astype(jnp.float32)
    of_input = gates[:, : free.num_copy].sum(-1)
    y = jnp.zeros_like(wide)
    if free.num_constant:
        logits = jnp.einsum("td,dzc->tzc", wide, params["mix"], preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(logits, axis=-1) * gates[:, free.num_copy :, None]
        of_input = of_input + shares[:, :, 0].sum(-1)
        y = jnp.einsum(
            "tz,zd->td", shares[:, :, 1], params["constants"], preferred_element_type=jnp.float32
        )
    return (y + of_input[:, None] * wide).astype(x.dtype)
