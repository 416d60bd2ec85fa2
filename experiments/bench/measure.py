# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Times candidates side by side: they take turns, so that other load affects all of them.

Before each turn there is a pause: thread pools spin for a while after their work, and would take
cores from the next candidate.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.messages import Progress, say


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds, the number to compare."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Seconds of the least disturbed run."""
        return min(self.seconds)


_PAUSE_SECONDS = 0.25
_CPU_TIMES = pathlib.Path("/proc/stat")


class OtherLoad:
    """Processor time that other processes take from its construction on."""

    def __init__(self):
        self._since, self._start = time.monotonic(), self._times()

    def share(self) -> float | None:
        """Return the share of all processors that others used; None where it is not known."""
        seconds = time.monotonic() - self._since
        now = self._times()
        if self._start is None or now is None or not seconds:
            return None
        processors = os.cpu_count() or 1
        return min(1.0, max(0.0, (now - self._start) / (seconds * processors)))

    @staticmethod
    def _times() -> float | None:
        """Return the busy seconds of all processors without those of this process."""
        try:
            # user nice system idle iowait irq softirq steal, in ticks
            ticks = [int(word) for word in _CPU_TIMES.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        busy = sum(ticks[:3] + ticks[5:]) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])


def describe_load(share: float | None) -> str:
    """Return how busy the machine was, and what that does to the numbers.

    Args:
        share: Share of all processors that other processes used; None where it is not known.
    """
    if share is None:
        return "machine: its use by other processes is unknown here"
    text = f"machine: other processes used {share:.0%} of its {os.cpu_count()} processors meanwhile"
    if share > 0.05:
        text += (
            "\n  the limit is measured at another time than the rest: a share above 100% means"
            "\n  that the machine was busier then; repeat on an idle machine"
        )
    return text


def time_call(function: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    """Return a function that runs a jitted call on fixed arguments to its end, and its seconds."""
    compiled = jax.jit(function).lower(*arguments).compile()

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - started

    return run


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the value and, for a cotangent of ones, all gradients."""

    def run(*arguments: Any) -> Any:
        out, pull = jax.vjp(function, *arguments)
        return out, pull(jnp.ones_like(out))

    return run


def in_turns(
    candidates: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 2,
    share: float = float("inf"),
) -> dict[str, Timing]:
    """Run every candidate once per round, and say from time to time how far it is.

    Args:
        candidates: Functions that run once and return their seconds.
        rounds: Counted rounds.
        warm_up: Rounds before them.
        share: Seconds of one candidate in all rounds. One that would take longer ends after the run
            that reaches them, with a message and at least one counted run, of which the first may
            then be in the warm-up.
    """
    turns = [_Turns(name, run, share) for name, run in candidates.items()]
    progress, total = Progress(first=5.0), warm_up + rounds
    for index in range(total):
        for candidate in turns:
            if candidate.has_ended:
                continue
            if len(turns) > 1:
                time.sleep(_PAUSE_SECONDS)
            candidate.run_once(is_counted=index >= warm_up, rounds_left=total - index - 1)
        round_seconds = sum(candidate.last for candidate in turns if not candidate.has_ended)
        seconds = round_seconds * (total - index - 1)
        progress.at("round {:.0f} of {:.0f}, about {:.0f} s left", index + 1, total, seconds)
    return {candidate.name: Timing(tuple(candidate.seconds)) for candidate in turns}


class _Turns:
    """Runs of one candidate of `in_turns`."""

    def __init__(self, name: str, run: Callable[[], float], share: float):
        self.name = name
        self.seconds: list[float] = []
        self.last = 0.0
        self.has_ended = False
        self._run = run
        self._share = share
        self._spent = 0.0
        self._is_short = False

    def run_once(self, *, is_counted: bool, rounds_left: int) -> None:
        """Run, and end if the next run would go beyond the share."""
        self.last = self._run()
        self._spent += self.last
        if is_counted or self._is_short:
            self.seconds.append(self.last)
        self._is_short = self._spent + self.last > self._share
        self.has_ended = self._is_short and bool(self.seconds)
        if self.has_ended and rounds_left:
            say(
                f"{self.name}: {self.last:.1f} s a run; it ends after {self._spent:.0f} s with"
                f" {len(self.seconds)} counted, its share is {self._share:.0f} s"
            )


def matmul_rate(dtype: Any = jnp.float32, shapes: Sequence[tuple[int, int, int]] = ()) -> float:
    """Return FLOP/s of dense products, the physical limit of the rest: the best of a few shapes.

    Args:
        dtype: Dtype of both factors; integers are summed in int32, 8-bit floats in float32.
        shapes: Shapes (m, k, n); without any, those that keep a CPU busy.
    """
    best = 0.0
    time.sleep(_PAUSE_SECONDS)
    sums = dtype
    if jnp.dtype(dtype).itemsize == 1:
        sums = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    for m, k, n in shapes or ((2048, 2048, 2048), (4096, 256, 1024), (8192, 512, 512)):
        x = jnp.ones((m, k), dtype)
        y = jnp.ones((k, n), dtype)
        run = time_call(lambda x, y: jnp.matmul(x, y, preferred_element_type=sums), x, y)
        timing = in_turns({"": run}, rounds=8)[""]
        best = max(best, 2.0 * m * k * n / timing.best)
    return best


def memory_rate(size: int = 2**28) -> float:
    """Return bytes/s between memory and cores, reading and writing: the best of a few runs.

    Args:
        size: Bytes that are read, and as many that are written: more than caches hold.
    """
    x = jnp.ones((size // 4,), jnp.float32)
    timing = in_turns({"": time_call(lambda x: x + 1.0, x)}, rounds=8)[""]
    return 2.0 * x.nbytes / timing.best
