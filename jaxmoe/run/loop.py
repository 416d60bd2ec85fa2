# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run does around its steps: the compiled step, the hooks, the loop, the last save.

To add something that happens between steps: a hook (`jaxmoe/training/hooks.py`) and a line in
`train`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from jaxmoe.checkpoint import CheckpointManager, SavesFailedError
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.configs import to_json
from jaxmoe.messages import say
from jaxmoe.resilience.recompute import RecomputedStep
from jaxmoe.resilience.replica_hook import ReplicaHook
from jaxmoe.resilience.snapshot_hook import SnapshotHook
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.reporter import Reporter
from jaxmoe.training.batch_ramp import accumulation_of
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.hooks import (
    EvaluateHook,
    RefreshHook,
    Trace,
)
from jaxmoe.training.loop import LoopResult, run_loop
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from jaxmoe.training.stopwatch import CHECKPOINT, EVALUATE, LOOP
from sharding.distributed import agree


def compile_steps(assembly: Assembly, first_step: int, state: TrainState) -> Any:
    """The train step for the arrays that it will be given: one program for each size of batch."""
    plan, training = assembly.plan, assembly.plan.config.training
    programs = {}
    stages = training.batch_sizes.stages
    ends = [first for first, _ in stages[1:]] + [training.steps]
    for (first, rows), end in zip(stages, ends, strict=True):
        if end <= first_step:
            continue
        step_function = make_train_step(
            plan.model,
            plan.optimizer,
            execution=assembly.execution,
            accumulation=accumulation_of(rows, training.batch_size, training.accumulation),
            clip=training.clip,
            accumulated_balance=training.accumulated_balance,
            objective=training.objective,
            max_norm_ratio=training.max_norm_ratio,
            workers=assembly.execution.mesh.batch_shards,
        )
        batch = assembly.batch(max(first, first_step))
        programs[rows] = step_function.lower(state, batch).compile()
    return lambda state, batch: programs[batch.tokens.shape[0]](state, batch)


def make_saving(
    assembly: Assembly, checkpoints: CheckpointManager, reporter: Reporter
) -> CheckpointHook:
    """Saves in the loop, and once more after a loop that was stopped."""
    config = assembly.plan.config
    return CheckpointHook(
        checkpoints,
        # The model with its multipliers: a checkpoint says what it computes, wherever it goes.
        config=to_json(dataclasses.replace(config, model=assembly.plan.model)),
        position=assembly.loader.position,
        every=config.checkpoint.every,
        last_step=config.training.steps,
        before=reporter.flush,
        agree_every=config.tracking.print_every,
        max_failed=config.checkpoint.max_failed_saves,
    )


def train(
    assembly: Assembly,
    reporter: Reporter,
    compiled: Any,
    first_step: int,
    state: TrainState,
    saving: CheckpointHook,
    trace: Trace | None,
    stop: StopRequest,
    watches: Watches,
    snapshots: SnapshotHook | None = None,
) -> LoopResult:
    """The steps, with what happens around them."""
    config, last_step = assembly.plan.config, assembly.plan.config.training.steps
    evaluation = EvaluateHook(
        make_eval_step(
            assembly.plan.model,
            execution=assembly.execution,
            objective=config.training.objective,
        ),
        assembly.held_out,
        every=config.evaluation.every,
        last_step=last_step,
        report=reporter.evaluated,
    )
    hooks = [watches.timed(evaluation, EVALUATE), watches.timed(saving, CHECKPOINT)]
    if snapshots is not None:
        hooks.append(watches.timed(snapshots, CHECKPOINT))
    hooks = [*hooks, *watches.hooks()]
    if assembly.mesh.size > 1:
        hooks.insert(0, ReplicaHook(config.checkpoint.compare_replicas))
    if trace is not None:
        hooks = [trace.stop, *hooks, trace.start]
    if reporter.is_live:
        hooks.append(RefreshHook(first_step))
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(assembly.batches(first_step)))
        if trace is not None:
            stack.callback(trace.close)
            if trace.start.is_due(first_step):
                trace.start.run(first_step, state)
        reporter.start()
        stack.enter_context(watches.spent.on(LOOP))
        return run_loop(
            state,
            RecomputedStep(compiled, config.checkpoint.recompute, first_step),
            batches,
            first_step=first_step,
            last_step=last_step,
            hooks=hooks,
            report=watches.trained,
            report_every=config.tracking.print_every,
            max_skipped=config.training.max_skipped,
            stop=stop,
            stopwatch=watches.spent,
            beat=watches.watchdog.beat,
        )


def make_trace(directory: RunDirectory, config: PretrainConfig, first_step: int) -> Trace | None:
    """The trace that was asked for, on the first process; a resumed run may be past it."""
    if config.profile.range is None or jax.process_index() != 0:
        return None
    first, last = config.profile.range
    if first <= first_step:
        say(f"no trace: step {first_step} is done, and profile.steps={config.profile.steps}")
        return None
    return Trace(directory.profile_directory, first, last)


def save_last(result: LoopResult, saving: CheckpointHook, checkpoints: CheckpointManager) -> bool:
    """Saves the state that the loop ended with, if it is a good one; whether it is on disk.

    Raises:
        LeaseLostError: another process writes to the run's directory by now.
    """
    if result.status in ("diverged", "corrupted", "taken_over", "not_saved"):
        return checkpoints.finish() and result.status != "not_saved"
    for _ in range(2):
        if agree(not checkpoints.finish() or saving.saved_step != result.step):
            try:
                saving.run(result.step, result.state)
            except SavesFailedError:  # said already, save by save
                return False
    is_there = jax.process_index() != 0 or checkpoints.latest_step() == result.step
    return not agree(not (checkpoints.finish() and is_there))
