# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
r"""Places the experts of a trained run on devices, from a trace of its routing.

    jaxmoe place --run.directory runs/pretrain/tiny --devices 4
    jaxmoe place --trace runs/routers/short/traces/mixtral.npz --devices 4
    jaxmoe place --run.directory runs/pretrain/tiny --devices 4 \
        --into runs/pretrain/placed --tables runs/pretrain/tables.npz placer:expert_grouping

The first two print measures of each placement, fitted on the first half of the trace and measured
on the second. The third writes a copy of the run with its experts, router and optimiser state in
the order of the chosen placement; `jaxmoe pretrain` with the run's recipe and flags
continues it there. On a mesh with that many devices on the axis `expert`, each device holds the
experts that the placement gives it; the model computes the same function. `--tables` writes the
tables by which a step predicts the device of each token's experts, those of the placed run with
`--into`, else of the run as it is. A run that starts there moves each token to that device first
(`jaxmoe/contrib/token_routes/token_shuffle.py`), on as many devices; here on 4:

    jaxmoe pretrain tiny --run.directory runs/pretrain/moved \
        --checkpoint.initial.path runs/pretrain/placed \
        --execution.mesh.data 1 --execution.mesh.expert 4 execution.dispatcher:all_to_all \
        --execution.dispatcher.token_tables runs/pretrain/tables.npz

    crossings  pairs of experts of one token in adjacent layers on different devices
    pair       busiest pair of devices over the mean pair (1 is even)
    load       busiest device of a layer over the mean device, mean over layers (1 is even)
    local      assignments with the expert on the device of the speculatively shuffled token
    gap        largest relative distance of the solver's cost from the optimum
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.new_path import check_new_path
from experiments.cli.output import say, warn
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.contrib.placement import PLACERS, ExFlowConfig, Placer, Solution
from jaxmoe.contrib.placement.measures import (
    crossings,
    device_loads,
    flows,
    homes,
    local_share,
    pair_traffic,
)
from jaxmoe.contrib.placement.relocate import relocate
from jaxmoe.contrib.token_routes.token_shuffle import predict, shuffle
from jaxmoe.contrib.token_routes.token_tables import save_tables
from jaxmoe.contrib.token_routes.traced_tables import token_tables
from jaxmoe.routing.telemetry.trace import RoutingTrace, load_trace
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.measures import record_run
from jaxmoe.run.provenance.saved import copy_tokenizer
from jaxmoe.training.state import TrainState
from sharding.expert_parallel.placement import ExpertPlacement

HEADINGS = ("placement", "crossings", "pair", "load", "local", "seconds", "gap", "found by")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlaceConfig:
    """Config of `place`."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Run with the experts."""
    trace: str | None = None
    """Recorded trace, in place of a run."""
    devices: int = 4
    """Devices that share the experts of a layer."""
    placer: Placer = ExFlowConfig()
    """Placement for `into`; the table has all of them."""
    into: str | None = None
    """New run directory for the run with its experts placed; None writes nothing."""
    tables: str | None = None
    """New file for the token tables (`execution.dispatcher.token_tables`): of the placed run with
    `into`, else of the run as it is; None writes none."""

    def __post_init__(self):
        if self.devices < 1:
            raise ValueError(f"devices={self.devices} must be at least 1")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe place"
    config = cli.parse_flags(PlaceConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
        if config.into is not None and config.trace is not None:
            raise ValueError(
                "into rewrites the run of run.directory, and a trace alone has no run: leave trace"
                " out"
            )
        if config.tables is not None and config.trace is not None:
            raise ValueError(
                "tables need the vocabulary of run.directory, and a trace alone has no run: leave"
                " trace out"
            )
        if config.into is not None:
            check_new_path("into", config.into, "directory")
        if config.tables is not None:
            check_new_path("tables", config.tables, "file")
        run = None
        if config.trace is None:
            run_config = config.run
            run = load_run(
                run_config.directory, run_config.step, run_config.mesh, initial=run_config.initial
            )
            trace = record_run(*run[:2])
        else:
            trace = load_trace(config.trace)
        say(text_table(compare(trace, config.devices)))
        if run is not None:
            _write_files(config, trace, *run)
    return int(cli.ExitCode.DONE)


def _write_files(
    config: PlaceConfig, trace: RoutingTrace, assembly: Assembly, state: TrainState, step: int
) -> None:
    """Write the placed run and the token tables, if their paths are given."""
    placement = ExpertPlacement.identity(trace.num_layers, trace.num_experts, config.devices)
    if config.into is not None:
        placement = config.placer.solve(trace, config.devices).placement
        source = RunDirectory(config.run.directory)
        _write(config.into, source, assembly, state, step, placement)
        say(f"{config.into}: step {step} with its experts placed by {config.placer.name}")
    if config.tables is not None:
        tables = token_tables(trace, placement, vocab_size=assembly.plan.model.vocab_size)
        file = pathlib.Path(config.tables).expanduser()
        try:
            save_tables(file, tables, trace.num_experts)
        except OSError as error:
            reason = error.strerror or error
            warn(f"error: tables={config.tables} cannot be written: {reason}")
            raise SystemExit(int(cli.ExitCode.NOT_SAVED)) from error
        counted = f"{trace.num_tokens} tokens for {config.devices} devices"
        say(f"{config.tables}: token tables of {counted}")


def compare(trace: RoutingTrace, num_devices: int) -> list[tuple[str, ...]]:
    """Return headings, then a row for identity, a random placement and each solver.

    Args:
        trace: Trace; placements are fitted on its first half and measured on the second.
        num_devices: P.

    Raises:
        ValueError: P does not divide the experts, or the trace is too short.
    """
    half = trace.num_tokens // 2 // num_devices * num_devices
    if not half:
        raise ValueError(
            f"the trace has {trace.num_tokens} tokens, too few for two halves on {num_devices}"
            " devices: record more"
        )
    seen = trace.part(0, half)
    unseen = trace.part(half, 2 * half)
    identity = ExpertPlacement.identity(trace.num_layers, trace.num_experts, num_devices)
    mixed = np.random.default_rng(0).permuted(identity.device_of, axis=1)
    rows = [
        ("identity", *_measure(seen, unseen, identity), "", "", ""),
        ("random", *_measure(seen, unseen, ExpertPlacement(mixed, num_devices)), "", "", ""),
    ]
    for name, placer in PLACERS.items():
        started = time.perf_counter()
        solution: Solution = placer().solve(seen, num_devices)
        seconds = time.perf_counter() - started
        gap = "" if solution.gap is None else f"{solution.gap:.3f}"
        facts = (f"{seconds:.2f}", gap, solution.found_by)
        rows.append((name, *_measure(seen, unseen, solution.placement), *facts))
    return [HEADINGS, *rows]


def speculative_devices(
    seen: RoutingTrace, unseen: RoutingTrace, placement: ExpertPlacement
) -> np.ndarray:
    """Return the device of each token [L T] after shuffling by the tables of another trace.

    Args:
        seen: Trace from which the tables are made.
        unseen: Trace with the tokens to shuffle at once; P divides their number.
        placement: Placement of the experts.
    """
    vocab_size = max(seen.vocab_size, unseen.vocab_size)
    tables = token_tables(seen, placement, vocab_size=vocab_size)
    ids = jnp.asarray(unseen.token_ids, jnp.int32)
    expert_homes = jnp.asarray(homes(unseen, placement), jnp.int32)
    devices = []
    below = jnp.full_like(ids, -1)
    for layer in range(unseen.num_layers):
        guess = predict(jax.tree.map(lambda table, i=layer: table[i], tables), ids, below)
        _, place = shuffle(*guess, placement.num_devices)
        devices.append(np.asarray(place) // (len(ids) // placement.num_devices))
        below = expert_homes[layer]
    return np.stack(devices)


def _measure(
    seen: RoutingTrace, unseen: RoutingTrace, placement: ExpertPlacement
) -> tuple[str, ...]:
    devices = placement.device_of
    number = placement.num_devices
    affinity = unseen.affinity()
    loads = device_loads(unseen.loads(), placement.device_of, number)
    share = crossings(affinity, devices) / max(int(affinity.sum()), 1)
    traffic = pair_traffic(flows(affinity, devices, number))
    pairs = number * (number - 1) / 2
    crowding = traffic.max() * pairs / max(traffic.sum(), 1.0)
    local = local_share(unseen, placement, speculative_devices(seen, unseen, placement))
    load = (loads.max(1) / loads.mean(1)).mean()
    return (f"{share:.1%}", f"{crowding:.2f}", f"{load:.3f}", f"{local:.1%}")


def _write(
    into: str,
    source: RunDirectory,
    assembly: Assembly,
    state: TrainState,
    step: int,
    placement: ExpertPlacement,
) -> None:
    """Write a run directory with the config of the run and one checkpoint."""
    config = assembly.plan.config
    placed = relocate(assembly.plan.model, state, placement)
    directory = RunDirectory(into)
    with directory.held():
        directory.check_config(config)
        copy_tokenizer(source, directory)
        save_checkpoint(
            directory.checkpoints_directory,
            placed,
            step=step,
            config=dataclasses.replace(config, model=assembly.plan.model),
            data=assembly.loader.position(step),
        )
        np.savez(
            directory.path / "placement.npz",
            device_of=placement.device_of,
            num_devices=placement.num_devices,
        )


if __name__ == "__main__":
    run_command(main)
