# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says why a run has ended with an error, or has nothing to do, and what to try."""

from __future__ import annotations

from jaxmoe.messages import command_line, say
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import TrainResult
from jaxmoe.training.loop import Status


def nothing_to_do(directory: RunDirectory, step: int, config: PretrainConfig) -> TrainResult:
    """Say that a run has been trained to its last step, and return how it ended.

    Args:
        directory: Run directory.
        step: Number of steps done.
        config: Configuration of this start.
    """
    longer = ("--training.steps", 2 * config.training.steps)
    say(
        f"nothing to do: {directory.path} has done step {step} of {config.training.steps}."
        " See its report.html, give another --run.name, or train on:"
        f" {command_line('pretrain', 'resume', directory.path, *longer)}"
    )
    summary = directory.summary() or {}
    return TrainResult(status="done", step=step, checkpoint_step=step, summary=summary)


def end_of_run(
    status: Status,
    directory: RunDirectory,
    config: PretrainConfig,
    *,
    refused: tuple[int, int] | None,
    checkpoint_step: int | None,
    is_saved: bool,
) -> tuple[Status, str]:
    """Return how a run has ended, and the message about an end that is an error.

    Args:
        status: How its steps ended.
        directory: Run directory.
        config: Configuration of the run.
        refused: First and last of refused steps that ended it; None for none.
        checkpoint_step: Step of the newest checkpoint; None without one.
        is_saved: Whether the last state is on disk.
    """
    if status == "diverged" and refused is not None:
        return status, _divergence(directory, config, refused, checkpoint_step)
    if status in ("diverged", "corrupted"):
        return status, ""
    if is_saved:
        return status, ""
    lost = "the last state could not be saved; the run can continue from step"
    return "not_saved", f"{lost} {checkpoint_step}"


def _divergence(
    directory: RunDirectory,
    config: PretrainConfig,
    refused: tuple[int, int],
    checkpoint_step: int | None,
) -> str:
    """Return the message about a diverged run."""
    first, last = refused
    resume = command_line("pretrain", "resume", directory.path)
    rate = config.optimizer.learning_rate
    training = config.training
    start = "from the start" if checkpoint_step is None else f"from step {checkpoint_step}"
    ways = []
    warmup = max(2 * config.schedule.warmup_steps, training.steps // 10)
    if config.schedule.warmup_steps < warmup < training.steps // 2:
        ways.append(f"--schedule.warmup_steps {warmup}")
    if training.clip is None or training.clip > 0.5:
        ways.append("--training.clip 0.5")
    hints = [f"or give {' or '.join(ways)}"] if ways else []
    if config.rl is None:  # batches of answers are not kept
        hints.append(
            f"the refused batches: {command_line('replay', directory.path, '--step', first)}"
        )
    more = "\n" + "; ".join(hints) if hints else ""
    return (
        f"diverged: steps {first} to {last} were refused"
        f" (training.guard.max_skipped={training.step_guard.max_skipped} in a row);"
        f" lower the learning rate ({rate:g}): {resume} --optimizer.learning_rate {rate / 3:.2g}"
        f" goes on {start}{more}"
    )
