# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of rewards and answers, on the host: advantages, weights of tokens, divergence.

The standard deviation of a group has one degree of freedom less, as in tunix.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pallas_kernels.array_types import Float

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]
AggregationName = Literal["sequence", "token", "constant"]

LARGEST_LOG_RATIO = 20.0
"""Logarithms of ratios are cut there, so that their exponentials are finite."""

_SMALLEST_DEVIATION = 1e-6


def group_advantages(
    rewards: Float[np.ndarray, "groups G"], name: AdvantageName
) -> Float[np.ndarray, "groups G"]:
    """Return the advantage of each answer; 0 for groups with equal rewards.

    Args:
        rewards: Rewards of the answers to each prompt.
        name: Formula, see `PolicyGradientConfig.advantage`.
    """
    # Exactly 0 for equal rewards, whatever their mean rounds to.
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    centred = np.where(np.ptp(rewards, axis=1, keepdims=True) == 0, 0.0, centred)
    size = rewards.shape[1]
    if name == "grpo":
        centred = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + _SMALLEST_DEVIATION)
    elif name == "rloo":  # r - (sum - r) / (G - 1)
        centred = centred * (size / (size - 1))
    return centred.astype(np.float32)


def answer_weights(
    lengths: Float[np.ndarray, " B"], name: AggregationName, longest: int
) -> Float[np.ndarray, " B"]:
    """Return the loss weight of each token of each answer.

    Args:
        lengths: Tokens of each answer, at least 1.
        name: Mean over tokens, see `PolicyGradientConfig.aggregation`.
        longest: Longest answer allowed.
    """
    total = lengths.sum()
    number = len(lengths)
    factors = {
        "sequence": 1.0 / (number * lengths),
        "token": np.full(number, 1.0 / total),
        "constant": np.full(number, 1.0 / (number * longest)),
    }
    return (total * factors[name]).astype(np.float32)


def k3(reference: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return the estimate of KL(policy, reference) of each drawn token, at least 0.

    Args:
        reference: Log-probabilities under the reference.
        log_probs: Log-probabilities under the policy.
    """
    log_ratio = np.clip(reference - log_probs, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return np.maximum(np.expm1(log_ratio) - log_ratio, 0.0)
