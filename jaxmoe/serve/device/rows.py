# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a step: what requests may ask for, how each is sampled, and what it gets of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.models.sampling import Limits
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.draw import MOST_BIASES
from jaxmoe.serve.device.step import StepOutputs
from jaxmoe.serve.requests import Request, Result, Sampling, check_numbers
from jaxmoe.serve.step import Work


def no_limits(rows: int, vocab_size: int) -> Limits:
    """Return greedy sampling without filters for all rows."""
    return Limits(
        temperature=np.zeros(rows, np.float32),
        top_k=np.full(rows, vocab_size, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
    )


def set_limits(limits: Any, row: int, sampling: Sampling) -> None:
    """Write how a request is sampled into its row, in place."""
    limits.temperature[row] = sampling.temperature
    if sampling.top_k:
        limits.top_k[row] = min(sampling.top_k, limits.top_k[row])
    limits.top_p[row], limits.min_p[row] = sampling.top_p, sampling.min_p


def check_asked(
    request: Request, config: ExecutorConfig, vocab_size: int, adapters: Sequence[str]
) -> None:
    """Refuse what a request asks for and an executor does not compute.

    Args:
        request: Request of a client.
        config: Sizes of the executor.
        vocab_size: Tokens of the model.
        adapters: Adapters of the executor.

    Raises:
        ValueError: An id outside the vocabulary, a seed out of range, an adapter, or more
            log-probabilities or experts than are compiled.
    """
    check_numbers(request, vocab_size)
    sampling = request.sampling
    if max(sampling.num_logprobs, sampling.num_prompt_logprobs or 0) > config.num_logprobs:
        raise ValueError(
            f"num_logprobs={sampling.num_logprobs} or num_prompt_logprobs="
            f"{sampling.num_prompt_logprobs} exceeds the {config.num_logprobs} that"
            " are compiled: ask for fewer, or set num_logprobs of the executor"
        )
    if len(sampling.logit_bias) + len(sampling.stop_ids) > MOST_BIASES:
        raise ValueError(
            f"stop_ids has {len(sampling.stop_ids)} tokens: with those of logit_bias at most"
            f" {MOST_BIASES} are compiled"
        )
    if sampling.has_experts and not config.has_experts:
        raise ValueError(
            "has_experts asks for the chosen experts, which are not compiled: set has_experts"
            " of the executor to True"
        )
    if request.adapter and request.adapter not in adapters:
        raise ValueError(
            f"adapter={request.adapter!r} is not loaded: this executor has"
            f" {', '.join(adapters) or 'none'}"
        )


def asks_for_more(work: Work) -> bool:
    """Return whether a request asks for more than a token, its log-probability and its prompt's."""
    sampling = work.sampling
    return (
        sampling.num_logprobs > 0
        or sampling.has_experts
        or sampling.pooling == "last"
        or sampling.grammar is not None
    )


def wants_last_state(work: Work) -> bool:
    """Return whether the hidden state of the last token of a work is asked for."""
    return work.draws and not work.index and work.sampling.pooling == "last"


def wants_states(work: Work) -> bool:
    """Return whether the hidden states of all tokens of a work are asked for."""
    return not work.index and work.sampling.pooling == "mean"


def result_with(
    result: Result, outputs: StepOutputs, work: Work, row: int, experts: np.ndarray | None
) -> Result:
    """Return a result with what else a request has asked for of its row.

    Args:
        result: Token and log-probability.
        outputs: Outputs of the step, in host memory.
        work: Part of the request.
        row: Its row.
        experts: Experts to return [tokens L K]; None without any.
    """
    number = work.sampling.num_logprobs
    ids = outputs.top_ids[row, :number].tolist()
    logprobs = outputs.top_logprobs[row, :number].tolist()
    embedding = None
    if wants_last_state(work) and outputs.last_hidden is not None:
        embedding = np.asarray(outputs.last_hidden[row], np.float32)
    return dataclasses.replace(
        result,
        alternatives=tuple(zip(ids, logprobs, strict=True)),
        experts=experts,
        embedding=embedding,
    )
