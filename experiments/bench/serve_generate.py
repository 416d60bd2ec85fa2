# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The side of `bench serve` that decodes all prompts together, padded: see `side`."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from experiments.bench.serve import work_of
from experiments.bench.side import answer_requests
from jaxmoe.checkpoint import from_huggingface
from jaxmoe.models.decode import stream
from jaxmoe.models.sampling import SamplingConfig


class GenerateSide:
    """Decoding without an engine."""

    def __init__(self, settings: dict[str, Any]):
        self._model, self._params = from_huggingface(settings["model"])
        self._given = settings
        self.facts = {}

    def step(self, number: int) -> tuple[float, list[list[int]]]:
        """Return the seconds of a turn, and its answers."""
        work = work_of(self._given, number)
        settings = self._given
        # A prompt of the longest length gives all turns the same shapes and programs.
        filler = [1] * settings["prompt_length"]
        prompts = [np.asarray(prompt, np.int32) for prompt in (*work.prompts, filler)]
        started = time.perf_counter()
        parts = stream(
            self._model,
            self._params,
            prompts,
            num_tokens=settings["answer_length"],
            key=jax.random.key(0),
            sampling=SamplingConfig(temperature=0.0),
            at_once=settings["answer_length"],
        )
        rows = np.concatenate([np.asarray(part) for part in parts], axis=1)
        seconds = time.perf_counter() - started
        answers = [row[:size].tolist() for row, size in zip(rows, work.lengths, strict=False)]
        return seconds, answers


if __name__ == "__main__":
    answer_requests(GenerateSide)
