# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the tokens of prompts, for requests that ask for them.

A step leaves its hidden states on the device. This program computes the logits of a few positions
at a time, so that [T V] never exists, and runs only for steps with such a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.serve.device.layers import stack_layers
from jaxmoe.serve.requests import PromptScore
from jaxmoe.serve.step import Work

_POSITIONS = 64
"""Positions whose logits exist at a time."""


class PositionScores(NamedTuple):
    """Log-probabilities of the tokens behind T positions."""

    logprobs: Float[Any, " T"]
    ranks: Int[Any, " T"]
    """Place of the token among all by probability, from 1."""
    top_ids: Int[Any, "T n"]
    """Most likely tokens, the first first."""
    top_logprobs: Float[Any, "T n"]


@functools.lru_cache(maxsize=16)
def make_scores(
    model: ModelConfig, execution: ServedConfig, num_top: int
) -> Callable[[Any, Any, Any], PositionScores]:
    """Return the jitted function `(params, hidden [1 T D], targets [T]) -> PositionScores`.

    Args:
        model: Config of the model.
        execution: How it is computed.
        num_top: Most likely tokens of each position.
    """

    def score_part(params: Any, hidden: Array, targets: Array) -> PositionScores:
        logits = output_logits(hidden, head_weight(params, model), model, execution)
        logits = execution.placement.place(logits, (None, None, None))[0]
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)
        ranks = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
        top = jax.lax.top_k(logprobs, min(num_top, logits.shape[-1]))
        return PositionScores(chosen[:, 0], ranks, top[1], top[0])

    def score(params: Any, hidden: Array, targets: Array) -> PositionScores:
        params = stack_layers(params)
        parts = [
            score_part(
                params,
                hidden[:, first : first + _POSITIONS],
                targets[first : first + _POSITIONS],
            )
            for first in range(0, len(targets), _POSITIONS)
        ]
        return PositionScores(*(jnp.concatenate(leaves) for leaves in zip(*parts, strict=True)))

    return jax.jit(score)


def num_scored(work: Work) -> int:
    """Return the positions of a work whose next token is of the prompt and is scored."""
    if work.sampling.num_prompt_logprobs is None or work.index:
        return 0
    return min(len(work.history) - 1 - work.start, len(work.tokens))


def targets_of(work: Work) -> Sequence[int]:
    """Return the tokens behind the scored positions of a work."""
    return work.history[work.start + 1 : work.start + 1 + num_scored(work)]


def scores_of(
    scores: PositionScores | None, work: Work, first: int
) -> tuple[PromptScore, ...] | None:
    """Return the scores of a work; None where its request asks for none.

    Args:
        scores: Host arrays of a step; None where it has scored no position.
        work: Part of a prompt.
        first: Place of its first token in them.
    """
    if work.sampling.num_prompt_logprobs is None or work.index:
        return None
    if scores is None:
        return ()
    count = num_scored(work)
    number = work.sampling.num_prompt_logprobs
    ids = scores.top_ids[first : first + count, :number]
    values = scores.top_logprobs[first : first + count, :number]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(
        PromptScore(logprob, rank, tuple(zip(*pair, strict=True)))
        for logprob, rank, pair in zip(
            np.asarray(scores.logprobs[first : first + count]).tolist(),
            scores.ranks[first : first + count].tolist(),
            pairs,
            strict=True,
        )
    )
