# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers as clients receive them: tokens with the text that is certain, and the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.serve.requests import EndReason, PromptScore, RefusalCode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Event: a token of an answer."""

    index: int
    """Number of the token within the answer, from 0."""
    token: int
    """Its id."""
    text: str = ""
    """New text that is certain, of this token and earlier ones; empty without a codec."""
    logprob: float | None = None
    """Log-probability of the token."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Most likely ids and their log-probabilities, as many as were asked for."""
    prompt: tuple[PromptScore, ...] | None = None
    """Scores of the tokens of the prompt behind its first, with the first token if asked for."""
    embedding: Any = None
    """Embedding [D] of the prompt, with the first token if asked for."""
    experts: Any = None
    """Experts [tokens L K] of the tokens before this one that no earlier event had, if asked for;
    see `Result.experts`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Event: the end of an answer, the last event of its stream."""

    reason: EndReason
    """Why: a stop id or string, the limit of tokens, the client, a refusal, or a failed step."""
    message: str = ""
    """Explanation of `refused` and `error`."""
    code: RefusalCode | None = None
    """Why the request was refused; None where it was not."""
    text: str = ""
    """Text that was held back until now."""
    num_prompt: int = 0
    """Tokens of the prompt."""
    num_cached: int = 0
    """Tokens of the prompt whose keys and values were in the pool."""
    num_generated: int = 0
    """Tokens of the answer."""
    ttft: float | None = None
    """Seconds from the submission to the first token."""
    tpot: float | None = None
    """Mean seconds of each further token."""


AnswerEvent = Generated | Ended
"""Event of a stream."""


def whole_experts(events: Sequence[AnswerEvent]) -> np.ndarray | None:
    """Return the experts [tokens L K] of prompt and answer, but for the last token of the answer.

    These are the inputs of a training row, whose targets are the tokens behind them.

    Args:
        events: Events of a stream; None is returned where they have no experts.
    """
    parts = [event.experts for event in events if isinstance(event, Generated)]
    if not parts or any(part is None for part in parts):
        return None
    return np.concatenate(parts)
