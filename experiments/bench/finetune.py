# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures LoRA fine-tuning beside transformers with peft (`bench finetune`).

Both sides read the same model and the same adapter from files of Hugging Face, and the same
batches, each in a process of its own. They take turns. Both train in float32, clip gradients and
use AdamW without decay.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import jax
import numpy as np

from experiments.bench.peer import write_training_data
from experiments.bench.side import sides_in_turns
from experiments.bench.step import TrainingBenchConfig
from jaxmoe.adapters import LoraConfig, TargetsConfig
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.checkpoint.huggingface.peft import write_peft
from jaxmoe.scaling.initialize import init_params, parameter_table

_ROLES = ("attention_in", "attention_out", "expert_in", "expert_out")
_SIDES = ("jaxmoe", "peft")
_B_STD = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneBenchConfig(TrainingBenchConfig):
    """LoRA on OLMoE's shape, small enough for two cores."""

    adapter: LoraConfig = LoraConfig(targets=TargetsConfig(roles=_ROLES))
    """Adapter to train."""
    batch_size: int = 4
    """Sequences per step."""
    sequence_length: int = 256
    """Tokens of a sequence."""
    unroll: int = 1
    """Layers that our compiled step has side by side."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    warm_up: int = 3
    """Steps before the counted ones."""

    def __post_init__(self):
        TrainingBenchConfig.__post_init__(self)
        if self.unroll < 1:
            raise ValueError(f"unroll={self.unroll} must be at least 1")


def bench_finetune(config: FinetuneBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json."""
    with tempfile.TemporaryDirectory() as place:
        _write_files(config, place)
        sides, timings = sides_in_turns(
            {name: f"experiments.bench.finetune_{name}" for name in _SIDES},
            _given(config, place),
            peer="peft",
            python=config.peer_python,
            rounds=config.rounds,
            warm_up=config.warm_up,
            share=config.share,
        )
    medians = {name: timing.median for name, timing in timings.items()}
    first = {name: side.results[0] for name, side in sides.items()}
    return {
        "trained": {name: side.facts["trained"] for name, side in sides.items()},
        "seconds": medians,
        "best_seconds": {name: timing.best for name, timing in timings.items()},
        "rounds": config.rounds,
        "times_the_peer": medians["peft"] / medians["jaxmoe"],
        "peak_bytes": {name: side.peak_bytes for name, side in sides.items()},
        "loaded_bytes": {name: side.facts["loaded_bytes"] for name, side in sides.items()},
        "first_loss": first,
        "first_loss_difference": abs(first["jaxmoe"] - first["peft"]),
        "last_loss": {name: side.results[-1] for name, side in sides.items()},
    }


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    lines = [
        f"{name:8} {seconds:8.3f} s   median of {summary['rounds']}, best"
        f" {summary['best_seconds'][name]:.3f}; peak {summary['peak_bytes'][name] / 1e6:.0f} MB"
        f" resident ({summary['loaded_bytes'][name] / 1e6:.0f} MB before the first step);"
        f" {summary['trained'][name]:,} parameters trained; loss"
        f" {summary['first_loss'][name]:.5f} -> {summary['last_loss'][name]:.5f}"
        for name, seconds in summary["seconds"].items()
    ]
    lines.append(f"jaxmoe is {summary['times_the_peer']:.2f} times as fast as peft")
    lines.append(f"losses of the first step differ by {summary['first_loss_difference']:.1e}")
    return "\n".join(lines)


def _write_files(config: FinetuneBenchConfig, place: str) -> None:
    """Write the model, an adapter with random factors, B included, and the batches."""
    params = init_params(config.model, jax.random.key(0))
    rng = np.random.default_rng(0)
    to_huggingface(
        config.model,
        params,
        f"{place}/model",
        family="olmoe",
        max_length=config.sequence_length,
    )
    steps = config.warm_up + config.rounds
    write_training_data(f"{place}/data.npy", steps, config.batch_size, config.sequence_length)
    model = dataclasses.replace(config.model, adapter=config.adapter)
    factors = {}
    for row in parameter_table(model):
        if row.path.endswith((":down", ":up")):
            std = _B_STD if row.path.endswith(":up") else row.declaration.fan(0) ** -0.5
            factors[row.path] = std * rng.normal(size=row.shape)
    write_peft(f"{place}/adapter", model, factors, base=f"{place}/model")


def _given(config: FinetuneBenchConfig, place: str) -> dict[str, Any]:
    """Return what both sides are given."""
    return {
        "model": f"{place}/model",
        "adapter": f"{place}/adapter",
        "data": f"{place}/data.npy",
        "learning_rate": config.learning_rate,
        "unroll": config.unroll,
    }
