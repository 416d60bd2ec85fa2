# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says what to try after a run that has diverged."""

from __future__ import annotations

from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory


def divergence_advice(
    directory: RunDirectory,
    config: PretrainConfig,
    refused: tuple[int, int],
    checkpoint_step: int | None,
) -> str:
    """Return the message about a diverged run.

    Args:
        directory: Run directory.
        config: Configuration of the run.
        refused: First and last of the refused steps.
        checkpoint_step: Step of the newest checkpoint; None without one.
    """
    first, last = refused
    resume = f"python -m experiments.pretrain resume {directory.path}"
    rate, training = config.optimizer.learning_rate, config.training
    start = "from the start" if checkpoint_step is None else f"from step {checkpoint_step}"
    others = []
    warmup = max(2 * config.schedule.warmup_steps, training.steps // 10)
    if config.schedule.warmup_steps < warmup < training.steps // 2:
        others.append(f"--schedule.warmup_steps {warmup}")
    if training.clip is None or training.clip > 0.5:
        others.append("--training.clip 0.5")
    further = [f"or give {' or '.join(others)}"] if others else []
    if config.rl is None:  # batches of answers are not kept
        further.append(
            f"the refused batches: python -m experiments.replay --run.directory {directory.path}"
            f" --step {first}"
        )
    more = "\n" + "; ".join(further) if further else ""
    return (
        f"diverged: steps {first} to {last} were refused"
        f" (training.max_skipped={training.max_skipped} in a row); lower the learning rate"
        f" ({rate:g}): {resume} --optimizer.learning_rate {rate / 3:.2g} goes on {start}{more}"
    )
