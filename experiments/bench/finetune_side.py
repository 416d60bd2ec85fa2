# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Protocol of the sides of `bench finetune`, each in a process of its own.

A side reads one JSON line with the directories of model and adapter and the sizes, prints one with
the number of trained parameters, and answers each further line with one JSON line: the seconds of a
step, its cross-entropy, and the peak of the process's resident memory, bytes.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any, Protocol

from experiments.cli.process import keep_freed_memory


class Side(Protocol):
    """LoRA fine-tuning of one library."""

    trained: int
    """Number of trained parameters."""

    def step(self, number: int) -> tuple[float, float]:
        """Return seconds and cross-entropy of one step.

        Args:
            number: Number of the batch.
        """
        ...


def peak_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def answer_requests(side_class: Callable[[dict[str, Any]], Side]) -> None:
    """Answer requests until the input ends.

    Args:
        side_class: Class of the side, called with what the first line holds.
    """
    keep_freed_memory()
    side = side_class(json.loads(sys.stdin.readline()))
    print(json.dumps({"trained": side.trained, "loaded_bytes": peak_bytes()}), flush=True)
    for number, _ in enumerate(sys.stdin):
        print(json.dumps([*side.step(number), peak_bytes()]), flush=True)
