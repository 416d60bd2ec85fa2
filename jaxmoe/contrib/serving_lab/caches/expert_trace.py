# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Uses of experts by a model that keeps some of them in fast memory, from a routing trace."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from jaxmoe.contrib.serving_lab.caches.base import Item, Use
from jaxmoe.routing.telemetry.trace import RoutingTrace


def expert_uses(trace: RoutingTrace, tokens: int, size: float = 1.0) -> list[Use]:
    """Return a use of every expert that each step meets, layer by layer.

    The share of a step's assignments stands for the router's mean score, which the trace does not
    hold. The next layer is expected to use the experts that its tokens chose most often in earlier
    steps, or what it used in the step before where none of them was seen yet. So is
    the first layer: the last one does not know the tokens of the next step. The time of a use is
    the number of its step.

    Args:
        trace: Experts of every token.
        tokens: Tokens of a step.
        size: Bytes of an expert.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    trace_uses: list[Use] = []
    before: dict[int, tuple] = {}
    tables = _TokenExperts(trace.num_experts, trace.expert_ids.shape[2])
    for first in range(0, trace.num_tokens, tokens):
        names = trace.token_ids[first : first + tokens].tolist()
        for layer in range(trace.num_layers):
            ids = trace.expert_ids[layer, first : first + tokens]
            following = (layer + 1) % trace.num_layers
            expected = tables.expected_experts(following, names) if following else ()
            expected = expected or before.get(following, ())
            time = float(first // tokens)
            uses = layer_uses(layer, ids, trace.num_experts, size, expected, time)
            before[layer] = tuple(use.item for use in uses)
            tables.add(layer, names, ids)
            trace_uses += uses
    return trace_uses


class _TokenExperts:
    """Counts the experts that each token of the vocabulary chose in each layer.

    Args:
        num_experts: E.
        top_k: Experts of a token, K.
    """

    def __init__(self, num_experts: int, top_k: int):
        self._num_experts = num_experts
        self._top_k = top_k
        self._counts: dict[tuple[int, int], np.ndarray] = {}

    def add(self, layer: int, tokens: Sequence[int], ids: np.ndarray) -> None:
        """Count the experts of some tokens.

        Args:
            layer: Number among the MoE layers.
            tokens: Ids of the vocabulary.
            ids: Their experts [tokens K]; E where there is none.
        """
        for token, chosen in zip(tokens, ids, strict=True):
            at = layer, token
            if at not in self._counts:
                self._counts[at] = np.zeros(self._num_experts + 1, np.int32)
            np.add.at(self._counts[at], chosen, 1)

    def expected_experts(self, layer: int, tokens: Sequence[int]) -> tuple[Item, ...]:
        """Return the K most frequent experts of each token, those of most tokens first.

        Args:
            layer: Number among the MoE layers.
            tokens: Ids of the vocabulary; those that were not counted yet have none.
        """
        votes: collections.Counter[int] = collections.Counter()
        for token in tokens:
            counts = self._counts.get((layer, token))
            if counts is not None:
                best = np.argsort(-counts[:-1], kind="stable")[: self._top_k]
                votes.update(int(expert) for expert in best if counts[expert])
        return tuple((layer, expert) for expert, _ in votes.most_common())


def layer_uses(
    layer: int,
    ids: np.ndarray,
    num_experts: int,
    size: float = 1.0,
    expected: tuple[Item, ...] = (),
    time: float = 0.0,
) -> list[Use]:
    """Return the uses of the experts of one layer in one step, the most frequent first.

    Args:
        layer: Number among the MoE layers.
        ids: Experts of the tokens; E and above where there is none.
        num_experts: E.
        size: Bytes of an expert.
        expected: Items that the next layer is expected to use.
        time: Time of the step.
    """
    counts = collections.Counter(e for e in ids.ravel().tolist() if e < num_experts)
    total = max(sum(counts.values()), 1)
    predictions = {
        "scores": {(layer, e): counts[e] / total for e in range(num_experts)},
        "expected": expected,
    }
    return [
        Use(
            item=(layer, e),
            size=size,
            category=str(layer),
            time=time,
            **({} if place else predictions),
        )
        for place, (e, _) in enumerate(counts.most_common())
    ]
