# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The side of `bench serve` with transformers' continuous batching: see `side`."""

from __future__ import annotations

import time
from typing import Any

from experiments.bench.serve import work_of
from experiments.bench.side import answer_requests
from jaxmoe.optional import require

_PAGE = 16


class TransformersSide:
    """One manager of continuous batching that answers all turns."""

    def __init__(self, settings: dict[str, Any]):
        torch = require("torch", "hf")
        transformers = require("transformers", "hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32, experts_implementation="grouped_mm"
        ).eval()
        longest = settings["prompt_length"] + settings["answer_length"]
        generation = transformers.GenerationConfig(
            max_new_tokens=settings["answer_length"],
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        batching = transformers.ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=settings["max_sequences"] * -(-longest // _PAGE),
            max_batch_tokens=settings["max_sequences"] + 64,
            max_requests_per_batch=settings["max_sequences"],
        )
        self._given = settings
        self._manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()
        self.facts = {"torch": torch.__version__, "transformers": transformers.__version__}

    def step(self, number: int) -> tuple[float, list[list[int]]]:
        """Return the seconds of a turn, and its answers."""
        work = work_of(self._given, number)
        manager = self._manager
        started = time.perf_counter()
        names = [
            manager.add_request(prompt, max_new_tokens=length)
            for prompt, length in zip(work.prompts, work.lengths, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            if not manager.is_running():
                raise RuntimeError("the manager of continuous batching has ended")
        return time.perf_counter() - started, [answers[name] for name in names]


if __name__ == "__main__":
    answer_requests(TransformersSide)
