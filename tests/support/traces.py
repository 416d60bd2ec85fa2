# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing traces with a planted structure, hidden by renumbering the experts."""

import numpy as np

from jaxmoe.routing.telemetry.trace import RoutingTrace


def planted(
    seed: int,
    *,
    num_layers: int = 4,
    num_experts: int = 16,
    num_groups: int = 4,
    num_tokens: int = 2048,
    top_k: int = 2,
    vocab_size: int = 64,
    faithful: float = 0.8,
) -> RoutingTrace:
    """Return a trace in which token id j prefers the E/G experts of group j % G, under random ids.

    Each slot takes an expert of the token's group with probability `faithful`, else any expert.
    """
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(vocab_size, size=num_tokens)
    size, layers = num_experts // num_groups, []
    for _ in range(num_layers):
        names = rng.permutation(num_experts)  # of the experts, group by group
        score = rng.random((num_tokens, num_experts))
        group = np.arange(num_experts)[None, :] // size
        is_own = group == (token_ids % num_groups)[:, None]
        is_faithful = rng.random((num_tokens, 1)) < faithful
        score = np.where(is_own & is_faithful, score + 1.0, score)
        layers.append(names[np.argsort(-score, axis=1)[:, :top_k]])
    return RoutingTrace(token_ids, np.stack(layers), num_experts)
