# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What several long answers to one question cost, and which drafts of an answer to reject.

Sources: Kinetics (arXiv:2506.05333) counts the bytes of keys and values as FLOPs of equal time,
since attention over long answers is bound by memory. With n answers of G tokens to a prompt of C,
P active parameters, N query and M key heads of width H (all layers together), I FLOPs per byte:

    FLOPs           n (2 P G + 4 N H pairs),         pairs = C G + G^2 / 2
    bytes as FLOPs  I 4 M H (C G + n G^2 / 2)        the prompt's keys are read once for all answers

With a budget of b keys for each query, pairs = b G - max(0, b - C)^2 / 2, the integral of
min(b, C + t) over the answer. Each answer then reads its own keys, n pairs in all, which never
exceeds what is read without a budget. Choosing the keys is not counted.

ATTS (arXiv:2509.15148): drafts are rejected by a threshold on their scores that is calibrated by
conformal prediction, and each answer continues without waiting for the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.contrib.serving_lab.simulation.sizes import ModelSizes

INTENSITY = 562.5
"""FLOPs that a device computes while it reads a byte (Kinetics; the B200 in dense float8)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnswerCost:
    """Cost of answers by one model, in FLOPs."""

    parameters: int
    """Parameters that a token meets (P)."""
    pair_flops: float
    """FLOPs of one query and one key in all layers: 4 N H each."""
    kv_bytes: float
    """Bytes of keys and values of one token in all layers: 4 M H each."""
    intensity: float = INTENSITY
    """FLOPs per byte of the device (I)."""

    @classmethod
    def of(cls, sizes: ModelSizes, intensity: float = INTENSITY) -> AnswerCost:
        """Return the cost for a model.

        Args:
            sizes: Numbers of the model.
            intensity: FLOPs per byte of the device.
        """
        experts = sizes.moe_layers * sizes.top_k * sizes.expert
        return cls(
            parameters=sizes.dense + sizes.head + experts,
            pair_flops=sizes.pair_flops,
            kv_bytes=sizes.kv_bytes,
            intensity=intensity,
        )

    def flops(self, answers: int, prompt: int, length: int, budget: int | None = None) -> float:
        """Return the FLOPs of some answers.

        Args:
            answers: Answers to one prompt (n).
            prompt: Tokens of the prompt (C).
            length: Tokens of an answer (G).
            budget: Keys that a query sees (b); None for all.
        """
        attention = self.pair_flops * num_pairs(prompt, length, budget)
        return answers * (2.0 * self.parameters * length + attention)

    def bytes_as_flops(
        self, answers: int, prompt: int, length: int, budget: int | None = None
    ) -> float:
        """Return the FLOPs in whose time the keys and values of some answers are read.

        Args:
            answers: Answers to one prompt (n).
            prompt: Tokens of the prompt (C).
            length: Tokens of an answer (G).
            budget: Keys that a query sees (b); None for all.
        """
        read = prompt * length + answers * length**2 / 2
        if budget is not None:
            read = min(read, answers * num_pairs(prompt, length, budget))
        return self.intensity * self.kv_bytes * read

    def total(self, answers: int, prompt: int, length: int, budget: int | None = None) -> float:
        """Return the sum of both."""
        arguments = (answers, prompt, length, budget)
        return self.flops(*arguments) + self.bytes_as_flops(*arguments)


def num_pairs(prompt: int, length: int, budget: int | None = None) -> float:
    """Return the pairs of query and key of an answer, its length taken as continuous.

    Args:
        prompt: Tokens of the prompt (C).
        length: Tokens of the answer (G).
        budget: Keys that a query sees (b); None for all.
    """
    if budget is None:
        return prompt * length + length**2 / 2
    num_kept = min(budget, prompt + length)
    return num_kept * length - max(0, num_kept - prompt) ** 2 / 2


def conformal_threshold(scores: Sequence[float], alpha: float) -> float:
    """Return the score below which a draft is rejected, so that at most a share is.

    A new score that is exchangeable with the m given ones is below the k-th smallest of them with
    probability at most k / (m + 1); k is the largest for which that is at most alpha.

    Args:
        scores: Scores of drafts that ought to be accepted.
        alpha: Share of such drafts that may be rejected.

    Returns:
        The threshold; -inf where there are too few scores to reject any.

    Raises:
        ValueError: alpha is no share.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1)")
    place = math.floor(alpha * (len(scores) + 1))
    return sorted(scores)[place - 1] if place else -math.inf


def round_seconds(drafts: np.ndarray, check: float) -> tuple[float, float]:
    """Return the seconds of rounds of drafts and checks, in step with each other and not.

    In step, all answers wait for the longest draft of the round and are checked together. Else
    each is checked when it is drafted, and goes on; the checker takes any number at once.

    Args:
        drafts: Seconds of each draft [rounds, answers].
        check: Seconds of a check.
    """
    together = drafts.max(axis=1).sum() + check * len(drafts)
    return float(together), float((drafts + check).sum(axis=0).max())
