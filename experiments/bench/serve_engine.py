# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's side of `bench serve`: see `side`."""

from __future__ import annotations

import time
from typing import Any

from experiments.bench.serve import work_of
from experiments.bench.side import answer_requests
from jaxmoe.checkpoint import from_huggingface
from jaxmoe.serve.answers import Generated
from jaxmoe.serve.device.backend import sizes_for
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.requests import Sampling


class EngineSide:
    """One engine that answers all turns."""

    def __init__(self, settings: dict[str, Any]):
        model, params = from_huggingface(settings["model"])
        self._given = settings
        sizes = sizes_for(
            max_length=settings["prompt_length"] + settings["answer_length"],
            batch_size=settings["max_sequences"],
        )
        executor = ModelExecutor(model, params, None, config=sizes)
        self._engine = Engine(executor)
        self.facts = {"programs": len(executor.programs)}

    def step(self, number: int) -> tuple[float, list[list[int]]]:
        """Return the seconds of a turn, and its answers."""
        work = work_of(self._given, number)
        started = time.perf_counter()
        streams = [
            self._engine.submit(prompt, Sampling(max_tokens=length, temperature=0.0))
            for prompt, length in zip(work.prompts, work.lengths, strict=True)
        ]
        answers = [[e.token for e in stream if isinstance(e, Generated)] for stream in streams]
        return time.perf_counter() - started, answers


if __name__ == "__main__":
    answer_requests(EngineSide)
