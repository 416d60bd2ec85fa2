# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the batch of a step from sampled answers.

    tokens        p1 p2 p3 a1 a2  0        prompt, answer, padding
    targets       p2 p3 a1 a2 a3  0
    loss_weights  0  0  w  w  w   0        of the tokens of the answer, where they are predicted

Arrays of `Batch.extra` stand at the positions of the weights, and are 0 elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.contrib.rl.advantages import answer_weights, group_advantages
from jaxmoe.contrib.rl.objective import ADVANTAGES, OLD, PolicyGradientConfig
from jaxmoe.data.batch import Batch
from jaxmoe.routing.replay import EXPERTS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSample:
    """One answer to a prompt, and its reward."""

    prompt: tuple[int, ...]
    """Token ids."""
    answer: tuple[int, ...]
    """Drawn token ids, the one that ends the answer included."""
    log_probs: tuple[float, ...]
    """Log-probability of each drawn token, as the engine computed it."""
    text: str
    """Text of the answer, without what ended it."""
    reward: float
    experts: Any = dataclasses.field(default=None, compare=False)
    """Experts of all tokens but the last, [tokens L K]; None where they are not recorded."""


def drawn_order(prompts: int, minibatches: int, seed: tuple[int, ...]) -> np.ndarray:
    """Return the prompts of each update of a pass, [minibatches prompts/minibatches].

    Args:
        prompts: Prompts of a step.
        minibatches: Updates of the pass; one has the prompts in their order.
        seed: Numbers of the run, the step and the pass.
    """
    order = np.arange(prompts)
    if minibatches > 1:
        order = np.random.default_rng(seed).permutation(prompts)
    return order.reshape(minibatches, -1)


def batch_of(
    samples: Sequence[RolloutSample],
    objective: PolicyGradientConfig,
    *,
    group: int,
    length: int,
    longest: int,
) -> Batch:
    """Return the batch of answers, with the log-probabilities of the engine as old ones.

    Args:
        samples: Answers, those to one prompt next to each other.
        objective: Advantages and weights.
        group: Answers to each prompt.
        length: Predictions of a row, S.
        longest: Longest answer allowed.

    Raises:
        ValueError: A prompt and its answer are longer than a row.
    """
    rows = len(samples)
    tokens, targets, segments = np.zeros((3, rows, length), np.int32)
    weights, old, advantages = np.zeros((3, rows, length), np.float32)
    rewards = np.array([sample.reward for sample in samples], np.float64).reshape(-1, group)
    row_advantages = group_advantages(rewards, objective.advantage).reshape(-1)
    lengths = np.array([len(sample.answer) for sample in samples], np.float64)
    each = answer_weights(lengths, objective.aggregation, longest)
    for row, sample in enumerate(samples):
        row_tokens = (*sample.prompt, *sample.answer)
        end = len(row_tokens) - 1
        if end > length:
            raise ValueError(
                f"training.sequence_length={length} must be at least {end}, for a prompt with its"
                f" answer of {len(row_tokens)} tokens: set it so, or lower rl.max_tokens"
            )
        tokens[row, :end], targets[row, :end], segments[row, :end] = (
            row_tokens[:-1],
            row_tokens[1:],
            1,
        )
        answer = slice(len(sample.prompt) - 1, end)
        weights[row, answer], advantages[row, answer] = each[row], row_advantages[row]
        old[row, answer] = sample.log_probs
    extra: dict[str, Any] = {ADVANTAGES: advantages, OLD: old}
    if samples[0].experts is not None:
        shape = (rows, length, *samples[0].experts.shape[1:])
        experts = np.full(shape, -1, np.int32)
        extra[EXPERTS] = experts
        for row, sample in enumerate(samples):
            experts[row, : len(sample.experts)] = sample.experts
    return Batch(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        segment_ids=segments,
        extra=extra,
    )
