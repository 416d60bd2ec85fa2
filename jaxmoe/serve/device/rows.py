# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a step: how each request is sampled, and what it gets of the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxmoe.models.sampling import Limits
from jaxmoe.serve.device.step import StepOutputs
from jaxmoe.serve.requests import PromptScore, Result, Sampling
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


def result_of(
    outputs: StepOutputs,
    work: Work,
    row: int,
    experts: np.ndarray | None,
    prompt: tuple[PromptScore, ...] | None = None,
) -> Result:
    """Return what a request has asked for of its row.

    Args:
        outputs: Outputs of the step.
        work: Part of the request.
        row: Its row.
        experts: Experts to return [tokens L K]; None without any.
        prompt: Scores of tokens of the prompt; None without any.
    """
    number = work.sampling.num_logprobs
    ids = outputs.top_ids[row, :number]
    logprobs = outputs.top_logprobs[row, :number]
    return Result(
        token=int(outputs.tokens[row]),
        logprob=float(outputs.logprobs[row]),
        alternatives=tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)),
        experts=experts,
        prompt=prompt,
    )
