# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the engine beside `generate` and transformers' continuous batching (`bench serve`).

All sides read the same model from files of Hugging Face and answer the same requests greedily, of
unequal prompts and lengths, in float32, each in a process of its own. They take turns, and each
turn has new prompts. `generate` writes to all prompts together as many tokens as the longest answer
has; what a request did not ask for is not counted.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import jax
import numpy as np

from experiments.bench.measure import matmul_rate
from experiments.bench.side import SideProcess, sides_in_turns
from experiments.bench.step import BENCH_MODEL, BenchRunConfig
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.scaling.initialize import init_params, parameter_table

_OURS = {"engine": "serve_engine", "generate": "serve_generate"}
_SIDES = {**_OURS, "transformers": "serve_transformers"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchConfig:
    """Greedy answers of OLMoE's shape, small enough for two cores."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    model: ModelConfig = BENCH_MODEL
    """Model that answers; its weights are random."""
    requests: int = 32
    """Requests of a turn, all of them there at its start."""
    max_sequences: int = 16
    """Requests that are computed together; `generate` takes all."""
    prompt_length: int = 128
    """Tokens of the longest prompt; lengths are drawn from an eighth of it."""
    answer_length: int = 64
    """Tokens of the longest answer; lengths are drawn from an eighth of it."""
    warm_up: int = 1
    """Turns before the counted ones."""
    rounds: int = 5
    """Counted turns of each side."""
    peer_python: str | None = None
    """Interpreter of transformers, of an environment with the extra hf; this one when None."""

    def __post_init__(self):
        for field in ("requests", "max_sequences", "rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        for field in ("prompt_length", "answer_length"):
            if getattr(self, field) < 8:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 8")
        if self.warm_up < 0:
            raise ValueError(f"warm_up={self.warm_up} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedWork:
    """Requests of one turn."""

    prompts: list[list[int]]
    """Token ids."""
    lengths: list[int]
    """Tokens of each answer."""


def work_of(settings: dict[str, Any], number: int) -> ServedWork:
    """Return the requests of a turn, the same for all sides.

    Args:
        settings: What a side is given.
        number: Number of the turn.
    """
    rng = np.random.default_rng(number)
    longest = settings["prompt_length"]
    sizes = rng.integers(longest // 8, longest + 1, settings["requests"])
    answers = rng.integers(
        settings["answer_length"] // 8, settings["answer_length"] + 1, len(sizes)
    )
    return ServedWork(
        prompts=[rng.integers(1, settings["vocab_size"], size).tolist() for size in sizes],
        lengths=answers.tolist(),
    )


def bench_serve(config: ServeBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    with tempfile.TemporaryDirectory() as place:
        settings = _given(config, place)
        params = init_params(config.model, jax.random.key(0))
        length = config.prompt_length + config.answer_length
        to_huggingface(config.model, params, settings["model"], family="olmoe", max_length=length)
        sides, timings = sides_in_turns(
            {name: f"experiments.bench.{module}" for name, module in _SIDES.items()},
            settings,
            peer="transformers",
            python=config.peer_python,
            rounds=config.rounds,
            warm_up=config.warm_up,
        )
    works = [
        work_of(settings, index) for index in range(config.warm_up, config.warm_up + config.rounds)
    ]
    written = float(np.median([sum(work.lengths) for work in works]))
    read = float(np.median([sum(map(len, work.prompts)) for work in works]))
    flops = flops_per_token(config.model, parameter_table(config.model), length) / 3
    medians = {name: timing.median for name, timing in timings.items()}
    cpu_seconds = {
        name: float(np.median(side.cpu_seconds[config.warm_up :])) for name, side in sides.items()
    }
    return {
        "requests": config.requests,
        "prompt_tokens": read,
        "written_tokens": written,
        "rounds": config.rounds,
        "seconds": medians,
        "best_seconds": {name: timing.best for name, timing in timings.items()},
        "cpu_seconds": cpu_seconds,
        "limit_seconds": flops * (read + written) / matmul_rate(),
        "peak_bytes": {name: side.peak_bytes for name, side in sides.items()},
        "equal_answers": {name: _equal(sides["engine"], side) for name, side in sides.items()},
        "times_transformers": medians["transformers"] / medians["engine"],
        "cpu_times_transformers": cpu_seconds["transformers"] / cpu_seconds["engine"],
    }


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    lines = [
        f"{summary['requests']} requests, {summary['prompt_tokens']:.0f} tokens of prompts,"
        f" {summary['written_tokens']:.0f} written; medians of {summary['rounds']}"
    ]
    for name, seconds in summary["seconds"].items():
        lines.append(
            f"{name:12} {seconds:8.3f} s   best {summary['best_seconds'][name]:.3f}, of processors"
            f" {summary['cpu_seconds'][name]:.3f};"
            f" {summary['requests'] / seconds:6.1f} requests/s"
            f" {summary['written_tokens'] / seconds:7.0f} tokens/s; peak"
            f" {summary['peak_bytes'][name] / 1e6:.0f} MB resident;"
            f" {summary['equal_answers'][name]:.0%} of answers equal the engine's"
        )
    limit = summary["limit_seconds"]
    lines.append(
        f"limit        {limit:8.3f} s   floating-point operations of all tokens at the rate of a"
        f" dense product; the engine is at {limit / summary['seconds']['engine']:.0%}"
    )
    lines.append(
        f"the engine is {summary['times_transformers']:.2f} times as fast as transformers; by the"
        f" time of processors {summary['cpu_times_transformers']:.2f} times"
    )
    return "\n".join(lines)


def _equal(engine: SideProcess, side: SideProcess) -> float:
    """Return the share of answers that are the engine's, token by token."""
    pairs = [
        ours == theirs
        for turn, reference_turn in zip(engine.results, side.results, strict=True)
        for ours, theirs in zip(turn, reference_turn, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _given(config: ServeBenchConfig, place: str) -> dict[str, Any]:
    """Return what all sides are given."""
    sizes = ("requests", "max_sequences", "prompt_length", "answer_length")
    return {
        "model": f"{place}/model",
        "vocab_size": config.model.vocab_size,
        **{field: getattr(config, field) for field in sizes},
    }
