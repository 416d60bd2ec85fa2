# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a step: how each request is sampled, and what it gets of the outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxmoe.models.sampling import Limits
from jaxmoe.serve.device.step import StepOutputs
from jaxmoe.serve.requests import Result, Sampling
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
