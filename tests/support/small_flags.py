# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Flags that make the commands of the documentation small."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MODEL = {
    "model.num_layers": "2",
    "model.embed_dim": "32",
    "model.dense_dim": "32",
    "model.attention.num_heads": "4",
    "model.attention.num_kv_heads": "4",
    "model.attention.head_dim": "8",
    "model.moe.expert_dim": "32",
}
_TRAINING = {
    "training.steps": "2",
    "training.batch_size": "8",
    "training.sequence_length": "64",
    "schedule.warmup_steps": "0",
    "evaluation.batches": "1",
    "evaluation.every": "0",
    "tracking.sample_length": "0",
    "tracking.trackers": "",
    "execution.unroll": "1",  # layers of a kind are compiled once
}
_PRETRAINING = {**_MODEL, **_TRAINING, "training.accumulation": "1"}
_TUNING = {name: value for name, value in _TRAINING.items() if name != "training.sequence_length"}
_ENGINE = {"engine.max_sequences": "2", "engine.pieces": "1x128", "engine.num_logprobs": "0"}
_SMALL: dict[str, dict[str, str]] = {
    "pretrain": _PRETRAINING,
    "pretrain hybrid": {**_PRETRAINING, "model.num_layers": "4"},
    "pretrain resume": {"training.steps": "4"},
    "pretrain branch": {"training.steps": "4", "checkpoint.initial.step": "2"},
    "finetune": _TUNING,
    "rl": {
        **_TUNING,
        "training.batch_size": "4",
        "rl.group": "2",
        "rl.prompts": "2",
        "rl.max_tokens": "4",
    },
    "evaluate": {"batches": "1"},
    "ensemble": {"batches": "2"},
    "generate": {"length": "4"},
    "evaluate_tasks": {"tasks": "sums", "include": "tasks", "limit": "4", "max_length": "64"},
    "serve": {"port": "0", **_ENGINE},
    "serve diffusion": {"port": "0", "engine.max_sequences": "2"},
    "plan": {"compiles": "0"},
    "data": {"training.sequence_length": "64"},
    "routers": {
        "methods": "mixtral deepseek_v3",
        "seeds": "2",
        "training.steps": "2",
        "training.batch_size": "8",
        "schedule.warmup_steps": "1",
        "timing_rounds": "1",
    },
    "gates": {
        "axes": "top_k",
        "top_ks": "1 4",
        "trained_top_ks": "4",
        "training.steps": "2",
        "schedule.warmup_steps": "1",
        "initial_seeds": "2",
    },
    "transfer": {
        "points": "32 64",
        "rates": "0.01 0.02 0.04",
        "budget": "None",
        "seeds": "1",
        "extend": "0",
        "training.steps": "2",
        "training.batch_size": "8",
    },
    "precision": {"seeds": "2", "steps": "4", "width": "32"},
    "outer": {
        "methods": "none diloco",
        "seeds": "2",
        "workers": "2",
        "every": "2",
        "training.steps": "4",
        "training.batch_size": "4",
        "schedule.warmup_steps": "1",
        "evaluation_batches": "2",
    },
    "serving simulate": {"workload.requests": "8", "rates": "8", "repeats": "1"},
    "serving load": {"requests": "2"},
    "depth": {"batches": "1"},
    "layer_paths": {"batches": "1", "epochs": "2"},
    "doctor": {"repeats": "1", "measurements": "1"},
}
"""Flags that make a command small, by its name."""
MASKED = {"--engine.logit_budget", "--engine.steps_per_token"}
"""Flags of a server of a model of masked diffusion."""
_FORCED = ("training.steps", "training.batch_size", "seeds", "budget", "tasks", "points")
_FORCED += ("checkpoint.initial.step",)
"""Flags of size: theirs is the last word where the command has them, too."""


def small(words: list[str], more: tuple[str, ...] = ()) -> list[str]:
    """Return the flags that make a command small: those that it leaves open, and sizes.

    Args:
        words: The command, `jaxmoe` first.
        more: Further flags behind it, which stand as they are.
    """
    kind = "serve diffusion" if MASKED & {*words} else " ".join(words[1:3])
    table = _SMALL.get(kind) or _SMALL.get(words[1], {})
    given, kept = _names(words), _names(more)
    chosen = {word.partition(":")[0] for word in words if re.match(r"[a-z_.]+:[a-z]", word)}
    flags = []
    for name, value in table.items():
        taken = name in kept or (name in given and name not in _FORCED)
        if taken or any(name.startswith(f"{path}.") for path in chosen & {"model.attention"}):
            continue
        if name == "training.batch_size" and "--training.accumulation" in (*words, *more):
            all_words = [*words, *more]
            value = str(int(value) * int(all_words[all_words.index("--training.accumulation") + 1]))
        flags += [f"--{name}", *value.split()]
    return flags


def _names(words: Sequence[str]) -> set[str]:
    """Return the names of the flags among words."""
    return {word[2:].replace("-", "_").partition("=")[0] for word in words if word[:2] == "--"}
