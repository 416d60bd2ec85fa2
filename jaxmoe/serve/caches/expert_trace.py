# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Uses of experts by a model that keeps some of them in fast memory, from a routing trace."""

from __future__ import annotations

import collections

import numpy as np

from jaxmoe.planning.placement import RoutingTrace
from jaxmoe.serve.caches.base import Item, Use


def expert_uses(trace: RoutingTrace, tokens: int, size: float = 1.0) -> list[Use]:
    """Return a use of every expert that each step meets, layer by layer.

    The share of a step's assignments stands for the router's mean score, which the trace does not
    hold. What a step is expected to use is what the step before it used.

    Args:
        trace: Experts of every token.
        tokens: Tokens of a step.
        size: Bytes of an expert.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    found: list[Use] = []
    before: dict[int, tuple] = {}
    for first in range(0, trace.num_tokens, tokens):
        for layer in range(trace.num_layers):
            ids = trace.expert_ids[layer, first : first + tokens]
            following = (layer + 1) % trace.num_layers
            uses = layer_uses(layer, ids, trace.num_experts, size, before.get(following, ()))
            before[layer] = tuple(use.item for use in uses)
            found += uses
    return found


def layer_uses(
    layer: int,
    ids: np.ndarray,
    num_experts: int,
    size: float = 1.0,
    expected: tuple[Item, ...] = (),
) -> list[Use]:
    """Return the uses of the experts of one layer in one step, the most frequent first.

    Args:
        layer: Number among the MoE layers.
        ids: Experts of the tokens; E and above where there is none.
        num_experts: E.
        size: Bytes of an expert.
        expected: Items that the next layer is expected to use.
    """
    counts = collections.Counter(e for e in ids.ravel().tolist() if e < num_experts)
    total = max(sum(counts.values()), 1)
    known = {
        "scores": {(layer, e): counts[e] / total for e in range(num_experts)},
        "expected": expected,
    }
    return [
        Use(item=(layer, e), size=size, category=str(layer), **({} if place else known))
        for place, (e, _) in enumerate(counts.most_common())
    ]
