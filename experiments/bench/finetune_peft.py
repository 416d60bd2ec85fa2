# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Peer of `bench finetune`, transformers with peft: see `side`."""

from __future__ import annotations

import time
from typing import Any

from experiments.bench.peer import TrainingData
from experiments.bench.side import answer_requests
from jaxmoe.optional import require


class PeftSide:
    """LoRA fine-tuning with transformers and peft."""

    def __init__(self, settings: dict[str, Any]):
        self._torch = require("torch", "hf")
        transformers = require("transformers", "hf")
        peft = require("peft", "hf")
        base = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"],
            dtype=self._torch.float32,
            use_cache=False,
            output_router_logits=True,
            experts_implementation="grouped_mm",
        )
        self._model = peft.PeftModel.from_pretrained(
            base, settings["adapter"], is_trainable=True
        ).train()
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = self._torch.optim.AdamW(
            self._trained, lr=settings["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0
        )
        self._data = TrainingData(settings["data"])
        self.facts = {"trained": sum(p.numel() for p in self._trained)}

    def step(self, number: int) -> tuple[float, float]:
        """Return seconds and cross-entropy of one step."""
        torch = self._torch
        batch = self._data.batch(number)
        tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens, batch.targets))
        started = time.perf_counter()
        output = self._model(input_ids=tokens, labels=targets, shift_labels=targets)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        balance = self._model.config.router_aux_loss_coef * output.aux_loss
        return seconds, float(output.loss - balance)


if __name__ == "__main__":
    answer_requests(PeftSide)
