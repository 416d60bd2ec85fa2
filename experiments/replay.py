# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What was wrong with a refused step: its batch once more through loss and gradient.

    python -m experiments.replay --run.directory runs/pretrain/tiny [--step 1234]

Takes the batch that the run dumped when it went back (bad_data/step1234.npz) and the parameters of
the newest checkpoint before that step, or the initial ones; an older checkpoint is --run.step.
Names the arrays of the gradient that are not finite, or the largest; and the rows by the loss and
gradient that each has alone, repeated to fill the batch. Nothing wrong here means that the state of
the step was, or the device: the parameters are those of the checkpoint, not of the step. Writes
bad_data/replay<step>/summary.json. On another number of devices: --run.mesh.data 1.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.data import Batch
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import assemble_run, load_run
from jaxmoe.run.refused_batches import DumpedBatch, dumped_steps, read_batch
from jaxmoe.state_tree import flatten
from jaxmoe.training.batch_ramp import accumulation_of
from jaxmoe.training.guard import norm_limit
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import batch_gradients
from sharding.distributed import batch_part, global_batch

_SHOWN = 8
"""Rows, and arrays, that are printed; summary.json has all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """What to look into."""

    run: FinishedRunConfig = FinishedRunConfig()
    """The run; `run.step` is that of the checkpoint, the newest before the refused step when
    None."""
    step: int | None = None
    """The refused step; the first of those that were refused last when None."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.replay"
    config = cli.parse_flags(ReplayConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    with cli.exit_on_bad_configuration():
        directory = RunDirectory(config.run.directory)
        dumped = _dumped(directory, config.step)
        assembly, state, step = _open(config, dumped.step)
    findings = {"refused_step": dumped.step, "checkpoint_step": step, "status": "done"}
    with jax.set_mesh(assembly.mesh):
        findings |= replay(assembly, state, dumped)
    if jax.process_index() == 0:
        name = directory.bad_data_directory / f"replay{dumped.step}"
        RunDirectory(name).write_summary(findings)
    say(in_words(findings))
    return int(cli.ExitCode.DONE)


def replay(assembly: Assembly, state: TrainState, dumped: DumpedBatch) -> dict[str, Any]:
    """Loss and gradient of a batch, of its rows and by array.

    Args:
        assembly: of the run.
        state: whose parameters are used.
        dumped: the batch.

    Returns:
        `loss`, `grad_norm`, `norm_limit`; `arrays` and `rows`, the most suspicious first.
    """
    limit = float(norm_limit(state.recent_norms, assembly.plan.config.training.max_norm_ratio))
    # What is random in a step follows from its number.
    number = jax.device_put(jnp.int32(dumped.step - 1), state.step.sharding)
    state = dataclasses.replace(state, opt_state=(), step=number)
    measure = _measured(assembly, dumped.batch.tokens.shape[0])

    def measured(batch: Batch) -> tuple[float, dict[str, tuple[float, int]]]:
        loss, arrays = jax.device_get(
            measure(state, global_batch(_own(batch, assembly.mesh), assembly.mesh))
        )
        return float(loss), {path: (float(n), int(bad)) for path, (n, bad) in arrays.items()}

    loss, arrays = measured(dumped.batch)
    rows = []
    for place, row in enumerate(dumped.rows.tolist()):
        alone, its_arrays = measured(_repeated(dumped.batch, place))
        rows.append({"row": row, "place": place, "loss": alone, **_total(its_arrays)})
    named = [
        {"array": path, "grad_norm": norm, "not_finite": bad}
        for path, (norm, bad) in arrays.items()
    ]
    return {
        "loss": loss,
        **_total(arrays),
        "norm_limit": limit,
        "arrays": sorted(named, key=_suspicion, reverse=True),
        "rows": sorted(rows, key=_suspicion, reverse=True),
    }


def in_words(findings: dict[str, Any]) -> str:
    """What is printed: the batch, its worst arrays, its worst rows."""
    limit = findings["norm_limit"]
    bound = f", of which {limit:.4g} is the bound" if math.isfinite(limit) else ""
    bad = findings["not_finite"]
    lines = [
        f"step {findings['refused_step']}, with the parameters of step"
        f" {findings['checkpoint_step']}: loss {findings['loss']:.4g}, gradient norm"
        f" {findings['grad_norm']:.4g}{bound};"
        f" {f'{bad} numbers of the gradient are' if bad else 'all of it is'}"
        f" {'not ' * bool(bad)}finite",
        "",
    ]
    arrays, rows = findings["arrays"], findings["rows"]
    table = [("array of the gradient", "norm", "not finite")]
    table += [(x["array"], f"{x['grad_norm']:.4g}", str(x["not_finite"])) for x in arrays[:_SHOWN]]
    lines += [text_table(table), ""]
    table = [("row alone", "place", "loss", "gradient norm", "not finite")]
    for x in rows[:_SHOWN]:
        numbers = (f"{x['loss']:.4g}", f"{x['grad_norm']:.4g}", str(x["not_finite"]))
        table.append((str(x["row"]), str(x["place"]), *numbers))
    lines.append(text_table(table))
    return "\n".join(lines)


def _dumped(directory: RunDirectory, step: int | None) -> DumpedBatch:
    """The batch that is meant: the first of the last steps that follow one another."""
    steps = dumped_steps(directory)
    if step is None and not steps:
        raise ValueError(
            f"run.directory={directory.path} has no {directory.bad_data_directory.name}: no step"
            " of it was refused so often that the run went back or ended"
        )
    if step is None:
        step = next(number for number in reversed(steps) if number - 1 not in steps)
    return read_batch(directory, step)


def _open(config: ReplayConfig, refused: int) -> tuple[Assembly, TrainState, int]:
    """The run with the state of the checkpoint that is meant, and its step."""
    run, step = config.run, config.run.step
    checkpoints = RunDirectory(run.directory).checkpoints_directory
    if step is None and checkpoints.is_dir():
        manager = CheckpointManager(checkpoints, is_writer=False)
        before = (number for number in manager.shared_steps() if number < refused)
        step = max(before, default=None)
        manager.close()
    if step is not None:
        return load_run(run.directory, step, run.mesh)
    assembly = assemble_run(run.directory, run.mesh)
    return assembly, assembly.new_state(), 0


def _measured(assembly: Assembly, num_rows: int) -> Callable[[TrainState, Batch], Any]:
    """Compiled: the loss, and of each array of the gradient its norm and how much is not finite."""
    training = assembly.plan.config.training

    def measure(state: TrainState, batch: Batch) -> Any:
        _, summed, _ = batch_gradients(
            state,
            batch,
            model=assembly.plan.model,
            execution=assembly.execution,
            objective=training.objective,
            accumulation=accumulation_of(num_rows, training.batch_size, training.accumulation),
            accumulated_balance=training.accumulated_balance,
            table=assembly.plan.table,
        )
        return summed.loss, {
            path: (jnp.linalg.norm(g.astype(jnp.float32)), jnp.sum(~jnp.isfinite(g)))
            for path, g in flatten(summed.grads).items()
        }

    return jax.jit(measure)


def _repeated(batch: Batch, place: int) -> Batch:
    """One row in all places, so that no other row can spoil its numbers."""
    return jax.tree.map(lambda array: np.repeat(array[place][None], len(array), 0), batch)


def _own(batch: Batch, mesh: Mesh) -> Batch:
    """The part of a batch that this process gives to the devices."""
    index, count = batch_part(mesh)
    return jax.tree.map(lambda array: np.split(array, count)[index], batch)


def _total(arrays: dict[str, tuple[float, int]]) -> dict[str, Any]:
    return {
        "grad_norm": math.hypot(*(norm for norm, _ in arrays.values())),
        "not_finite": sum(bad for _, bad in arrays.values()),
    }


def _suspicion(found: dict[str, Any]) -> tuple[float, ...]:
    """Higher for what is not finite, then for the larger loss and gradient."""
    numbers = [found.get("loss", 0.0), found["grad_norm"]]
    finite = [x if math.isfinite(x) else math.inf for x in numbers]
    return (float(found["not_finite"] > 0 or not all(map(math.isfinite, numbers))), *finite)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
