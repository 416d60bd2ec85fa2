# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of a training step from the config.

    per token = 6 * (parameters in matrix products that the token meets)
              + sum over layers of 6 * N * (H + Hv) * S / 2   causal attention: half of the S x S
                                                              logits (all where not causal)

A multiply-add counts two, the backward pass costs twice the forward. The embedding lookup, norms
and the router's sorting are not counted; a head tied to the embedding is.
"""

from __future__ import annotations

from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from sharding import axes as ax


def matmul_parameters(model: ModelConfig, table: ParameterTable) -> int:
    """Return the number of parameters in matrix products that one token meets.

    Args:
        model: Experts and embedding.
        table: Parameters of the model.
    """
    total = 0
    for row in table:
        role, declaration = row.declaration.role, row.declaration
        if role == "norm" or (role == "embedding" and not model.has_tied_embeddings):
            continue
        if model.moe is not None and ax.EXPERTS in declaration.axes:
            total += model.num_streams * row.size * model.moe.top_k // model.moe.num_experts
        else:
            streams = model.num_streams if declaration.is_stacked else 1
            total += streams * round(row.size * declaration.share)
    return total


def flops_per_token(
    model: ModelConfig, table: ParameterTable, sequence_length: int, *, left_out: float = 0.0
) -> float:
    """Return the FLOPs of one training step per token, forward and backward.

    Args:
        model: Layers.
        table: Parameters of the model.
        sequence_length: Positions of a sequence (S).
        left_out: Share of the layers of the longest scan that a token does not pass through.
    """
    mixing = sum(kind.mixer.flops_per_token(sequence_length) for kind in model.kinds)
    mixing *= model.num_streams
    whole = 6.0 * matmul_parameters(model, table) + mixing
    if not left_out:
        return whole
    (scan,) = (scan for scan in model.scans if scan.axis == ax.LAYERS)
    rows = ParameterTable(tuple(row for row in table if ax.LAYERS in row.declaration.axes))
    mixing = model.num_streams * sum(
        stack.num_layers * stack.kind.mixer.flops_per_token(sequence_length)
        for stack in scan.stacks
    )
    return whole - left_out * (6.0 * matmul_parameters(model, rows) + mixing)
