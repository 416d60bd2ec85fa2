# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of a training step from the config.

    per token = 6 * (parameters in matrix products that the token meets; 4 for frozen ones)
              + sum over layers of 6 * N * (H + Hv) * S / 2   causal attention: half of the S x S
                                                              logits (all where not causal)
              + sum over layers of 12 * (n n + 2 n) * D       hyper-connections of n streams

Layers of a loop count once for each turn. A multiply-add counts two, the backward pass costs twice
the forward. The embedding lookup, norms and the router's sorting are not counted; a head tied to
the embedding is.
"""

from __future__ import annotations

from jaxmoe.models.config import ModelConfig
from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding import axes as ax


def matmul_parameters(model: ModelConfig, table: ParameterTable) -> int:
    """Return the number of parameters in matrix products that one token meets.

    Args:
        model: Experts and embedding.
        table: Parameters of the model.
    """
    return sum(_matmul_sizes(model, table).values())


def _matmul_sizes(model: ModelConfig, table: ParameterTable) -> dict[ParameterSpec, int]:
    """Return the values of each parameter in matrix products that one token meets."""
    sizes = {}
    for row in table:
        role = row.declaration.role
        declaration = row.declaration
        turns = max((s.turns for s in model.stacks if row.path.startswith(f"{s.path}/")), default=1)
        if role in ("norm", "connection_bias") or (
            role == "embedding" and not model.has_tied_embeddings
        ):
            continue
        if role == "adapter" and (declaration.matrix is None or row.drawn_as is not None):
            continue
        if model.moe is not None and ax.EXPERTS in declaration.axes:
            turns *= model.rows_per_sequence
            sizes[row] = turns * row.size * model.moe.top_k // model.moe.num_experts
        else:
            turns *= model.rows_per_sequence if declaration.is_stacked else 1
            sizes[row] = turns * round(row.size * declaration.share)
    return sizes


def _product_flops(model: ModelConfig, table: ParameterTable) -> float:
    """Return the FLOPs per token of products; a frozen matrix has no gradient of its own, unless an
    adapter trains values of it."""
    sizes = _matmul_sizes(model, table)
    rewritten = set()
    if model.adapter is not None and model.adapter.has_view:
        rows = [row for row in table.trained_rows if row.declaration.matrix is None]
        rewritten = {row.path.partition(":")[0] for row in rows if ":" in row.path}
    return sum(
        size * (4.0 if row.is_frozen and row.path not in rewritten else 6.0)
        for row, size in sizes.items()
    )


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
    stacks = (*model.stacks, *model.module_stacks)
    mixing = sum(stack_mixing_flops(model, stack, sequence_length) for stack in stacks)
    if model.loop is not None:
        mixing += model.loop.flops_per_token(model.embed_dim)
    # Each module applies the head as well.
    heads = sum(stack.num_layers for stack in model.module_stacks)
    mixing += 6.0 * heads * model.embed_dim * model.vocab_size
    flops = _product_flops(model, table) + mixing
    if not left_out:
        return flops
    (scan,) = (scan for scan in model.scans if scan.axis == ax.LAYERS)
    rows = ParameterTable(tuple(row for row in table if ax.LAYERS in row.declaration.axes))
    mixing = sum(stack_mixing_flops(model, stack, sequence_length) for stack in scan.stacks)
    return flops - left_out * (_product_flops(model, rows) + mixing)


def stack_mixing_flops(model: ModelConfig, stack: LayerStack, sequence_length: int) -> float:
    """Return the FLOPs per token of some layers beyond those of their parameters.

    Args:
        model: Model of the layers.
        stack: The layers.
        sequence_length: Positions of a sequence (S).
    """
    mixer = stack.kind.mixer.flops_per_token(sequence_length)
    residual = 2 * model.residual.flops_per_token(model.embed_dim)
    return model.rows_per_sequence * stack.num_calls * (mixer + residual)
