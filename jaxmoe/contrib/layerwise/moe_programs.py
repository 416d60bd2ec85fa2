# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the feed-forward half of a MoE layer in three programs, for experts from elsewhere.

    ids, x  = route(...)                            experts of each token, and what they read
    outputs = compute(experts in slots, ...)        for some of the experts, as often as needed
    stream  = write(outputs, ...)                   gates, sum, shared experts, residual

Outputs are kept by assignment [A D] until all are there and are summed in the order of `MoE`, so
that the stream does not depend on the experts that were computed together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.layerwise.chain import Chain, layer_inputs, layer_of
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.feed_forwards.activations import ActivationBase
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.models.stacks import Layer, LayerCall
from jaxmoe.routing.telemetry.recording import RECORDED, record_router
from sharding.assignments import Assignments
from sharding.expert_parallel import ExpertAxes, LocalConfig
from sharding.expert_parallel.dispatched import Outgoing


def route(
    chain: Chain, call: LayerCall, stream: Stream, tokens: TokenInputs
) -> tuple[Int[np.ndarray, "T K"], Float[Array, "T D"]]:
    """Return the experts of each token, and the activations that they read.

    Args:
        chain: Model whose layers need not have the weights of their experts.
        call: MoE layer.
        stream: Stream after its mixer.
        tokens: Inputs of all layers.

    Returns:
        Ids, the number of experts that can be chosen where there is none; activations in the
        compute dtype, on the device.
    """
    kind = call.stack.kind
    moe = call.stack.kind.feed_forward
    watched = Layer(kind.mixer, record_router(moe, stream.x.shape[0] * stream.x.shape[1]))
    bare = dataclasses.replace(stream, cache=None)
    ids, rows = _route(*_of(chain, call, watched), bare, tokens)
    return jax.device_get(ids), rows


def no_outputs(ids: Int[np.ndarray, "T K"], rows: Float[Array, "T D"]) -> Float[Array, "A D"]:
    """Return the outputs before any expert was computed.

    Args:
        ids: Experts of each token.
        rows: Activations of each token.
    """
    return jnp.zeros((ids.size, rows.shape[1]), rows.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="outputs")
def compute(
    execution: ExecutionConfig,
    activation: ActivationBase,
    slots: Any,
    places: Int[Array, " n"],
    ids: Int[Array, "T K"],
    rows: Float[Array, "T D"],
    outputs: Float[Array, "A D"],
) -> Float[Array, "A D"]:
    """Return the outputs with those of some experts added.

    Args:
        execution: How experts are computed.
        activation: Activation of the experts.
        slots: Weights of the experts in the slots [N ...].
        places: Slot of each expert by its id; N where it is not computed now.
        ids: Experts of each token.
        rows: Activations of each token.
        outputs: Outputs so far, which are given up; `no_outputs` at first.
    """
    num_slots = jax.tree.leaves(slots)[0].shape[0]
    top_k = ids.shape[1]
    chosen = places[ids].reshape(-1)  # A = T*K
    assignments = Assignments(
        token_ids=jnp.repeat(jnp.arange(len(ids), dtype=jnp.int32), top_k),
        expert_ids=chosen,
        gates=jnp.ones(chosen.shape, jnp.float32),
        top_k=top_k,
    )
    sent = LocalConfig().dispatch(Outgoing(rows, assignments, slots, num_slots, ExpertAxes()))
    computed = apply_experts(
        slots,
        sent.rows,
        sent.group_sizes,
        activation=activation,
        implementation=execution.implementations.grouped_swiglu,
        activations=execution.precision.activations,
        encoded=execution.encoded_product,
    )
    return outputs + sent.undo(computed)


def write(
    chain: Chain, call: LayerCall, stream: Stream, tokens: TokenInputs, outputs: Array
) -> Stream:
    """Return the stream after the MoE layer.

    Args:
        chain: As for `route`.
        call: MoE layer.
        stream: Stream after its mixer.
        tokens: Inputs of all layers.
        outputs: Outputs of all experts that `route` has named, by assignment.
    """
    cache = stream.cache
    bare = dataclasses.replace(stream, cache=None)
    written = _write(*_of(chain, call, call.stack.kind), bare, tokens, outputs)
    return dataclasses.replace(written, cache=cache)


def _of(chain: Chain, call: LayerCall, kind: Layer) -> tuple[Any, ...]:
    """Return what the programs need of a layer."""
    params, place = chain.store.layer(call)
    numbers = tuple(np.int32(n) for n in (place, call.cache_layer, call.moe_layer))
    return chain.model.context, chain.execution, kind, params, chain.router_state, numbers


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _route(*arguments: Any) -> tuple[Array, Array]:
    *of_layer, stream, about = arguments
    execution = arguments[1]
    top_k = arguments[2].feed_forward.top_k
    tokens = stream.x.shape[0] * stream.x.shape[1]
    dtype = execution.precision.compute_dtype
    nothing = jnp.zeros((tokens * top_k, stream.x.shape[-1]), dtype)
    block, layer_params, inputs = _layer(of_layer, nothing)
    outputs: Any = block.apply(layer_params, stream, inputs, about, method="feed")[1]
    rows: Any = block.apply(layer_params, stream, method="feed_forward_input")
    return outputs.statistics.extra[RECORDED] - 1, rows.astype(dtype).reshape(tokens, -1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _write(*arguments: Any) -> Stream:
    *of_layer, stream, tokens, outputs = arguments
    block, layer_params, inputs = _layer(of_layer, outputs)
    return block.apply(layer_params, stream, inputs, tokens, method="feed")[0]


def _layer(arguments: Sequence[Any], outputs: Array) -> tuple[Block, Any, Any]:
    """Return the module of a layer, its parameters and its inputs.

    Args:
        arguments: What `_of` returns.
        outputs: Outputs of its experts.
    """
    context, execution, kind, params, router_state, numbers = arguments
    block = Block(kind.mixer, kind.feed_forward, context, execution, train=False)
    inputs = layer_inputs(kind, router_state, *numbers[1:])
    inputs = dataclasses.replace(inputs, expert_outputs=outputs)
    return block, {"params": layer_of(params, numbers[0])}, inputs
