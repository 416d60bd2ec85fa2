# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Uses of experts by a model that keeps some of them in fast memory, from a routing trace."""

from __future__ import annotations

import collections

from jaxmoe.planning.placement import RoutingTrace
from jaxmoe.serve.caches.base import Use


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
            ids = trace.expert_ids[layer, first : first + tokens].ravel().tolist()
            counts = collections.Counter(e for e in ids if e < trace.num_experts)
            total = max(sum(counts.values()), 1)
            scores = {(layer, e): counts[e] / total for e in range(trace.num_experts)}
            following = (layer + 1) % trace.num_layers
            items = [(layer, e) for e, _ in counts.most_common()]
            for place, item in enumerate(items):
                known = {"scores": scores, "expected": before.get(following, ())}
                found.append(
                    Use(item=item, size=size, category=str(layer), **({} if place else known))
                )
            before[layer] = tuple(items)
    return found
