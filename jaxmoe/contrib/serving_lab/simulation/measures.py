# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of a simulated or served workload: latency, goodput, throughput."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxmoe.contrib.serving_lab.simulation.answers import AnswerTimes
from jaxmoe.contrib.serving_lab.simulation.run import Simulation
from jaxmoe.serve.sequence import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What clients saw, and what it took."""

    goodput: float
    """Requests per second that kept their objective."""
    within: float
    """Share of the finished requests that kept it."""
    finished: int
    """Requests with a whole answer."""
    seconds: float
    """Seconds from the first arrival to the last token."""
    ttft_p50: float
    """Seconds until the first token."""
    ttft_p99: float
    tpot_p50: float
    """Seconds per further token."""
    tpot_p99: float
    total_p50: float
    """Seconds until the last token."""
    total_p99: float
    tokens_per_second: float
    """Written tokens."""
    preempted: int = 0
    expert_bytes: float = 0.0
    """Bytes of expert weights read."""
    computed: int = 0
    """Tokens computed."""
    cached: int = 0
    """Prompt tokens taken from the pool."""
    moves: int = 0
    """Sequences that went to another instance."""
    refused: int = 0
    copies: int = 0
    """Copies between device and host memory."""
    joules_per_token: float = 0.0
    """Energy of all instances per written token."""
    instances: int = 0
    """Instances that took requests at the end."""


def measure(simulation: Simulation) -> Measures:
    """Return the numbers of a simulation that has run.

    Args:
        simulation: Simulation after `run`.
    """
    answers = simulation.answers
    if not answers:
        raise ValueError("no request was answered: lower the lengths, or raise max_length")
    return dataclasses.replace(
        measure_answers(answers),
        preempted=simulation.num_preempted,
        expert_bytes=simulation.expert_bytes,
        computed=simulation.num_computed,
        cached=simulation.num_cached,
        moves=simulation.num_moves,
        refused=simulation.refused,
        copies=simulation.num_copies,
        joules_per_token=simulation.meter.joules / answers.num_written,
        instances=simulation.fleet.num_open,
    )


def measure_sequences(sequences: Iterable[Sequence]) -> Measures:
    """Return the numbers of sequences with whole answers, at least one.

    Args:
        sequences: Sequences of any clock, that of a simulator or of a client.
    """
    answers = AnswerTimes()
    for sequence in sequences:
        answers.add(sequence)
    return measure_answers(answers)


def measure_answers(answers: AnswerTimes) -> Measures:
    """Return the numbers of whole answers, at least one.

    Args:
        answers: Their times.
    """
    ttft, tpot, total = (np.asarray(row) for row in (answers.ttft, answers.tpot, answers.total))
    seconds = max(answers.last_token - answers.first_arrival, 1e-9)
    return Measures(
        goodput=answers.num_within / seconds,
        within=answers.num_within / len(answers),
        finished=len(answers),
        seconds=seconds,
        ttft_p50=float(np.median(ttft)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        tpot_p50=float(np.median(tpot)),
        tpot_p99=float(np.quantile(tpot, 0.99)),
        total_p50=float(np.median(total)),
        total_p99=float(np.quantile(total, 0.99)),
        tokens_per_second=answers.num_written / seconds,
    )
