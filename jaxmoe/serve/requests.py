# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records that go into an instance and come out of it: requests, results and events."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from jaxmoe.models.sampling import check_temperature

EndReason = Literal["stop", "length", "cancelled", "refused", "error"]
"""Why a stream ended: a stop id, the token limit, the client, the limits, a failed step."""
RefusalCode = Literal[
    "queue_full", "context_length_exceeded", "duplicate_id", "draining", "engine_error"
]
"""Why a request was refused: too many wait, it is too long, another one has its id, the engine is
about to end, it has failed."""


@runtime_checkable
class Matcher(Protocol):
    """How far an answer follows a grammar."""

    def mask(self) -> np.ndarray:
        """Return the tokens that may follow [ceil(V / 32)], a bit of a uint32 each."""
        ...

    def take(self, token: int) -> None:
        """Go on with a token of the answer."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end may follow."""
        ...

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on; empty while it can."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """What an answer is made of; `jaxmoe.serve.http.grammars` makes them."""

    def start(self) -> Matcher:
        """Return a matcher at the begin of an answer."""
        ...


PoolingType = Literal["last", "mean"]
"""The hidden state of the last token of a prompt, or the mean of all its tokens, as vLLM names
them."""
_MOST_BIASES = 300
"""Tokens of `logit_bias`, as in OpenAI's API."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn."""

    max_tokens: int = 16
    """Tokens to write at most."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = 0
    """Most probable tokens to draw from; 0 for all."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability to draw from; 1 for all."""
    min_p: float = 0.0
    """Tokens below this share of the largest probability are not drawn."""
    seed: int = 0
    """Seed of the request; token i is drawn with `fold_in(key(seed), i)`, rows of masked diffusion
    are filled with a key of each step and position."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the text; the id itself is written."""
    presence_penalty: float = 0.0
    """Taken away from the logit of each token of the answer; see `jaxmoe/serve/device/draw.py`."""
    frequency_penalty: float = 0.0
    """Taken away from a logit for each time that its token stands in the answer."""
    repetition_penalty: float = 1.0
    """Divides logits above 0 of the tokens of prompt and answer, and multiplies those below."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    grammar: Grammar | None = None
    """What the answer is made of; None for any tokens."""
    min_tokens: int = 0
    """Tokens before which no stop id is drawn, and no stop string ends the text."""
    has_stop: bool = False
    """Whether the text keeps the stop string, or the text of the stop id, that ends it."""
    num_logprobs: int = 0
    """Alternatives whose log-probabilities are returned with each token."""
    num_prompt_logprobs: int | None = None
    """Alternatives that are returned with the log-probability of each token of the prompt; None
    scores no prompt."""
    has_experts: bool = False
    """Whether the chosen experts of prompt and answer are returned; see `Result.experts`."""
    pooling: PoolingType | None = None
    """How the hidden states of the tokens of the prompt become an embedding; None for none."""
    has_answer: bool = True
    """Whether the tokens that are drawn are an answer. Without one, for embeddings and scores, the
    single one is thrown away, and a prompt leaves no room for it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        check_temperature(self.temperature)
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [-2, 2]")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be from 0 to max_tokens={self.max_tokens}"
            )
        if self.pooling not in (None, *get_args(PoolingType)):
            raise ValueError(f"pooling={self.pooling!r} must be last or mean, or None for none")
        if not self.has_answer and self.max_tokens > 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be 1 where has_answer=False")
        ids = [token for token, _ in self.logit_bias]
        if len(ids) > _MOST_BIASES or len(set(ids)) < len(ids):
            raise ValueError(
                f"logit_bias has {len(ids)} tokens: give at most {_MOST_BIASES}, each once"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it beyond the model."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        return any(penalties)

    @property
    def has_history(self) -> bool:
        """Whether the tokens before a draw are told with it."""
        return self.has_penalties or self.grammar is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether all tokens of the prompt have to be computed, because of what is returned."""
        return self.num_prompt_logprobs is not None or self.pooling == "mean"

    def changes_logits(self, index: int) -> bool:
        """Return whether the logits of a token are changed before it is drawn.

        Args:
            index: Number of the token within the answer, from 0.
        """
        is_held = index < self.min_tokens and bool(self.stop_ids)
        return is_held or bool(self.logit_bias) or self.has_history


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatencyObjective:
    """Latency that a request is promised (a service-level objective)."""

    ttft: float = float("inf")
    """Seconds until the first token."""
    tpot: float = float("inf")
    """Mean seconds per further token."""
    deadline: float = float("inf")
    """Seconds until the last token."""

    def is_met(self, ttft: float, tpot: float, total: float) -> bool:
        """Return whether a finished request kept all limits.

        Args:
            ttft: Seconds until the first token.
            tpot: Mean seconds per further token.
            total: Seconds until the last token.
        """
        return ttft <= self.ttft and tpot <= self.tpot and total <= self.deadline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one client asks."""

    id: int
    """Number that is unique within the instance or fleet."""
    prompt: Sequence[int]
    """Token ids, in a tuple or an array; at least one."""
    sampling: Sampling = Sampling()
    """How the answer is drawn."""
    objective: LatencyObjective | None = None
    """Promised latency; None for none."""
    adapter: str = ""
    """Adapter that answers; empty for the base model."""
    salt: str = ""
    """Tenant; prefixes are shared within one tenant only."""
    session: str = ""
    """Conversation or workflow that the request belongs to."""
    category: str = ""
    """Kind of request, for policies that distinguish kinds."""
    priority: int = 0
    """Larger numbers are served first."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt of request {self.id} is empty: give at least one token")
        try:
            self.salt.encode()  # a part of the names of pages
        except UnicodeEncodeError as error:
            raise ValueError(f"salt={self.salt!r} must be text that UTF-8 can hold") from error


def check_numbers(request: Request, num_ids: int) -> None:
    """Raise if a request has numbers that no executor of a model computes.

    Args:
        request: Request.
        num_ids: Ids that a prompt of the model may have.

    Raises:
        ValueError: An id of the prompt, of `logit_bias` or of `stop_ids` outside the vocabulary, or
            a seed out of range.
    """
    least = min(request.prompt)
    most = max(request.prompt)
    if least < 0 or most >= num_ids:
        raise ValueError(
            f"prompt holds the ids {least} to {most}, and the model has ids 0 to {num_ids - 1}: use"
            " its tokenizer"
        )
    sampling = request.sampling
    biased_ids = tuple(token for token, _ in sampling.logit_bias)
    for name, ids in (("logit_bias", biased_ids), ("stop_ids", sampling.stop_ids)):
        outside = [token for token in ids if not 0 <= token < num_ids]
        if outside:
            raise ValueError(
                f"{name} names the ids {outside[:3]}, and the model has ids 0 to {num_ids - 1}"
            )
    if not 0 <= sampling.seed < 2**31:
        raise ValueError(f"seed={sampling.seed} must be from 0 to {2**31 - 1}")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScore:
    """Score of a token of a prompt behind its first."""

    logprob: float
    """Log-probability of the token after those before it."""
    rank: int
    """Its place among all tokens by probability, from 1."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Most probable ids and their log-probabilities."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a step drew for one sequence."""

    token: int
    """Drawn token id."""
    logprob: float | None = None
    """Its log-probability."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Most probable ids and their log-probabilities."""
    experts: Any = None
    """Experts [tokens L K] in the L MoE layers, if asked for: with the first token those of the
    prompt, with a later one those of the token before it. All of them, one behind the other, are
    those of prompt and answer but for its last token, which is not computed. Unsigned integers; E
    marks an empty slot. The order is that of `routed_experts` of vLLM."""
    prompt: tuple[PromptScore, ...] | None = None
    """Scores of the tokens of the prompt, if asked for: of a step those of its positions, of the
    first token of an answer those of the whole prompt."""
    embedding: Any = None
    """Embedding [D] of the prompt from the hidden states behind the final norm, with the first
    token if asked for."""
    states: Any = None
    """Hidden states [tokens D] of the tokens of the prompt that a step has computed, if their mean
    is asked for."""
    ending: EndReason | None = None
    """Why the answer ends with this token beyond stop ids and limits: its grammar is complete
    (stop), or cannot go on (error)."""
    message: str = ""
    """Explanation of an error."""
    further: tuple[Result, ...] = ()
    """Results of the tokens behind it that the step has drawn too, because it had computed the ones
    before them as guesses."""
    num_guessed: int = 0
    """Guesses that the step has computed behind this draw; those that were drawn are in
    `further`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not queued."""

    code: RefusalCode
    """Word by which programs tell refusals apart."""
    message: str
    """Reason for the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """Event: a request has a new token."""

    id: int
    """Request."""
    index: int
    """Number of the token within the answer, from 0."""
    result: Result
    """Token with what was asked for beside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Event: a request has ended; the last event of its stream."""

    id: int
    """Request."""
    reason: EndReason
    """Why."""
    message: str = ""
    """Explanation of `refused` and `error`."""
    code: RefusalCode | None = None
    """Why it was refused; None where it was not."""


Event = Token | End
