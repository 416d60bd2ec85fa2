# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model; the same command continues.

    python -m experiments.pretrain [recipe] [--dotted.field value ...]

On a terminal the progress is a live view, elsewhere a line (`--tracking.console`). A trace of some
steps is `--profile.steps 10:13`; further trackers are `--tracking.trackers tensorboard wandb`.
A finished run started again says so. Exit codes: 0 done, 2 bad configuration, 3 diverged, 74 the
last state could not be saved, 75 saved after SIGTERM, 76 a device holds other bits than its
replicas, 130 saved after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments import aftermath, cli
from experiments.assembly import (
    Assembly,
    assemble,
    devices_in_words,
    entropy_floor,
    mesh_in_words,
    rates_in_words,
    sequence_form,
)
from experiments.config import FIXED_FIELDS, FREE_FIELDS, PretrainConfig
from experiments.finished import check_trains
from experiments.output import say
from experiments.process import start_process
from experiments.recipes import DEFAULT, RECIPES
from experiments.reporting import Reporter, check_packages
from experiments.run_directory import RunDirectory
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.configs import to_json
from jaxmoe.data import check_position
from jaxmoe.models.flops import flops_per_token
from jaxmoe.routing.composition import advice, causal_advice
from jaxmoe.tracking.console import format_count, format_flops
from jaxmoe.training.batch_ramp import accumulation_of
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.hooks import (
    CheckpointHook,
    EvaluateHook,
    Hook,
    RefreshHook,
    ReplicaHook,
    Trace,
)
from jaxmoe.training.loop import LoopResult, run_loop
from jaxmoe.training.masked_diffusion import MaskedDiffusionConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from jaxmoe.training.stop import StopRequest

_EXIT_CODES = {
    "done": cli.ExitCode.DONE,
    "diverged": cli.ExitCode.DIVERGED,
    "corrupted": cli.ExitCode.CORRUPTED,
    "preempted": cli.ExitCode.PREEMPTED,
    "interrupted": cli.ExitCode.INTERRUPTED,
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog, about = "python -m experiments.pretrain", __doc__ or ""
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, about)
    with cli.exit_on_bad_configuration():
        check_packages(config.tracking)
        start_process()
    name = config.run.name or recipe
    directory = RunDirectory(config.run.directory or f"runs/pretrain/{name}")
    with StopRequest() as stop, contextlib.ExitStack() as held:
        with cli.exit_on_bad_configuration():
            check_trains(directory, config)
            assembly = assemble(config)
            if jax.process_index() == 0:  # for all of them
                directory.acquire()
                held.callback(directory.release)
                directory.check_config(config, free=FREE_FIELDS, fixed=FIXED_FIELDS)
            checkpoints = CheckpointManager(
                directory.checkpoints_directory,
                keep=config.checkpoint.keep,
                verify=config.checkpoint.verify,
            )
            held.callback(checkpoints.close)
            first_step, state = _restore_or_start(assembly, checkpoints)
            if jax.process_index() == 0:
                directory.write_environment(devices_in_words(assembly.mesh))
        if first_step >= config.training.steps:
            say(_already_done(directory, first_step, config))
            return int(cli.ExitCode.DONE)
        _print_header(name, directory, assembly, first_step)
        return _train(name, directory, assembly, checkpoints, first_step, state, stop)


def _restore_or_start(assembly: Assembly, checkpoints: CheckpointManager) -> tuple[int, TrainState]:
    """The newest checkpoint that is whole, checked against the data, or a new state."""
    state = assembly.new_state()
    found = checkpoints.restore_newest(
        state,
        check=lambda manifest: check_position(
            manifest.data, assembly.loader.position(manifest.step)
        ),
        is_strict=assembly.plan.config.checkpoint.on_damage == "stop",
    )
    return (0, state) if found is None else found


def _train(
    name: str,
    directory: RunDirectory,
    assembly: Assembly,
    checkpoints: CheckpointManager,
    first_step: int,
    state: TrainState,
    stop: StopRequest,
) -> int:
    """Compiles, trains, and leaves the run's files behind."""
    started = time.perf_counter()
    with jax.set_mesh(assembly.mesh):
        with cli.exit_on_bad_configuration():
            reporter = Reporter(name, directory, assembly, first_step)
        with contextlib.closing(reporter):
            compiling = time.perf_counter()
            compiled = _compile(assembly, first_step, state)
            compile_seconds = time.perf_counter() - compiling
            say(f"compiled in {compile_seconds:.1f} s")
            saving = _saving(assembly, checkpoints, reporter)
            trace = _trace(directory, assembly.plan.config, first_step)
            result = _loop(assembly, reporter, compiled, first_step, state, saving, trace, stop)
        if result.status in ("preempted", "interrupted"):
            say(f"{result.status}: saving step {result.step} (a second signal ends at once)")
        is_saved = _save_last(result, saving, checkpoints)
    facts = {
        "status": result.status,
        "steps": result.step,
        "compile_seconds": compile_seconds,
        "wall_seconds": time.perf_counter() - started,
        "checkpoint_step": checkpoints.latest_step(),
        "profile": str(trace.directory) if trace is not None and trace.is_written else None,
    }
    aftermath.leave(name, directory, assembly, reporter, result, facts)
    if result.status not in ("diverged", "corrupted") and not is_saved:
        print(
            "error: the last state could not be saved; the run can continue from"
            f" step {facts['checkpoint_step']}",
            file=sys.stderr,
        )
        return int(cli.ExitCode.NOT_SAVED)
    return int(_EXIT_CODES[result.status])


def _compile(assembly: Assembly, first_step: int, state: TrainState) -> Any:
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
        )
        batch = assembly.batch(max(first, first_step))
        programs[rows] = step_function.lower(state, batch).compile()
    return lambda state, batch: programs[batch.tokens.shape[0]](state, batch)


def _saving(
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
    )


def _loop(
    assembly: Assembly,
    reporter: Reporter,
    compiled: Any,
    first_step: int,
    state: TrainState,
    saving: CheckpointHook,
    trace: Trace | None,
    stop: StopRequest,
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
    hooks: list[Hook] = [evaluation, saving]
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
        return run_loop(
            state,
            compiled,
            batches,
            first_step=first_step,
            last_step=last_step,
            hooks=hooks,
            report=reporter.trained,
            report_every=config.tracking.print_every,
            max_skipped=config.training.max_skipped,
            stop=stop,
        )


def _trace(directory: RunDirectory, config: PretrainConfig, first_step: int) -> Trace | None:
    """The trace that was asked for, on the first process; a resumed run may be past it."""
    if config.profile.range is None or jax.process_index() != 0:
        return None
    first, last = config.profile.range
    if first <= first_step:
        say(f"no trace: step {first_step} is done, and profile.steps={config.profile.steps}")
        return None
    return Trace(directory.profile_directory, first, last)


def _save_last(result: LoopResult, saving: CheckpointHook, checkpoints: CheckpointManager) -> bool:
    """Saves the state that the loop ended with, if it is a good one; whether it is on disk."""
    if result.status in ("diverged", "corrupted"):
        return checkpoints.finish()
    for _ in range(2):
        if not checkpoints.finish() or saving.saved_step != result.step:
            saving.run(result.step, result.state)
    return checkpoints.finish() and checkpoints.latest_step() == result.step


def _print_header(name: str, directory: RunDirectory, assembly: Assembly, first_step: int) -> None:
    """What is about to run, before the first step."""
    plan, training = assembly.plan, assembly.plan.config.training
    model, moe = plan.model, plan.model.moe
    active = plan.table.active(moe.top_k, moe.num_experts) if moe else plan.table.total
    experts = f"{moe.num_experts} experts, top-{moe.top_k}" if moe else "dense"
    flops = flops_per_token(model, plan.table, training.sequence_length)
    tokens = training.batch_size * training.sequence_length
    resumed = f"continuing after step {first_step}" if first_step else "new run"
    lines = (
        f"jaxmoe pretrain  {name}  {directory.path}  ({resumed})",
        f"devices  {_mesh_text(assembly)}",
        f"model    {model.num_layers} layers, width {model.embed_dim}, {experts};"
        f" {format_count(plan.table.total)} parameters, {format_count(active)} active",
        f"data     {_data_text(assembly)}",
        f"plan     {training.steps} steps of {tokens} tokens,"
        f" {format_flops(flops * tokens)} a step",
    )
    say("\n".join(lines))
    if assembly.execution.mesh.seq > 1:
        say(f"seq      {sequence_form(assembly)}")
    if rates := rates_in_words(plan):
        say(f"rates    {rates}; lr= below is that of the hidden matrices")
    if training.batch_ramp is not None:
        sizes = training.batch_sizes
        small = ", ".join(map(str, sizes.sizes[:-1]))
        say(f"ramp     batches of {small} sequences before step {sizes.stages[-1][0] + 1}")
    notes = advice(moe) if moe else []
    if moe and model.attention.is_causal:
        notes += causal_advice(moe)
    for text in notes:
        say(f"note     {text}")


def _data_text(assembly: Assembly) -> str:
    """The data, with the floor of masked diffusion where that is another than the next token's."""
    training, floor = assembly.plan.config.training, entropy_floor(assembly)
    text = assembly.source.describe(training.sequence_length)
    if floor is None or not isinstance(training.objective, MaskedDiffusionConfig):
        return text
    return f"{text}; {floor:.4f} where no token is given"


def _mesh_text(assembly: Assembly) -> str:
    mesh = mesh_in_words(assembly.mesh)
    platform = assembly.mesh.devices.flat[0].platform
    return f"{assembly.mesh.size} x {platform}, mesh " + " ".join(
        f"{a}={n}" for a, n in mesh.items()
    )


def _already_done(directory: RunDirectory, step: int, config: PretrainConfig) -> str:
    return (
        f"nothing to do: {directory.path} has done step {step} of {config.training.steps}."
        " See its report.html, or give another --run.name"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
