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
from jaxmoe.parameters import Declaration, Role, as_factor, declare_matrix
from sharding import axes as ax
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream


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
        wide = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, None, ax.ACT_MLP)
        execution = self.execution
        given = {"activations": execution.precision.activations, "halo": execution.halo}
        weight = as_factor(declare_matrix(self, "gate_up", gate_up), dtype)
        product = Product("bsd,dcf->bscf", weight, (None, None, ax.MLP), wide, **given)
        hidden = out_of_stream(x.astype(dtype), {"hidden": product}, placement)["hidden"]
        hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
        weight = as_factor(declare_matrix(self, "down", down), dtype)
        wide = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)
        product = Product("bsf,fd->bsd", weight, (ax.MLP, None), wide, **given)
        return into_stream(hidden, product, placement)
