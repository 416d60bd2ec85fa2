# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the hooks of a run: evaluation, checkpoints, those of its parts, traces, comparisons.

`save_last` saves the state that the loop ended with.

To add a hook: a class in `jaxmoe/training/hooks.py` and a line in `make_hooks` here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxmoe.checkpoint import CheckpointManager, SavesFailedError
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.configs import to_json
from jaxmoe.messages import say
from jaxmoe.resilience.hooks import ReplicaHook
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.supervision import Watches
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.hooks import EvaluateHook, Hook, RefreshHook, Trace
from jaxmoe.training.loop import Status
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import CHECKPOINT, EVALUATE
from sharding.distributed import agree


def make_hooks(
    assembly: Assembly,
    first_step: int,
    saving: CheckpointHook,
    trace: Trace | None,
    watches: Watches,
    parts: Sequence[RunPart],
) -> list[Hook]:
    """Return the hooks of the loop, in the order in which they run after a step.

    Args:
        assembly: Plan, devices and data of the run.
        first_step: Number of steps already done.
        saving: Hook that saves checkpoints.
        trace: Profile of some steps; None without one.
        watches: Comparisons of processes and workers, with the reporter and the clock of the run.
        parts: Parts of the run, whose hooks follow those that save.
    """
    config = assembly.plan.config
    evaluation = EvaluateHook(
        make_eval_step(
            assembly.plan.model,
            execution=assembly.execution,
            objective=config.training.objective,
        ),
        assembly.held_out,
        every=config.evaluation.every,
        last_step=config.training.steps,
        report=watches.reporter.log_evaluation,
    )
    hooks = [watches.time_hook(evaluation, EVALUATE), watches.time_hook(saving, CHECKPOINT)]
    hooks += [hook for part in parts for hook in part.hooks(assembly, watches)]
    hooks += watches.hooks()
    if assembly.mesh.size > 1:
        hooks.insert(0, ReplicaHook(config.checkpoint.safeguards.compare_replicas))
    if trace is not None:
        hooks = [trace.stop, *hooks, trace.start]
    if watches.reporter.is_live:
        hooks.append(RefreshHook(first_step))
    return hooks


def make_saving(
    assembly: Assembly, checkpoints: CheckpointManager, reporter: Reporter
) -> CheckpointHook:
    """Return the hook that saves checkpoints; its `save` is for a loop that was stopped.

    Args:
        assembly: Plan, devices and data of the run.
        checkpoints: Checkpoint manager of the run.
        reporter: Reporter whose files are flushed before every save.
    """
    config = assembly.plan.config
    return CheckpointHook(
        checkpoints,
        # With the forward multipliers in the model, a checkpoint can be used without the run.
        config=to_json(dataclasses.replace(config, model=assembly.plan.model)),
        position=assembly.loader.position,
        every=config.checkpoint.every,
        also=assembly.plan.kept_steps,
        last_step=config.training.steps,
        before=reporter.flush,
        agree_every=config.tracking.print_every,
        max_failed=config.checkpoint.safeguards.max_failed_saves,
        is_lazy=config.checkpoint.capture == "lazy",
    )


def save_last(
    status: Status,
    step: int,
    state: TrainState,
    saving: CheckpointHook,
    checkpoints: CheckpointManager,
) -> bool:
    """Save the state that the steps ended with, if it may be saved.

    Args:
        status: How they ended.
        step: Number of steps done.
        state: State after them; donated where a step has ended the run.
        saving: Hook that saves checkpoints.
        checkpoints: Checkpoint manager of the run.

    Returns:
        Whether the last state is on disk, or the newest one that a step has left; the same on all
        processes.

    Raises:
        LeaseLostError: Another process holds the run directory by now.
        ReplicasDifferError: Devices hold other bits than their replicas.
    """
    if status in ("diverged", "corrupted", "taken_over", "not_saved"):
        return checkpoints.finish() and status != "not_saved"
    if not has_arrays(state):
        return checkpoints.finish()
    for _ in range(2):
        if agree(not checkpoints.finish() or saving.saved_step != step):
            try:
                saving.save(step, state)
            except SavesFailedError:  # every failed save was logged
                return False
    is_there = jax.process_index() != 0 or checkpoints.latest_step() == step
    return not agree(not (checkpoints.finish() and is_there))


def has_arrays(state: TrainState) -> bool:
    """Return whether a state is there; a step that ended the run has donated it."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def make_trace(directory: RunDirectory, config: PretrainConfig, first_step: int) -> Trace | None:
    """Return the trace of `profile.steps`; None where there is none to write.

    Only the first process traces, and only a run that has not passed the first traced step.

    Args:
        directory: Run directory.
        config: Configuration of the run.
        first_step: Number of steps already done.
    """
    if config.profile is None or jax.process_index() != 0:
        return None
    first, last = config.profile.range
    if first <= first_step:
        say(f"no trace: step {first_step} is done, and profile.steps={config.profile.steps}")
        return None
    return Trace(directory.profile_directory, first, last)
