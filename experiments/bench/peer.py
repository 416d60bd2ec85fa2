# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Peer of `bench step`: training steps of OLMoE in transformers and PyTorch, on request.

It is a separate process, so that the thread pools of two frameworks do not share one. It reads one
JSON line with the model and sizes, then a line per request, and answers each with one JSON line:

    rate DTYPE    FLOP/s of a dense product
    step DTYPE    seconds and loss of one step: forward, backward, clipping, AdamW

Each dtype has a model of its own; bfloat16 is PyTorch's autocast.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.cli.process import keep_freed_memory
from jaxmoe.data import CorpusConfig, Loader
from jaxmoe.data.batch import Batch
from jaxmoe.optional import require


class TrainingData:
    """Batches of a file that `write_training_data` wrote, the same for both sides.

    The embedded corpus is the library of the running Python, which may be another one there.
    """

    def __init__(self, path: str):
        self._rows = np.load(path)

    def batch(self, number: int) -> Batch:
        """Return a batch by its number, from 0."""
        rows = self._rows[number]
        tokens, targets = rows[:, :-1], rows[:, 1:]
        return Batch(
            tokens=np.ascontiguousarray(tokens),
            targets=np.ascontiguousarray(targets),
            loss_weights=np.ones(targets.shape, np.float32),
        )


def write_training_data(path: str | pathlib.Path, steps: int, batch: int, length: int) -> None:
    """Write rows of this Python's embedded corpus, int32 [steps, batch, length + 1].

    Args:
        path: File, with the suffix `.npy`.
        steps: Number of batches.
        batch: Sequences of a step.
        length: Predictions of a sequence.
    """
    loader = Loader(CorpusConfig().build(), batch_size=batch, sequence_length=length, seed=0)
    batches = [loader.batch(number) for number in range(steps)]
    rows = [np.concatenate([b.tokens, b.targets[:, -1:]], axis=1) for b in batches]
    np.save(path, np.stack(rows))


@dataclasses.dataclass(frozen=True, slots=True)
class _Training:
    """A model in training."""

    model: Any
    optimizer: Any
    data: TrainingData
    steps: Iterator[int]
    """Numbers of the steps to come."""


class Peer:
    """Model, optimiser and data of the peer.

    Args:
        settings: Directory of the model (`model`), file of the batches (`data`), `learning_rate`.
    """

    def __init__(self, settings: dict[str, Any]):
        self._torch = require("torch", "hf")
        transformers = require("transformers", "hf")
        self._make = lambda: transformers.OlmoeForCausalLM.from_pretrained(
            settings["model"],
            dtype=self._torch.float32,
            use_cache=False,
            output_router_logits=True,
            experts_implementation="grouped_mm",
        ).train()
        self._given = settings
        self._trainings: dict[str, _Training] = {}

    def describe(self) -> dict[str, Any]:
        """Return what runs."""
        model = self._training("float32").model
        return {
            "torch": self._torch.__version__,
            "threads": self._torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "experts": model.config._experts_implementation,
        }

    def step(self, dtype: str) -> tuple[float, float]:
        """Return seconds and cross-entropy of one step."""
        torch = self._torch
        training = self._training(dtype)
        model = training.model
        optimizer = training.optimizer
        batch = training.data.batch(next(training.steps))
        tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens, batch.targets))
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            output = model(input_ids=tokens, labels=targets, shift_labels=targets)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        balance = model.config.router_aux_loss_coef * output.aux_loss
        return seconds, float(output.loss - balance)

    def rate(self, dtype: str) -> float:
        """Return FLOP/s of a dense product."""
        x = self._torch.ones(2048, 2048, dtype=getattr(self._torch, dtype))
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            self._torch.mm(x, x)
            seconds.append(time.perf_counter() - started)
        return 2.0 * 2048**3 / min(seconds)

    def _training(self, dtype: str) -> _Training:
        if dtype not in self._trainings:
            model = self._make()
            optimizer = self._torch.optim.AdamW(
                model.parameters(),
                lr=self._given["learning_rate"],
                betas=(0.9, 0.95),
                weight_decay=0.1,
            )
            data = TrainingData(self._given["data"])
            self._trainings[dtype] = _Training(model, optimizer, data, itertools.count())
        return self._trainings[dtype]


def main() -> None:
    """Answer requests until the input ends."""
    keep_freed_memory()
    peer = Peer(json.loads(sys.stdin.readline()))
    print(json.dumps(peer.describe()), flush=True)
    answers = {"rate": peer.rate, "step": peer.step}
    for line in sys.stdin:
        request, dtype = line.split()
        print(json.dumps(answers[request](dtype)), flush=True)


if __name__ == "__main__":
    main()
