# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the activations of every quantised product on held-out data, for w4ax and bitstack.

The batches are the first ones that evaluation does not read, always the same, so that the held-out
loss of the converted run is not that of its calibration. The forward pass runs on one device in the
compute dtype of the run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.data import Batch, Loader
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.quantize import channels_shape
from jaxmoe.parameters import ParameterTable
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.plan import RunPlan
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import TrainState
from sharding.products.activations import ObservedArray, Statistic


def measure_activations(
    assembly: Assembly,
    state: TrainState,
    batches: int,
    *,
    statistic: Statistic = "largest",
    field: str = "mixed.batches",
) -> dict[str, Any]:
    """Return the largest |activation| of each input, or another statistic, by path of the matrix.

    Args:
        assembly: Model and data of the run.
        state: Floating parameters and router state.
        batches: Number of held-out batches.
        statistic: What is measured.
        field: Name of the option with the number of batches, for messages.

    Returns:
        Arrays of `jaxmoe.models.quantize.channels_shape`. An expert that was chosen for no token
        has the largest measurement of the other experts of its layer.

    Raises:
        ValueError: There are fewer held-out batches, or an activation is not finite.
    """
    plan = assembly.plan
    held_out = calibration_batches(assembly, batches, field)
    params, router_state = jax.device_get((state.params, state.router_state))
    step = jax.jit(jax.grad(partial(_loss, plan, statistic), argnums=0), static_argnums=4)
    largest_by_path: dict[str, Any] = {}
    combine = np.add if statistic == "squares" else np.maximum
    for batch in held_out:
        for index in range(plan.config.training.objective.num_examined):
            measured = step(_zeros(plan.table), params, router_state, batch, index)
            for path, largest in jax.device_get(measured).items():
                largest_by_path[path] = combine(largest_by_path.get(path, 0.0), largest)
    for path, largest in largest_by_path.items():
        if not np.isfinite(largest).all():
            raise ValueError(
                f"the activations of {path} are not finite on held-out data: choose an earlier"
                " checkpoint with --run.step"
            )
    return {path: _fill(largest) for path, largest in largest_by_path.items()}


def _check_held_out(assembly: Assembly, batches: int, field: str) -> None:
    """Raise if evaluation leaves too few held-out batches for a measurement.

    Args:
        assembly: Data of the run.
        batches: Number of batches.
        field: Name of the option, for messages.

    Raises:
        ValueError: There are fewer.
    """
    config = assembly.plan.config
    have = _validation(assembly).num_batches
    read = config.evaluation.batches
    if have is None or have >= read + batches:
        return
    num_left = max(have - read, 0)
    measured = "outliers" if field == "mixed.batches" else "activations"
    way_out = (
        f"ask for at most {num_left} with --{field}"
        if num_left
        else "convert to w4a8, which needs no data, or train with fewer --evaluation.batches"
    )
    raise ValueError(
        f"{field}={batches}: {measured} are measured on held-out batches that evaluation does"
        f" not read, and the validation split holds {have} batches, of which evaluation reads the"
        f" first {read}: {way_out}"
    )


def calibration_batches(assembly: Assembly, batches: int, field: str) -> list[Batch]:
    """Return the held-out batches after those of evaluation.

    Args:
        assembly: Data of the run.
        batches: Number of batches.
        field: Name of the option with this number, for messages.

    Raises:
        ValueError: There are fewer.
    """
    _check_held_out(assembly, batches, field)
    first = assembly.plan.config.evaluation.batches
    loader = _validation(assembly)
    return [loader.batch(step) for step in range(first, first + batches)]


def _validation(assembly: Assembly) -> Loader:
    config = assembly.plan.config
    return Loader(
        assembly.source,
        batch_size=config.held_out_batch_size,
        sequence_length=config.training.sequence_length,
        seed=0,
        split="validation",
    )


def _zeros(table: ParameterTable) -> dict[str, Array]:
    """Return what is differentiated, by path."""
    shapes = ((row.path, channels_shape(row)) for row in table)
    return {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes if shape is not None}


def _loss(
    plan: RunPlan,
    statistic: Statistic,
    largest: dict[str, Array],
    params: Any,
    router_state: Any,
    batch: Batch,
    index: int,
) -> Array:
    """Return the held-out loss, whose gradient by `largest` is the measurement."""

    def observe(row: Any, value: Array) -> Any:
        limit = largest.get(row.path)
        if limit is None:
            return value
        return ObservedArray(values=value, largest=limit, statistic=statistic)

    config = plan.config
    precision = PrecisionPolicy(compute=config.execution.precision.compute)
    execution = ExecutionConfig(precision=precision)
    objective = config.training.objective
    prepared = objective.examine(plan.model, batch, jnp.int32(index), execution.placement)
    nll, _ = forward_and_nll(
        plan.model,
        execution,
        jax.tree.map(observe, plan.table.tree(lambda row: row), params),
        prepared,
        objective=objective,
        router_state=router_state,
    )
    return nll


def _fill(largest: np.ndarray) -> np.ndarray:
    """Return a measurement in which an expert without rows takes over those of the others."""
    if largest.ndim < 2:
        return largest
    is_empty = largest.max(axis=-1, keepdims=True) == 0.0
    return np.where(is_empty, largest.max(axis=-2, keepdims=True), largest)
