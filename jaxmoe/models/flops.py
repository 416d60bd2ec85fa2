# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a training step, from the config alone.

    per token = 6 * (parameters in matrix products that the token meets)
              + 6 * L * N * (H + Hv) * S / 2   causal attention: half of the S x S logits
                                                 (all of them where it is not causal)

A multiply-add counts two, backward costs twice the forward. The embedding lookup, norms and the
router's sorting are not counted; a head tied to the embedding is.
"""

from __future__ import annotations

from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from sharding import axes as ax


def matmul_parameters(model: ModelConfig, table: ParameterTable) -> int:
    """Parameters in matrix products that one token meets."""
    total = 0
    for row in table:
        role, declaration = row.declaration.role, row.declaration
        if role == "norm" or (role == "embedding" and not model.has_tied_embeddings):
            continue
        if model.moe is not None and ax.EXPERTS in declaration.axes:
            total += row.size * model.moe.top_k // model.moe.num_experts
        else:
            total += row.size
    return total


def flops_per_token(model: ModelConfig, table: ParameterTable, sequence_length: int) -> float:
    """Of one training step, forward and backward, per token."""
    attention = model.attention
    seen = sequence_length / 2 if attention.is_causal else sequence_length
    if attention.window is not None:
        # Without causality a window reaches as far ahead as it does back.
        seen = min(seen, attention.window if attention.is_causal else 2 * attention.window - 1)
    heads = attention.num_heads * (attention.head_dim + attention.value_dim)
    return 6.0 * matmul_parameters(model, table) + 6.0 * model.num_layers * heads * seen
