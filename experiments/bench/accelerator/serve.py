# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of OLMoE in bfloat16 by the engine: options `batches`."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from experiments.bench.accelerator.step import model_of
from experiments.bench.accelerator.work import FAILURES, Work, emit, emit_failure, run_part
from jaxmoe.execution import ExecutionConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params
from jaxmoe.serve.answers import Generated
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.offline import sizes_for
from jaxmoe.serve.requests import Sampling


def serve(work: Work) -> None:
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
                row |= _rates(Engine(executor), model.vocab_size, batch, prompt, answer)
        except FAILURES as error:
            emit_failure(error, **row)
        else:
            emit(**row)


def _rates(engine: Engine, vocab_size: int, batch: int, prompt: int, answer: int) -> dict[str, Any]:
    def turn(length: int, seed: int) -> tuple[float, int]:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(1, vocab_size, prompt).tolist() for _ in range(batch)]
        started = time.perf_counter()
        streams = [
            engine.submit(tuple(tokens), Sampling(max_tokens=length, temperature=0.0))
            for tokens in prompts
        ]
        count = sum(isinstance(event, Generated) for stream in streams for event in stream)
        return time.perf_counter() - started, count

    turn(8, 0)
    prefill = min(turn(1, seed)[0] for seed in (1, 2))
    seconds, count = turn(answer, 3)
    return {
        "prefill_tokens_per_second": round(batch * prompt / prefill),
        "tokens_per_second": round(count / seconds),
        "ms": round(1e3 * (seconds - prefill) / (answer - 1), 2),
    }


if __name__ == "__main__":
    run_part(serve)
