# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SwiGLU: y = (silu(x Wg) * (x Wu)) Wd, with Wg and Wu stored as one parameter (arXiv 2002.05202).

The gate and up projections are one [D 2 F] array: one matrix to an optimiser, and F can be spread
over devices without splitting it from its partner.
"""

from __future__ import annotations

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import Declaration, Role, declare
from sharding import axes as ax


class FeedForward(nn.Module):
    """A dense SwiGLU; also the shared experts of a MoE layer."""

    embed_dim: int
    hidden_dim: int
    execution: ExecutionConfig
    role_in: Role = "mlp_in"
    role_out: Role = "mlp_out"

    @nn.compact
    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The layer's output in the compute dtype."""
        dtype, placement = self.execution.precision.compute_dtype, self.execution.placement
        gate_up = Declaration(
            shape=(self.embed_dim, 2, self.hidden_dim),
            axes=(ax.EMBED, ax.GATE_UP, ax.MLP),
            role=self.role_in,
            matrix=((-3,), (-2, -1)),
        )
        down = Declaration(
            shape=(self.hidden_dim, self.embed_dim), axes=(ax.MLP, ax.EMBED), role=self.role_out
        )
        weight = declare(self, "gate_up", gate_up).astype(dtype)
        inner = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None)
        x, axes = placement.place(x.astype(dtype), inner), (*inner, ax.ACT_MLP)
        hidden = placement.einsum("bsd,dcf->bscf", x, weight, axes=axes)
        hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
        weight = declare(self, "down", down).astype(dtype)
        axes = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
        return placement.einsum("bsf,fd->bsd", hidden, weight, axes=axes)
