# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures how long the device waits for the host between steps of decoding (`bench idle`).

A device waits from the end of a step until the next one is launched. The ends are seen by a thread
of its own, which waits for each step; where a step is launched before the last one has ended, the
device does not wait at all.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from typing import Any, Literal

import jax
import numpy as np

from experiments.bench.step import BenchRunConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.presets import tiny
from jaxmoe.scaling.initialize import init_params
from jaxmoe.serve.device.backend import sizes_for
from jaxmoe.serve.device.executor import LaunchedStep, ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.step import EngineStep

FirstRequest = Literal["plain", "penalties", "grammar"]
_PROMPT = 8
_EDGE = 8
"""Steps at the begin and the end of a turn that are not counted: not all requests are in them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IdleBenchConfig:
    """Greedy answers of the tiny model."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    model: ModelConfig = dataclasses.field(default_factory=tiny)
    """Model that answers; its weights are random."""
    batches: tuple[int, ...] = (1, 32, 128)
    """Requests that are computed together."""
    answer_length: int = 200
    """Tokens of each answer."""
    rounds: int = 3
    """Counted turns of each batch, after one that is not."""
    first_request: FirstRequest = "plain"
    """What one request of a batch asks for: penalties, or a grammar, which allows all tokens."""

    def __post_init__(self):
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches={self.batches} must be one or more numbers above 0")
        if self.answer_length < 4 * _EDGE:
            raise ValueError(f"answer_length={self.answer_length} must be at least {4 * _EDGE}")
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")


class AnyTokens:
    """A grammar that every answer follows, and how far one does."""

    is_done = False
    failure = ""

    def __init__(self, vocab_size: int):
        self._mask = np.full(-(-vocab_size // 32), 2**32 - 1, np.uint32)

    def start(self) -> AnyTokens:
        """Return the grammar itself, which has no state."""
        return self

    def mask(self) -> np.ndarray:
        """Return all tokens."""
        return self._mask

    def take(self, token: int) -> None:
        """Go on."""


class WatchedExecutor:
    """An executor of which is noted when each step is launched, and when it has ended."""

    def __init__(self, executor: ModelExecutor):
        """Start the thread that waits for steps.

        Args:
            executor: Computes them.
        """
        self._executor = executor
        self.facts = executor.facts
        self.check = executor.check
        self.run = executor.run
        self.collect = executor.collect
        self.reset = executor.reset
        self.expert_load = executor.expert_load
        self.launches: list[float] = []
        self.ends: list[float] = []
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="bench-idle", daemon=True).start()

    def launch(self, step: EngineStep) -> LaunchedStep:
        """Begin a step."""
        launched = self._executor.launch(step)
        self.launches.append(time.perf_counter())
        self._steps.put(launched.outputs.tokens)
        return launched

    def close(self) -> None:
        """End the thread that watches."""
        self._steps.put(None)

    def _watch(self) -> None:
        while (tokens := self._steps.get()) is not None:
            tokens.block_until_ready()
            self.ends.append(time.perf_counter())


def bench_idle(config: IdleBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    params = init_params(config.model, jax.random.key(0))
    return {"batches": {str(batch): _measure(config, params, batch) for batch in config.batches}}


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    return "\n".join(
        f"batch {batch:>4}: the device waits for {row['idle_share']:6.1%} of the time, in the"
        f" median {1e3 * row['idle_seconds']:.3f} ms of a step of {1e3 * row['step_seconds']:.2f}"
        f" ms; {row['tokens_per_second']:,.0f} tokens/s"
        for batch, row in summary["batches"].items()
    )


def idle_seconds(launches: list[float], ends: list[float]) -> np.ndarray:
    """Return how long a device has waited before each step but the first.

    Args:
        launches: Times at which the steps were launched, in their order.
        ends: Times at which they ended.
    """
    return np.maximum(np.asarray(launches[1:]) - np.asarray(ends[:-1]), 0.0)


def _measure(config: IdleBenchConfig, params: Any, batch: int) -> dict[str, float]:
    """Return the numbers of one batch: medians of the turns."""
    sizes = sizes_for(max_length=_PROMPT + config.answer_length, batch_size=batch)
    executor = WatchedExecutor(ModelExecutor(config.model, params, config=sizes))
    with Engine(executor) as engine:
        turns = [_turn(engine, executor, config, batch) for _ in range(config.rounds + 1)]
    executor.close()
    rows = {name: [turn[name] for turn in turns[1:]] for name in turns[0]}
    return {name: float(np.median(values)) for name, values in rows.items()}


def _turn(
    engine: Engine, executor: WatchedExecutor, config: IdleBenchConfig, batch: int
) -> dict[str, float]:
    executor.launches.clear()
    executor.ends.clear()
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, config.model.vocab_size, (batch, _PROMPT)).tolist()
    plain = Sampling(max_tokens=config.answer_length, temperature=0.0)
    first = {
        "plain": plain,
        "penalties": dataclasses.replace(plain, frequency_penalty=0.5),
        "grammar": dataclasses.replace(plain, grammar=AnyTokens(config.model.vocab_size)),
    }[config.first_request]
    with engine.held():
        streams = [engine.submit(prompts[0], first)]
        streams += engine.submit_all(prompts[1:], plain)
    for stream in streams:
        for _ in stream:
            pass
    while len(executor.ends) < len(executor.launches):
        time.sleep(1e-3)
    count = config.answer_length - 2 * _EDGE  # the last steps, all of decoding
    launches = executor.launches[-count - _EDGE : -_EDGE]
    ends = executor.ends[-count - _EDGE : -_EDGE]
    idle = idle_seconds(launches, ends)
    return {
        "idle_share": float(idle.sum() / (ends[-1] - ends[0])),
        "idle_seconds": float(np.median(idle)),
        "step_seconds": float(np.median(np.diff(ends))),
        "tokens_per_second": batch * (len(ends) - 1) / (ends[-1] - ends[0]),
    }
