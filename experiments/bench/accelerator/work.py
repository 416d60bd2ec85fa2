# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a part of `bench accelerator` is given and returns: one JSON argument in, a row a line out.

A part runs twice where it compiles: with `phase="compile"` beside the others, which fills the
persistent cache, then with `phase="measure"` alone. What libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

Phase = Literal["compile", "measure"]

FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    OSError,
)
"""What a candidate may raise without ending its part."""

_ROWS = os.dup(1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchWork:
    """What a part does."""

    phase: Phase = "measure"
    """Whether to fill the cache or to measure."""
    is_tiny: bool = False
    """Whether sizes are those of a test."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the part."""

    @property
    def is_measured(self) -> bool:
        """Whether candidates run."""
        return self.phase == "measure"


def run_part(part: Callable[[BenchWork], None]) -> None:
    """Run a part with the work that the command line describes.

    Args:
        part: Function that emits rows.
    """
    os.dup2(2, 1)  # what libraries print is no row
    part(BenchWork(**json.loads(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # threads of an engine or of a profiler do not hold it back


def emit(**row: Any) -> None:
    """Write one row, at once, so that it survives a part that is stopped."""
    os.write(_ROWS, (json.dumps(row) + "\n").encode())


def emit_failure(error: BaseException, **row: Any) -> None:
    """Write the row of what failed; its traceback goes to the log of the part."""
    traceback.print_exception(error)
    text = str(error).strip()
    emit(**row, error=f"{type(error).__name__}: {text[:400]}")


def rates(seconds: float, *, flops: float | None, moved: float | None) -> dict[str, float]:
    """Return the fields of a row that say how fast a call was.

    Args:
        seconds: Seconds of one call.
        flops: Floating-point operations of it, for a rate in TFLOP/s.
        moved: Bytes that it must read and write, for a rate in TB/s.
    """
    numbers = {"ms": round(1e3 * seconds, 4)}
    if flops is not None:
        numbers["tflops"] = round(flops / seconds / 1e12, 1)
    if moved is not None:
        numbers["tb_per_second"] = round(moved / seconds / 1e12, 3)
    return numbers


def median_seconds(call: Callable[[int], Any], *, rounds: int = 7, warm_up: int = 2) -> float:
    """Return the median seconds of calls that wait for their result.

    Args:
        call: Function of the number of the call, to rotate its inputs by.
        rounds: Counted calls.
        warm_up: Calls before them.
    """
    seconds = []
    for number in range(warm_up + rounds):
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warm_up:])
