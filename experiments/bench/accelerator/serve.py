# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of OLMoE in bfloat16 by the engine: options `batches` and `is_profiled`."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from experiments.bench.accelerator.profiled import profile
from experiments.bench.accelerator.step import model_of
from experiments.bench.accelerator.work import FAILURES, BenchWork, emit, emit_failure, run_part
from jaxmoe.execution import ExecutionConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params
from jaxmoe.serve.answers import Generated
from jaxmoe.serve.device.backend import sizes_for
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.requests import Sampling


def serve(work: BenchWork) -> None:
    """Emit a row for each number of requests."""
    prompt, answer = (16, 16) if work.is_tiny else (128, 128)
    model = model_of(2 if work.is_tiny else 16, is_tiny=work.is_tiny)
    precision = PrecisionPolicy(compute="bfloat16", parameters="bfloat16")
    params = jax.jit(lambda key: init_params(model, key, dtype="bfloat16"))(jax.random.key(0))
    for batch in (2,) if work.is_tiny else work.options.get("batches", (1, 8, 64)):
        row: dict[str, Any] = {"case": f"serving, {batch} requests", "name": "jaxmoe"}
        try:
            started = time.perf_counter()
            executor = ModelExecutor(
                model,
                params,
                config=sizes_for(max_length=prompt + answer, batch_size=batch),
                execution=ExecutionConfig(precision=precision),
            )
            row["programs"] = len(executor.programs)
            row["compile_seconds"] = round(time.perf_counter() - started, 1)
            if work.is_measured:
                engine = Engine(executor)
                row |= _rates(engine, model.vocab_size, batch, prompt, answer)
                if work.options.get("is_profiled"):
                    row |= _profile(engine, model.vocab_size, batch)
        except FAILURES as error:
            emit_failure(error, **row)
        else:
            emit(**row)


def _rates(engine: Engine, vocab_size: int, batch: int, prompt: int, answer: int) -> dict[str, Any]:
    def turn(length: int, seed: int) -> tuple[float, int]:
        return _turn(engine, vocab_size, (batch, prompt), length, seed)

    turn(8, 0)
    prefill = min(turn(1, seed)[0] for seed in (1, 2))
    seconds, count = turn(answer, 3)
    return {
        "prefill_tokens_per_second": round(batch * prompt / prefill),
        "tokens_per_second": round(count / seconds),
        "ms": round(1e3 * (seconds - prefill) / (answer - 1), 2),
    }


def _profile(engine: Engine, vocab_size: int, batch: int) -> dict[str, Any]:
    """Return where the time of the steps of a short answer goes, its prefill counted as one."""
    steps = 16

    def run() -> None:
        _turn(engine, vocab_size, (batch, 8), steps, 4)

    return profile(run, steps)


def _turn(
    engine: Engine, vocab_size: int, shape: tuple[int, int], length: int, seed: int
) -> tuple[float, int]:
    """Return the seconds and the tokens of answers to prompts that are drawn."""
    prompts = np.random.default_rng(seed).integers(1, vocab_size, shape).tolist()
    sampling = Sampling(max_tokens=length, temperature=0.0)
    started = time.perf_counter()
    streams = [engine.submit(tuple(tokens), sampling) for tokens in prompts]
    count = sum(isinstance(event, Generated) for stream in streams for event in stream)
    return time.perf_counter() - started, count


if __name__ == "__main__":
    run_part(serve)
