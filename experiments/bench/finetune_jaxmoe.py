# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Our side of `bench finetune`: see `side`."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
from flax import traverse_util

from experiments.bench.peer import TrainingData
from experiments.bench.side import answer_requests
from jaxmoe.checkpoint import from_huggingface
from jaxmoe.checkpoint.huggingface.peft_import import read_peft
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import adamw, train_only
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import state_around
from jaxmoe.training.step import make_train_step


class OurSide:
    """LoRA fine-tuning with this library."""

    def __init__(self, settings: dict[str, Any]):
        base, values = from_huggingface(settings["model"])
        adapter, arrays = read_peft(settings["adapter"], base)
        model = dataclasses.replace(base, adapter=adapter)
        flat = traverse_util.flatten_dict(values, sep="/")
        flat |= {path: jax.device_put(value) for path, value in arrays.items()}
        table = parameter_table(model)
        optimizer = train_only(table, adamw(settings["learning_rate"], weight_decay=0.0))
        execution = ExecutionConfig(unroll=settings["unroll"])
        params = traverse_util.unflatten_dict(flat, sep="/")
        self._state = state_around(model, optimizer, execution, params, jax.random.key(0))
        self._data = TrainingData(settings["data"])
        step = make_train_step(model, optimizer, execution=execution, table=table)
        self._step = step.lower(self._state, self._data.batch(0)).compile()
        self.facts = {"trained": sum(row.size for row in table.trained_rows)}

    def step(self, number: int) -> tuple[float, float]:
        """Return seconds and cross-entropy of one step."""
        batch = self._data.batch(number)
        started = time.perf_counter()
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready(self._state.params)
        return time.perf_counter() - started, float(metrics.loss)


if __name__ == "__main__":
    answer_requests(OurSide)
