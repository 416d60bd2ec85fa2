# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a run as sums of blocks of any total size (BitStack), or cuts a run in blocks.

    jaxmoe checkpoint convert runs/pretrain/tiny \\
        --quantise bitstack --budget 1.9MB --bitstack.rank 4
    jaxmoe checkpoint convert runs/pretrain/tiny-bitstack \\
        --quantise bitstack --budget 1.2MB --to runs/pretrain/tiny-smaller

The second command measures nothing: the first blocks of a run in blocks are a run.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.checkpoint.block_order import split_into_blocks
from experiments.checkpoint.convert import BitStackConfig
from experiments.checkpoint.converted import write_converted
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.contrib.few_bits.bitstack import (
    block_bytes,
    expand,
    prefix,
    stacked_rows,
    stacked_shape,
)
from jaxmoe.models.quantize import stored_bytes
from jaxmoe.parameters import ParameterSpec, ParameterTable
from jaxmoe.precision import STACKED
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import saved_config
from jaxmoe.training.state import TrainState

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Return the bytes of a budget such as 1.9MB.

    Args:
        text: Number with a unit: B, kB, MB, GB, KiB, MiB or GiB; bytes without one.

    Raises:
        ValueError: It is none, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text.lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise ValueError(
            f"budget={text!r} is no size: give bytes above 0 with a unit, such as --budget 1.9MB"
            " (B, kB, MB, GB, KiB, MiB, GiB)"
        )
    return size


def stack_run(
    run: FinishedRunConfig, budget: str | None, options: BitStackConfig, target: pathlib.Path
) -> str:
    """Write a run whose matrices are sums of blocks, and return a report for the user.

    Args:
        run: Run to convert; one in blocks is cut.
        budget: Largest size of the stored parameters; all blocks when None.
        options: Blocks.
        target: Run directory to make.

    Raises:
        ValueError: The budget is no size or does not fit, or there are too few held-out data.
    """
    limit = None if budget is None else parse_bytes(budget)
    if saved_config(run.directory).execution.precision.weights == STACKED:
        return _cut(run, limit, options, target)
    assembly, state, step = load_run(run.directory, run.step, run.mesh, initial=run.initial)
    rows = stacked_rows(assembly.plan.table)
    floor = _floor(assembly)
    sizes = {
        (path, layer): block_bytes(stacked_shape(row), options.rank)
        for path, row in rows.items()
        for layer in range(stacked_shape(row)[0])
    }
    _check_budget(run.directory, limit, floor)
    count = options.blocks
    if limit is not None:  # blocks past the budget are not split off
        count = min(count, (limit - floor) // sum(sizes.values()) + 1)
    stacks, order = split_into_blocks(
        assembly, state, rows, count=count, rank=options.rank, batches=options.batches
    )
    num_blocks = _num_fitting([sizes[owner] for owner in order], floor, limit)
    params = assembly.plan.table.tree(lambda row: row)
    params = jax.tree.map(
        lambda row, value: prefix(stacks[row.path], num_blocks) if row.path in rows else value,
        params,
        jax.device_get(state.params),
    )
    config = assembly.plan.config
    summary = {
        "budget": limit,
        "blocks": num_blocks,
        "rank": options.rank,
        "calibration": {
            "batches": options.batches,
            "first_batch": config.evaluation.batches,
            "rows": options.batches * config.held_out_batch_size,
        },
    }
    said = _written(run, (assembly, state, step), params, target, summary)
    table = _table(assembly.plan.table, state.params, params)
    return (
        f"{table}\n\n{said}\n{num_blocks} blocks of {options.blocks * len(sizes)}, by measured loss"
    )


def _cut(
    run: FinishedRunConfig, limit: int | None, options: BitStackConfig, target: pathlib.Path
) -> str:
    """Write the first blocks of a run in blocks, and return a report.

    Raises:
        ValueError: There is no budget, or it is not below the size of the run, or too small.
    """
    source = f"run.directory={run.directory}"
    if options != BitStackConfig():
        raise ValueError(
            f"{source} is in blocks already, which --bitstack does not change: leave it out, or"
            " convert the run that it came from"
        )
    if limit is None:
        raise ValueError(f"{source} is in blocks already: give a smaller size with --budget")
    assembly, state, step = load_run(
        run.directory,
        run.step,
        run.mesh,
        needs_data=False,
        initial=run.initial,
        keeps_blocks=True,
    )
    table = assembly.plan.table
    host_params = jax.device_get(state.params)
    floor = _floor(assembly)
    _check_budget(run.directory, limit, floor)
    if (have := stored_bytes(host_params)) <= limit:
        raise ValueError(
            f"budget={limit} bytes is not below the {have} bytes of {source}: give less, or convert"
            " the run that it came from"
        )
    sizes: dict[int, int] = {}

    def read(_: ParameterSpec, stack: Any) -> None:
        if stack.blocks is not None:
            places = np.asarray(stack.blocks.places).tolist()
            sizes.update(dict.fromkeys(places, stored_bytes(stack.blocks) // len(places)))

    _in_blocks(table, host_params, read)
    num_blocks = _num_fitting([sizes[place] for place in sorted(sizes)], floor, limit)
    params = _in_blocks(table, host_params, lambda _, stack: prefix(stack, num_blocks))
    said = _written(
        run, (assembly, state, step), params, target, {"budget": limit, "blocks": num_blocks}
    )
    return f"{said}\n{num_blocks} blocks of {len(sizes)}, the first ones of {run.directory}"


def _written(
    run: FinishedRunConfig,
    loaded: tuple[Assembly, TrainState, int],
    params: Any,
    target: pathlib.Path,
    summary: dict[str, Any],
) -> str:
    """Write the run directory, and return its size in words."""
    assembly, state, step = loaded
    run_config = saved_config(run.directory)
    precision = dataclasses.replace(run_config.execution.precision, weights=STACKED)
    execution = dataclasses.replace(run_config.execution, precision=precision)
    before = stored_bytes(state.params)
    after = stored_bytes(params)
    # On the mesh of the other arrays, as a checkpoint requires.
    params = jax.device_put(params, NamedSharding(assembly.mesh, PartitionSpec()))
    uncut = {
        "status": "converted",
        "format": STACKED,
        "source": run.directory,
        "checkpoint_step": step,
        "parameters_total": assembly.plan.table.total,
        "parameter_bytes_before": before,
        "parameter_bytes": after,
        **summary,
    }
    state = dataclasses.replace(state, params=params, opt_state={})
    config = dataclasses.replace(run_config, execution=execution)
    write_converted(target, RunDirectory(run.directory), state, step, config, assembly, uncut)
    return (
        f"{STACKED}: parameters {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB in the checkpoint,"
        " which is loaded as floating weights\n"
        f"step {step} of {run.directory} is in {target}"
    )


def _in_blocks(
    table: ParameterTable, params: Any, function: Callable[[ParameterSpec, Any], Any]
) -> Any:
    """Return parameters with a function of those in blocks in their place."""
    rows = stacked_rows(table)
    return jax.tree.map(
        lambda row, value: function(row, value) if row.path in rows else value,
        table.tree(lambda row: row),
        params,
    )


def _floor(assembly: Assembly) -> int:
    """Return the bytes of a run without any block: floating parameters, and float32 scales."""
    table = assembly.plan.table
    dtype = assembly.execution.precision.parameter_dtype
    rows = stacked_rows(table)
    scales = sum(math.prod(stacked_shape(row)[:-1]) for row in rows.values())
    return 4 * scales + dtype.itemsize * sum(row.size for row in table if row.path not in rows)


def _check_budget(source: str, limit: int | None, floor: int) -> None:
    """Raise ValueError if a budget has no place for what is not in blocks."""
    if limit is not None and limit < floor:
        raise ValueError(
            f"budget={limit} bytes is below the {floor} bytes of run.directory={source} that are in"
            f" no block (embedding, head, routers, norms, scales): give at least {floor}"
        )


def _num_fitting(sizes: Sequence[int], floor: int, limit: int | None) -> int:
    """Return the number of first blocks that a budget has a place for."""
    if limit is None:
        return len(sizes)
    return int(np.searchsorted(np.cumsum(sizes), limit - floor, side="right"))


def _table(table: ParameterTable, model: Any, params: Any) -> str:
    """Return the blocks, sizes and errors of the matrices as text."""
    head = ("matrix", "shape", "blocks", "kB before", "kB after", "error")
    lines: list[tuple[str, ...]] = [head]
    values = dict[str, Any]()
    _in_blocks(table, model, lambda row, value: values.update({row.path: np.asarray(value)}))

    def add(row: ParameterSpec, stack: Any) -> None:
        matrix = values[row.path].astype(np.float32)
        residual = matrix - np.asarray(expand(row, stack, jnp.float32))
        error = float(np.linalg.norm(residual)) / (float(np.linalg.norm(matrix)) or 1.0)
        count = 0 if stack.blocks is None else stack.blocks.places.size
        sizes = (f"{stored_bytes(each) / 1e3:.1f}" for each in (values[row.path], stack))
        lines.append((row.path, "x".join(map(str, row.shape)), str(count), *sizes, f"{error:.1%}"))

    _in_blocks(table, params, add)
    return text_table(lines)
