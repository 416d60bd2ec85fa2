# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates equal layers in parallel, and corrects the result by sweeps (SNLP).

With N layers h_j = f_j(h_{j-1}), an estimate h of all of them, at first h_j = h_0, is improved by

    h_j <- f_j(h_{j-1}) + (h_{j-1}^new - h_{j-1})        h_0^new = h_0

all f_j at once, and the corrections by a prefix sum. One sweep gives h_0 + sum_j (f_j(h_0) - h_0);
N sweeps are exact, as each makes one layer more exact.

Source: the method of the repository phymhan/nanochat-snlp.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.layerwise.chain import Chain, layer_inputs, stack_parameters
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.carry import carried_arrays
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.records import LayerInputs, Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.stacks import LayerCall, LayerStack, Scan
from sharding import axes as ax


def parallel_scan(model: ModelConfig) -> Scan:
    """Return the layers of a model that can be evaluated in parallel.

    Args:
        model: Layers.

    Raises:
        ValueError: The layers differ, carry more than one array, or are in a loop.
    """
    (scan,) = (scan for scan in model.scans if scan.axis == ax.LAYERS)
    kind = scan.stacks[0].kind
    carried = carried_arrays(model.context, ExecutionConfig(), [kind.mixer, kind.feed_forward])
    names = ", ".join(carried)
    reasons = {
        "model.layers repeats a period of unlike layers": scan.is_cycle,
        f"model.residual={model.residual.name} passes several arrays": model.residual.arrays > 1,
        "model.loop calls layers several times": model.loop is not None,
        f"its layers carry {names} from one to the next": bool(carried),
    }
    if reasons_against := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"sweeps evaluate equal layers in parallel, and {reasons_against[0]}: set sweeps to"
            f" 0, or measure"
            " another run"
        )
    return scan


def sweep_streams(
    model: Chain,
    tokens: Array,
    segment_ids: Array | None,
    sweeps: int,
    *,
    is_batched: bool = True,
) -> list[Stream]:
    """Return the stream after the last layer for 1, 2, ... sweeps over the longest scan.

    Args:
        model: Model on one device, without a current mesh; its other layers are computed in order.
        tokens: Ids [B S].
        segment_ids: Documents [B S], 0 for padding; one a row when None.
        sweeps: Largest number of sweeps.
        is_batched: Whether the layers of a sweep are computed together; False computes the same
            one after the other, and needs no single device.
    """
    scan = parallel_scan(model.model)
    stream, about = model.begin(tokens, segment_ids)
    index = model.model.scans.index(scan)
    stream = _in_order(model, model.model.scans[:index], stream, about)
    (stack,) = scan.stacks
    calls = [LayerCall(stack, place) for place in range(stack.num_layers)]
    numbers = np.array([(call.cache_layer, call.moe_layer) for call in calls], np.int32)
    inputs = jax.vmap(functools.partial(layer_inputs, stack.kind, model.router_state))(*numbers.T)
    estimate = jnp.broadcast_to(stream.x[None], (stack.num_layers, *stream.x.shape))
    streams = []
    sizes = (model.model.context, model.execution, stack, is_batched)
    for _ in range(sweeps):
        estimate, last = _sweep(
            *sizes, stack_parameters(model.params, stack), inputs, stream, about, estimate
        )
        streams.append(_in_order(model, model.model.scans[index + 1 :], last, about))
    return streams


def _in_order(model: Chain, scans: tuple[Scan, ...], stream: Stream, tokens: TokenInputs) -> Stream:
    """Return the stream after whole scans."""
    for scan in scans:
        for place in range(scan.length):
            for stack in scan.stacks:
                stream = model.call(LayerCall(stack, place), stream, tokens)
    return stream


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sweep(
    context: LayerContext,
    execution: ExecutionConfig,
    stack: LayerStack,
    is_batched: bool,
    params: Any,
    inputs: LayerInputs,
    first: Stream,
    tokens: TokenInputs,
    estimate: Array,
) -> tuple[Array, Stream]:
    """Return the improved inputs of all layers, and the stream after the last.

    Args:
        context: Model-wide numbers.
        execution: How a layer is computed.
        stack: Layers.
        is_batched: Whether they are computed together.
        params: Their parameters, stacked.
        inputs: Their inputs, stacked.
        first: Stream before the first.
        tokens: Inputs of all layers.
        estimate: Inputs x of the layers [N B S D].
    """
    block = Block(stack.kind.mixer, stack.kind.feed_forward, context, execution, train=False)

    def branch(layer_params: Any, given: LayerInputs, x: Array) -> Array:
        return block.apply({"params": layer_params}, Stream(x=x), given, tokens)[0].x - x

    every = params, inputs, estimate
    branches = jax.vmap(branch)(*every) if is_batched else jax.lax.map(lambda x: branch(*x), every)
    after = first.x[None] + jnp.cumsum(branches.astype(jnp.float32), axis=0).astype(first.x.dtype)
    return jnp.concatenate([first.x[None], after[:-1]]), Stream(x=after[-1])
