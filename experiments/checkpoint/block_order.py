# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Splits the matrices of a run into blocks, and sorts them by the loss of the model with each.

Activations, for the scales of the inputs, and losses are measured on the same held-out batches,
which evaluation does not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from experiments.cli.output import announce
from jaxmoe.contrib.few_bits.bitstack import (
    BitStack,
    Blocks,
    add_block,
    decompose,
    scales_of,
    sort_blocks,
    stacked_shape,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterSpec
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.calibrate import calibration_batches, measure_activations
from jaxmoe.training.evaluate import evaluate, make_eval_step
from jaxmoe.training.state import TrainState

Owner = tuple[str, int]
"""Path and layer of a block."""
_FIELD = "bitstack.batches"


def split_into_blocks(
    assembly: Assembly,
    state: TrainState,
    rows: dict[str, ParameterSpec],
    *,
    count: int,
    rank: int,
    batches: int,
) -> tuple[dict[str, BitStack], list[Owner]]:
    """Return parameters in sorted blocks, and the path and layer of each block in order.

    Args:
        assembly: Model and data of the run.
        state: Floating parameters and router state.
        rows: Rows of the parameters that are split, by path.
        count: Number of blocks of each matrix.
        rank: Largest inner width of the factors of a block.
        batches: Number of held-out batches.

    Raises:
        ValueError: A matrix or an activation is not finite, or there are too few held-out data.
    """
    squares = measure_activations(assembly, state, batches, statistic="squares", field=_FIELD)
    flat = traverse_util.flatten_dict(jax.device_get(state.params), sep="/")
    scales = dict[str, Any]()
    of_layers = dict[Owner, Blocks]()
    for path, row in rows.items():
        shape = stacked_shape(row)
        scales[path] = scales_of(squares[path]).astype(np.float32)
        matrices = np.asarray(flat[path], np.float32).reshape(shape)
        if not np.isfinite(matrices).all():
            raise ValueError(
                f"parameter {path} is not finite and cannot be split: choose an earlier checkpoint"
                " with --run.step"
            )
        split = jax.jit(partial(decompose, count=count, rank=rank))
        for layer, layer_scales in enumerate(scales[path].reshape(shape[:-1])):
            announce(f"splitting {path}, layer {layer}")
            blocks, _ = jax.device_get(split(matrices[layer], layer_scales))
            of_layers[path, layer] = dataclasses.replace(
                blocks, layers=np.full(count, layer, np.int32)
            )
    stacks = {
        owner: BitStack(scales=scales[owner[0]], blocks=of) for owner, of in of_layers.items()
    }
    order = _order(rows, stacks, flat, _loss_of(assembly, state, batches), count)
    blocks = sort_blocks(of_layers, order)
    return {path: BitStack(scales=scales[path], blocks=blocks[path]) for path in rows}, order


def _loss_of(assembly: Assembly, state: TrainState, batches: int) -> Callable[[Any], float]:
    """Return a function from parameters by path to the loss on held-out batches."""
    plan = assembly.plan
    precision = PrecisionPolicy(compute=plan.config.execution.precision.compute)
    step = make_eval_step(
        plan.model,
        execution=ExecutionConfig(precision=precision),
        objective=plan.config.training.objective,
    )
    held_out = calibration_batches(assembly, batches, _FIELD)
    router_state = jax.device_get(state.router_state)

    def loss(flat: dict[str, Any]) -> float:
        params = traverse_util.unflatten_dict(flat, sep="/")
        return evaluate(step, params, router_state, held_out).nats_per_token

    return loss


def _order(
    rows: dict[str, ParameterSpec],
    stacks: dict[Owner, BitStack],
    flat: dict[str, Any],
    loss: Callable[[dict[str, Any]], float],
    count: int,
) -> list[Owner]:
    """Return the path and layer of each block: level by level, those with the lowest loss first.

    The first blocks stay in the order of the parameters: a model without most of its matrices has
    no loss that would tell them apart.
    """
    adds = {path: jax.jit(partial(_plus, row)) for path, row in rows.items()}
    current = flat | {path: jnp.zeros_like(flat[path]) for path in rows}
    order = list[Owner]()
    for level in range(count):
        new = dict(current)
        losses = dict[Owner, float]()
        for path, layer in stacks:
            stack = stacks[path, layer]
            if level:
                announce(f"block {level + 1} of {count}: {path}, layer {layer}")
                gain = adds[path](current[path], stack, level)
                losses[path, layer] = loss(current | {path: gain})
            new[path] = adds[path](new[path], stack, level)
        order += sorted(stacks, key=lambda owner: losses.get(owner, 0.0))
        current = new
    return order


def _plus(row: ParameterSpec, value: Any, stack: BitStack, number: Any) -> Any:
    return add_block(value, row, stack, number)
