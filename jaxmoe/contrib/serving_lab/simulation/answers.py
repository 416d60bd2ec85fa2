# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Times of whole answers, as numbers side by side instead of the sequences."""

from __future__ import annotations

import array
import math

from jaxmoe.serve.requests import LatencyObjective
from jaxmoe.serve.sequence import Sequence


class AnswerTimes:
    """What the measures need of the answers that have ended: three numbers of each, and sums."""

    def __init__(self) -> None:
        self.ttft = array.array("d")
        """Seconds until the first token of each answer."""
        self.tpot = array.array("d")
        """Seconds per further token."""
        self.total = array.array("d")
        """Seconds until the last token."""
        self.num_within = 0
        """Answers that kept their objective."""
        self.num_written = 0
        """Tokens of all answers."""
        self.first_arrival = math.inf
        """Time of the first arrival, seconds."""
        self.last_token = -math.inf
        """Time of the last token."""

    def __len__(self) -> int:
        return len(self.ttft)

    def add(self, sequence: Sequence) -> None:
        """Count a sequence with a whole answer.

        Args:
            sequence: Sequence of any clock, that of a simulator or of a client.
        """
        ttft, tpot, total = latency(sequence)
        self.ttft.append(ttft)
        self.tpot.append(tpot)
        self.total.append(total)
        self.num_within += is_within(sequence)
        self.num_written += sequence.num_written
        self.first_arrival = min(self.first_arrival, sequence.arrived)
        self.last_token = max(self.last_token, sequence.last or 0.0)


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
