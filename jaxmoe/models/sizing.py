# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes experts from granularity and sparsity, and training tokens from parameters (HyperP).

For a dense model of hidden width G, granularity k and sparsity S (HyperP's, arXiv 2603.28743):

    k S experts of width G / k, of which k are active: the active parameters are the dense model's
    with a shared expert, one of the k: k S - 1 routed, of which k - 1 are chosen
    N = L (3 D G + 2 D H (N + M)) + 2 V D       parameters of the dense model, by which all is sized
    T = T0 N / N0                               tokens: 10.4e9 for the 208,142,336 of depth 8

(N heads, M key-value heads of width H.) The paper counts the shared expert among the k, this
library does not. Gates, norms and routers are left out, embedding and head are counted, and a
mixture counts as its dense equivalent: these are the paper's numbers, for comparison with its
tables. `jaxmoe.models.flops` and `ParameterTable` count what is computed.

At k = 2 with a shared expert one expert is chosen, whose gate is 1 for any score: the language
model's loss then gives the router no gradient (`RoutingWarning`, from MoEConfig), and the paper's
gain there comes from mixing with the shared expert alone.

To add a rule: a function in jaxmoe/models/sizing.py, and the table that it must reproduce in
tests/jaxmoe/models/test_sizing.py.
"""

from __future__ import annotations

from typing import Final

from jaxmoe.models.config import ModelConfig

BASE_PARAMETERS: Final = 208_142_336
"""Parameters of depth 8, by `dense_parameters`."""
BASE_TOKENS: Final = 10_400_000_000
"""Training tokens of depth 8."""


def moe_sizes(
    dense_dim: int, *, granularity: int, sparsity: int, has_shared_expert: bool = True
) -> dict[str, int]:
    """Return the sizes of a mixture with the active parameters of a dense layer.

    Args:
        dense_dim: Hidden width of the dense layer.
        granularity: k, active experts per token, the shared one included.
        sparsity: S, ratio of all experts to active ones.
        has_shared_expert: Whether one of the k is applied to every token.

    Returns:
        The fields num_experts, top_k, expert_dim and num_shared_experts of MoEConfig.

    Raises:
        ValueError: Sizes that do not divide, or no expert left for the router to choose.
    """
    if granularity < 1 or sparsity < 1:
        raise ValueError(
            f"granularity={granularity} and sparsity={sparsity} must both be at least 1"
        )
    if dense_dim % granularity:
        nearest = [k for k in range(1, 2 * granularity) if dense_dim % k == 0]
        best = min(nearest, key=lambda k: abs(k - granularity))
        raise ValueError(
            f"granularity={granularity} must divide model.dense_dim={dense_dim}, for an expert has"
            f" dense_dim / granularity hidden units: choose granularity={best}, or a dense_dim that"
            f" is a multiple of {granularity}"
        )
    if has_shared_expert and granularity == 1:
        raise ValueError(
            "granularity=1 with a shared expert leaves none to be routed: choose granularity of 3"
            " or more, or has_shared_expert=False"
        )
    shared = int(has_shared_expert)
    return {
        "num_experts": granularity * sparsity - shared,
        "top_k": granularity - shared,
        "expert_dim": dense_dim // granularity,
        "num_shared_experts": shared,
    }


def dense_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the dense model of the same width, as HyperP counts them.

    Counts SwiGLUs, attention projections, embedding and head; no gates, norms or routers.
    """
    width = model.embed_dim
    mixers = sum(kind.mixer.projection_parameters(width) for kind in model.kinds)
    dense = model.num_layers * 3 * width * model.dense_dim
    return dense + mixers + 2 * model.vocab_size * width


def training_tokens(model: ModelConfig) -> int:
    """Return HyperP's number of training tokens: 50 per parameter of `dense_parameters`."""
    return BASE_TOKENS * dense_parameters(model) // BASE_PARAMETERS
