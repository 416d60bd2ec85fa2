# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Timings side by side: candidates take turns, so that what the machine does else meets them all.

Before each turn there is a pause: thread pools spin for a while when their work is done, and would
take the other candidate's cores.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The number to compare."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The least disturbed run."""
        return min(self.seconds)


_PAUSE_SECONDS = 0.25


def timed(function: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    """A jitted function of fixed arguments as one that runs it to its end and returns seconds."""
    compiled = jax.jit(function).lower(*arguments).compile()

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - started

    return run


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's value and, for a cotangent of ones, its gradients in all arguments."""

    def run(*arguments: Any) -> Any:
        out, pull = jax.vjp(function, *arguments)
        return out, pull(jnp.ones_like(out))

    return run


def in_turns(
    candidates: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 2
) -> dict[str, Timing]:
    """Runs every candidate once per round.

    Args:
        candidates: each runs once and returns its seconds.
        rounds: that count.
        warm_up: rounds before them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(warm_up + rounds):
        for name, run in candidates.items():
            if len(candidates) > 1:
                time.sleep(_PAUSE_SECONDS)
            elapsed = run()
            if index >= warm_up:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def matmul_rate(dtype: Any = jnp.float32, shapes: Sequence[tuple[int, int, int]] = ()) -> float:
    """FLOP/s of dense products, the physical limit of the rest: the best of a few shapes.

    Args:
        dtype: Of both factors; integers are summed in int32, numbers of 8 bits in float32.
        shapes: (m, k, n) of each; None given: what keeps a CPU busy.
    """
    best = 0.0
    time.sleep(_PAUSE_SECONDS)
    sums = dtype
    if jnp.dtype(dtype).itemsize == 1:
        sums = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    for m, k, n in shapes or ((2048, 2048, 2048), (4096, 256, 1024), (8192, 512, 512)):
        x, y = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
        run = timed(lambda x, y: jnp.matmul(x, y, preferred_element_type=sums), x, y)
        timing = in_turns({"": run}, rounds=8)[""]
        best = max(best, 2.0 * m * k * n / timing.best)
    return best


def memory_rate(size: int = 2**28) -> float:
    """Bytes/s between memory and cores, reading and writing: the best of a few runs.

    Args:
        size: Bytes that are read, and as many that are written: more than caches hold.
    """
    x = jnp.ones((size // 4,), jnp.float32)
    timing = in_turns({"": timed(lambda x: x + 1.0, x)}, rounds=8)[""]
    return 2.0 * x.nbytes / timing.best
