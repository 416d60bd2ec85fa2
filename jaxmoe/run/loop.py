# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the training loop of a run with its hooks, and saves its last state."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint import CheckpointManager, SavesFailedError
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.resilience.hooks import SnapshotHook
from jaxmoe.resilience.recompute import RecomputedStep
from jaxmoe.rl.queue import AnswerQueue
from jaxmoe.rl.steps import RolloutStep
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.hooks import make_hooks
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.results import TrainedStep
from jaxmoe.run.serving.rollouts import open_rollouts, reference_model
from jaxmoe.training.hooks import Trace
from jaxmoe.training.loop import LoopResult, Stop, run_loop
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import LOOP
from sharding.distributed import agree

Result = TypeVar("Result")
Steps = Generator[TrainedStep, bool | None, Result]
"""Generator of trained steps; a true value sent to it stops the run."""


def run_steps(
    assembly: Assembly,
    compiled: CompiledStep,
    first_step: int,
    state: TrainState,
    saving: CheckpointHook,
    trace: Trace | None,
    stop: Stop,
    watches: Watches,
    snapshots: SnapshotHook | None = None,
) -> Steps[LoopResult]:
    """Train from one step to the last, with evaluation, checkpoints and reports between steps.

    Args:
        assembly: Plan, devices and data of the run.
        compiled: Train step from `compile_steps`.
        first_step: Number of steps already done.
        state: State after these steps; donated.
        saving: Hook that saves checkpoints.
        trace: Profile of some steps; None without one.
        stop: Request to end the loop, read after every step.
        watches: Comparisons of processes and workers, and the clock of the run.
        snapshots: Hook that keeps snapshots in memory; None without one.

    Yields:
        Each step, after its hooks have run. A true value sent in stops the loop.

    Returns:
        How the loop ended.
    """
    config = assembly.plan.config
    hooks = make_hooks(assembly, first_step, saving, trace, watches, snapshots)
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(assembly.batches(first_step)))
        if trace is not None:
            stack.callback(trace.close)
            if trace.start.is_due(first_step):
                trace.start.run(first_step, state)
        step_function: CompiledStep = RecomputedStep(
            compiled, config.checkpoint.recompute, first_step
        )
        if assembly.learner is not None:
            rollouts = stack.enter_context(contextlib.closing(open_rollouts(assembly)))
            step_function = RolloutStep(
                step_function,
                assembly.learner,
                rollouts,
                queue=AnswerQueue(
                    staleness=assembly.learner.config.staleness,
                    every=config.checkpoint.every,
                    last_step=config.training.steps,
                ),
                reference=reference_model(assembly),
                report=watches.reporter.watched,
            )
        watches.reporter.start()
        stack.enter_context(watches.spent.on(LOOP))
        steps = run_loop(
            state,
            step_function,
            batches,
            first_step=first_step,
            last_step=config.training.steps,
            hooks=hooks,
            report=watches.trained,
            report_every=config.tracking.print_every,
            max_skipped=config.training.max_skipped,
            publish=assembly.publish,
            stop=stop,
            stopwatch=watches.spent,
            beat=watches.watchdog.beat,
        )
        del state  # donated: the loop holds the only reference
        is_left: bool | None = None
        while True:
            try:
                step, metrics = steps.send(is_left)
            except StopIteration as end:
                return end.value
            is_left = yield TrainedStep(step=step, metrics=metrics)


def has_state(result: LoopResult) -> bool:
    """Return whether the last state is there; a step that ended the run has donated it.

    Args:
        result: End of the loop.
    """
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(result.state))


def save_last(result: LoopResult, saving: CheckpointHook, checkpoints: CheckpointManager) -> bool:
    """Save the state that the loop ended with, if it may be saved.

    Args:
        result: End of the loop.
        saving: Hook that saves checkpoints.
        checkpoints: Checkpoint manager of the run.

    Returns:
        Whether the last state is on disk, or the newest one that a step has left; the same on all
        processes.

    Raises:
        LeaseLostError: Another process holds the run directory by now.
        ReplicasDifferError: Devices hold other bits than their replicas.
    """
    if result.status in ("diverged", "corrupted", "taken_over", "not_saved"):
        return checkpoints.finish() and result.status != "not_saved"
    if not has_state(result):
        return checkpoints.finish()
    for _ in range(2):
        if agree(not checkpoints.finish() or saving.saved_step != result.step):
            try:
                saving.save(result.step, result.state)
            except SavesFailedError:  # every failed save was logged
                return False
    is_there = jax.process_index() != 0 or checkpoints.latest_step() == result.step
    return not agree(not (checkpoints.finish() and is_there))


def in_mesh(mesh: Mesh, steps: Steps[Result]) -> Steps[Result]:
    """Run a generator with `mesh` current, and the caller's mesh whenever it is suspended.

    Args:
        mesh: Mesh of the steps.
        steps: Generator to run.
    """
    sent: bool | None = None
    with contextlib.closing(steps):
        while True:
            with jax.set_mesh(mesh):
                try:
                    step = steps.send(sent)
                except StopIteration as end:
                    return end.value
            sent = yield step
