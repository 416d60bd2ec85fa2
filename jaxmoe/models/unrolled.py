# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the layers of a model one call at a time, so that a caller sees the stream between them.

Each kind of layer is one compiled program, which takes the number of the layer. The result of all
calls in order equals that of `Transformer` beyond rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.halves import any_memory
from jaxmoe.models.stacks import LayerStack
from jaxmoe.models.transformer import begun_stream, initial_router_state, token_inputs


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer that a token passes through."""

    stack: LayerStack
    place: int
    """Number among the layers of the stack."""
    turn: int = 0
    """Number of the turn of a loop."""

    @property
    def layer(self) -> int:
        """Number of the layer in the model."""
        return self.stack.layers[self.place]

    @property
    def kind(self) -> str:
        """Mixer and feed-forward as text."""
        kind = self.stack.kind
        return f"{kind.mixer.module_name}, {kind.feed_forward.name}"


def layer_calls(model: ModelConfig) -> tuple[LayerCall, ...]:
    """Return the layers that a token passes through, in order; layers of a loop once each turn."""
    calls = []
    for _, members in itertools.groupby(model.scans, key=lambda scan: scan.is_looped):
        block = tuple(members)
        for turn in range(block[0].turns):
            for scan in block:
                for place in range(scan.length):
                    calls += [LayerCall(stack, place, turn) for stack in scan.stacks]
    return tuple(calls)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnrolledModel:
    """A model with its parameters, whose layers are called one by one."""

    model: ModelConfig
    execution: ExecutionConfig
    params: Any
    router_state: Any

    @classmethod
    def of(
        cls, model: ModelConfig, execution: ExecutionConfig, params: Any, router_state: Any = None
    ) -> UnrolledModel:
        """Return the model, if its layers can be called one by one.

        Args:
            model: Layers.
            execution: How they are computed.
            params: Parameters.
            router_state: State of the routers, stacked over MoE layers; fresh when None.

        Raises:
            ValueError: The layers are on several stages, positions are cut, weights are quantised,
                or a connection surrounds a loop.
        """
        sizes, loop = execution.mesh, model.loop
        for axis in ("stage", "seq"):
            if getattr(sizes, axis) > 1:
                raise ValueError(
                    f"execution.mesh.{axis}={getattr(sizes, axis)}: layers are called one by one on"
                    f" whole rows: choose --run.mesh.data and leave {axis} at 1"
                )
        if execution.precision.weights != "floating":
            raise ValueError(
                f"execution.precision.weights={execution.precision.weights}: layers are called one"
                " by one with floating-point weights: take the run before its conversion"
            )
        if loop is not None and loop.connection is not None:
            raise ValueError(
                "model.loop.connection: layers are called one by one on the stream between layers,"
                " and the connection's streams lie around a whole turn: leave the connection out"
            )
        state = initial_router_state(model) if router_state is None else router_state
        execution = dataclasses.replace(any_memory(execution), telemetry="brief")
        return cls(model=model, execution=execution, params=params, router_state=state)

    def begin(self, tokens: Any, segment_ids: Any) -> tuple[Stream, TokenInputs]:
        """Return the stream before the first layer, and the inputs of all layers.

        Args:
            tokens: Ids [B S].
            segment_ids: Documents [B S], 0 for padding; one a row when None.
        """
        weight = self.params["embedding"]["weight"]
        return _begin(self.model, self.execution, weight, tokens, segment_ids)

    def call(self, call: LayerCall, stream: Stream, about: TokenInputs) -> Stream:
        """Return the stream after a layer.

        Args:
            call: Layer.
            stream: Stream before it.
            about: Inputs of all layers.
        """
        stack, place = call.stack, jnp.int32(call.place)
        given = self.parameters(stack), self.router_state, place, stream, about
        return _call(self.model.context, self.execution, stack, *given)

    def parameters(self, stack: LayerStack) -> Any:
        """Return the parameters of a stack of layers."""
        return functools.reduce(lambda tree, name: tree[name], stack.path.split("/"), self.params)

    def hidden(self, stream: Stream) -> Float[Array, "B S D"]:
        """Return the residual stream as if no layer followed, before the final norm."""
        return _end(self.model, stream)

    def normed(self, stream: Stream) -> Float[Array, "B S D"]:
        """Return the activations after the final norm of a stream after the last layer."""
        gain = self.params["final_norm"]["gain"]
        return rms_norm(self.hidden(stream), gain, self.model.norm_epsilon)

    def logits(self, stream: Stream) -> Float[Array, "B S V"]:
        """Return the logits of a stream after the last layer, f32."""
        names = ("final_norm", "embedding" if self.model.has_tied_embeddings else "head")
        params = {name: self.params[name] for name in names}
        return _logits(self.model, self.execution, params, stream)


def layer_inputs(stack: LayerStack, router_state: Any, place: Array) -> LayerInputs:
    """Return the inputs of one layer, without a key.

    Args:
        stack: Its stack.
        router_state: State of the routers, stacked over MoE layers.
        place: Number among the layers of the stack.
    """
    moe = stack.moe_layers
    number = moe.start + moe.step * place if moe else place
    own = jax.tree.map(lambda x: _at(x, number), router_state) if moe else {}
    return LayerInputs(router_state=own, key=None, stack_layer=place, moe_layer=number)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    model: ModelConfig, execution: ExecutionConfig, weight: Array, tokens: Any, segment_ids: Any
) -> tuple[Stream, TokenInputs]:
    mask_ratio = jnp.zeros(tokens.shape, jnp.float32)  # nothing is masked
    given = {"tokens": tokens, "context": {"mask_ratio": mask_ratio}}
    if segment_ids is not None:
        given["segment_ids"] = segment_ids
    about = token_inputs(given, None, None, execution.placement)
    return begun_stream(model, weight, about.context["tokens"], execution), about


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(
    context: Any,
    execution: ExecutionConfig,
    stack: LayerStack,
    params: Any,
    router_state: Any,
    place: Array,
    stream: Stream,
    about: TokenInputs,
) -> Stream:
    block = Block(stack.kind.mixer, stack.kind.feed_forward, context, execution, train=False)
    own = jax.tree.map(lambda x: _at(x, place), params)
    given = layer_inputs(stack, router_state, place)
    return block.apply({"params": own}, stream, given, about)[0]


@functools.partial(jax.jit, static_argnums=0)
def _end(model: ModelConfig, stream: Stream) -> Array:
    return model.residual.end(stream).x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(model: ModelConfig, execution: ExecutionConfig, params: Any, stream: Stream) -> Array:
    x = model.residual.end(stream).x
    x = rms_norm(x, params["final_norm"]["gain"], model.norm_epsilon)
    return output_logits(x, head_weight(params, model), model, execution)


def _at(x: Array, number: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
