# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Peer of `bench step`: training steps of OLMoE in transformers and PyTorch, on request.

It is a separate process, so that the thread pools of two frameworks do not share one. It reads one
JSON line with the sizes, then a line per request, and answers each with one JSON line:

    rate    FLOP/s of a dense product
    step    seconds of one step: forward, backward, clipping, AdamW
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from experiments.cli.process import keep_freed_memory
from jaxmoe.data import CorpusConfig, Loader
from jaxmoe.optional import require


def training_data(batch: int, length: int) -> Loader:
    """Return the embedded corpus, the same batches for both sides."""
    return Loader(CorpusConfig().build(), batch_size=batch, sequence_length=length, seed=0)


class Peer:
    """Model, optimiser and data of the peer.

    Args:
        sizes: Sizes of the model and batch of `bench step`, by the names of the OLMoE config.
    """

    def __init__(self, sizes: dict[str, Any]):
        self._torch = torch = require("torch", "hf")
        transformers = require("transformers", "hf")
        batch, length, rate = (sizes.pop(key) for key in ("batch", "length", "learning_rate"))
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        config = transformers.OlmoeConfig(
            **sizes,
            **special,
            max_position_embeddings=length,
            use_cache=False,
            output_router_logits=True,
            experts_implementation="grouped_mm",
        )
        torch.manual_seed(0)
        self._model = transformers.OlmoeForCausalLM(config).train()
        self._model.set_experts_implementation("grouped_mm")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, weight_decay=0.1)
        self._data, self._steps = training_data(batch, length), itertools.count()

    def describe(self) -> dict[str, Any]:
        """Return what runs."""
        return {
            "torch": self._torch.__version__,
            "threads": self._torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "experts": self._model.config._experts_implementation,
        }

    def step(self) -> float:
        """Return the seconds of one step."""
        tokens = self._torch.from_numpy(self._data.batch(next(self._steps)).tokens).long()
        started = time.perf_counter()
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def rate(self) -> float:
        """Return FLOP/s of a dense product."""
        x = self._torch.ones(2048, 2048)
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            self._torch.mm(x, x)
            seconds.append(time.perf_counter() - started)
        return 2.0 * 2048**3 / min(seconds)


def main() -> None:
    """Answer requests until the input ends."""
    keep_freed_memory()
    peer = Peer(json.loads(sys.stdin.readline()))
    print(json.dumps(peer.describe()), flush=True)
    answers = {"rate": peer.rate, "step": peer.step}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
