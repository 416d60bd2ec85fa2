# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The routed experts: E SwiGLUs as stacked weights, applied to rows sorted by expert.

The weights are declared here and used inside the MoE island, where rows are local.
"""

from __future__ import annotations

from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmoe.models.config import MoEConfig
from jaxmoe.parameters import Declaration, declare
from pallas_kernels import grouped_swiglu
from pallas_kernels.backend import Implementation
from sharding import axes as ax

WEIGHT_AXES = {
    "gate_up": (ax.EXPERTS, None, None, ax.EXPERT_MLP),
    "down": (ax.EXPERTS, ax.EXPERT_MLP, None),
}
"""Layout of the weights where they are used, by dispatchers that spread experts."""


class Experts(nn.Module):
    """The weights of E experts."""

    embed_dim: int
    moe: MoEConfig

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """`gate_up [E D 2 F]` and `down [E F D]`, f32."""
        num_experts, hidden = self.moe.num_experts, self.moe.expert_dim
        gate_up = Declaration(
            shape=(num_experts, self.embed_dim, 2, hidden),
            axes=(ax.EXPERTS, ax.EXPERT_EMBED, ax.GATE_UP, ax.EXPERT_MLP),
            role="expert_in",
            matrix=((-3,), (-2, -1)),
        )
        down = Declaration(
            shape=(num_experts, hidden, self.embed_dim),
            axes=(ax.EXPERTS, ax.EXPERT_MLP, ax.EXPERT_EMBED),
            role="expert_out",
        )
        return {"gate_up": declare(self, "gate_up", gate_up), "down": declare(self, "down", down)}


def apply_experts(
    weights: dict[str, Array],
    rows: Float[Array, "R D"],
    group_sizes: Int[Array, " e"],
    implementation: Implementation | None,
) -> Float[Array, "R D"]:
    """Each row through its expert.

    Args:
        weights: of the e experts held here, as from `Experts`.
        rows: sorted by expert, in the compute dtype.
        group_sizes: rows of each expert; rows past their sum give 0.
        implementation: of `grouped_swiglu`.
    """
    gate_up, down = (weights[name].astype(rows.dtype) for name in ("gate_up", "down"))
    return grouped_swiglu(rows, gate_up, down, group_sizes, implementation=implementation)
