# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of a simulated or served workload: latency, goodput, throughput."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxmoe.contrib.serving_lab.simulation.run import Simulation
from jaxmoe.serve.requests import LatencyObjective
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


def latency(sequence: Sequence) -> tuple[float, float, float]:
    """Return the seconds until the first token, per further token, and until the last.

    Args:
        sequence: Sequence with a whole answer.
    """
    if sequence.first is None or sequence.last is None:
        raise ValueError(f"sequence {sequence.id} has no token")
    ttft = sequence.first - sequence.arrived
    return (
        ttft,
        (sequence.last - sequence.first) / max(sequence.num_written - 1, 1),
        sequence.last - sequence.arrived,
    )


def is_within(sequence: Sequence) -> bool:
    """Return whether a finished sequence kept its objective."""
    return (sequence.request.objective or LatencyObjective()).is_met(*latency(sequence))


def measure(simulation: Simulation) -> Measures:
    """Return the numbers of a simulation that has run.

    Args:
        simulation: Simulation after `run`.
    """
    sequences = list(simulation.sequences.values())
    if not sequences:
        raise ValueError("no request was answered: lower the lengths, or raise max_length")
    return dataclasses.replace(
        measure_sequences(sequences),
        preempted=simulation.num_preempted,
        expert_bytes=simulation.expert_bytes,
        computed=simulation.num_computed,
        cached=simulation.num_cached,
        moves=simulation.num_moves,
        refused=simulation.refused,
        copies=simulation.num_copies,
        joules_per_token=simulation.meter.joules
        / sum(sequence.num_written for sequence in sequences),
        instances=simulation.fleet.num_open,
    )


def measure_sequences(sequences: Iterable[Sequence]) -> Measures:
    """Return the numbers of sequences with whole answers, at least one.

    Args:
        sequences: Sequences of any clock, that of a simulator or of a client.
    """
    finished = list(sequences)
    ttft, tpot, total = np.array([latency(sequence) for sequence in finished]).T
    good = sum(map(is_within, finished))
    last = max(sequence.last or 0.0 for sequence in finished)
    seconds = max(last - min(sequence.arrived for sequence in finished), 1e-9)
    return Measures(
        goodput=good / seconds,
        within=good / len(finished),
        finished=len(finished),
        seconds=seconds,
        ttft_p50=float(np.median(ttft)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        tpot_p50=float(np.median(tpot)),
        tpot_p99=float(np.quantile(tpot, 0.99)),
        total_p50=float(np.median(total)),
        total_p99=float(np.quantile(total, 0.99)),
        tokens_per_second=sum(sequence.num_written for sequence in finished) / seconds,
    )
