# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a model as a chain of compiled programs that the host calls: embedding, layers, head.

    chain = Chain.of(model, execution, params)
    stream, about = chain.begin(tokens, segment_ids)
    for call in chain.calls:
        stream = chain.call(call, stream, about)      # or mix, then feed: its halves
    logits = chain.logits(stream)

A caller sees the stream between layers, leaves layers out, repeats them, or supplies parameters
that arrive from elsewhere (`LayerStore`). Each kind of layer is one program, which takes the number
of the layer. The logits are those of `Transformer`, bit for bit in float32 on one CPU device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.adapters import fold_adapters
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.records import LayerInputs, Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.stacks import Layer, LayerCall, LayerStack
from jaxmoe.models.transformer import first_stream, initial_router_state, read_at, token_inputs


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


@runtime_checkable
class LayerStore(Protocol):
    """Where the parameters of the layers come from."""

    def layer(self, call: LayerCall) -> tuple[Any, int]:
        """Return parameters with a leading dimension of layers, and the number of the layer in it.

        Args:
            call: Layer that is computed next.
        """
        ...


@runtime_checkable
class ExpertStore(Protocol):
    """Computes the feed-forward half of MoE layers whose experts are not among the parameters."""

    def feed(self, chain: Chain, call: LayerCall, stream: Stream, about: TokenInputs) -> Stream:
        """Return the stream after the feed-forward half of a MoE layer; see `Chain.feed`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentLayers:
    """Layers that all lie on the device, stacked as in a checkpoint."""

    params: Any

    def layer(self, call: LayerCall) -> tuple[Any, int]:
        """Return the parameters of the layer's stack, and its place."""
        return stack_parameters(self.params, call.stack), call.place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A model with its parameters, whose layers are called one by one."""

    model: ModelConfig
    execution: ExecutionConfig
    params: Any
    """Parameters; those of the layers may be missing if `store` has them."""
    router_state: Any
    store: LayerStore
    experts: ExpertStore | None = None
    """Computes the MoE layers; the chain itself when None."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        execution: ExecutionConfig,
        params: Any,
        router_state: Any = None,
        store: LayerStore | None = None,
        experts: ExpertStore | None = None,
    ) -> Chain:
        """Return the model, if its layers can be called one by one.

        Args:
            model: Layers.
            execution: How they are computed.
            params: Parameters.
            router_state: State of the routers, stacked over MoE layers; fresh when None.
            store: Source of the parameters of the layers; `params` when None.
            experts: Computes the MoE layers, whose experts `params` then lack; the chain when None.

        Raises:
            ValueError: The layers are on several stages, positions are cut, weights are quantised,
                a sequence has several streams, or a connection surrounds a loop.
        """
        loop = model.loop
        first = model.kinds[0].mixer
        execution.check_one_stage("layers are called one by one on whole models")
        if execution.mesh.seq > 1:
            raise ValueError(
                f"execution.mesh.seq={execution.mesh.seq}: layers are called one by one on whole"
                " rows: set mesh.seq to 1"
            )
        if not execution.precision.has_floating_weights:
            raise ValueError(
                f"execution.precision.weights={execution.precision.weights}: layers are called one"
                " by one with floating-point weights: take the run before its conversion"
            )
        if loop is not None and loop.has_modules:
            raise ValueError(
                "model.loop.connection: layers are called one by one on the stream between layers,"
                " and the connection's streams lie around a whole turn: leave the connection out"
            )
        if first.rearranges_rows:
            raise ValueError(
                f"model.attention={first.name}: layers are called one by one on one stream a"
                " sequence, and this mixer computes several: choose another mixer"
            )
        state = initial_router_state(model) if router_state is None else router_state
        if model.adapter is not None and model.adapter.has_view:
            params = jax.jit(fold_adapters, static_argnums=(1, 2))(
                params, model.adapter, model.layer_numbers
            )
            model = dataclasses.replace(model, adapter=None)
        elif model.adapter is not None:
            params = model.adapter.prepare(params, model.layer_numbers)
        execution = dataclasses.replace(execution.declaring(), telemetry="brief")
        store = ResidentLayers(params) if store is None else store
        fields = {"params": params, "router_state": state, "store": store, "experts": experts}
        return cls(model=model, execution=execution, **fields)

    @property
    def calls(self) -> tuple[LayerCall, ...]:
        """Layers that a token passes through, in order."""
        return layer_calls(self.model)

    def on_one_device(self) -> Chain:
        """Return the chain on one device without a mesh, with the same precision and kernels."""
        params, state = jax.tree.map(jnp.asarray, jax.device_get((self.params, self.router_state)))
        given = self.execution
        execution = ExecutionConfig(precision=given.precision, kernels=given.kernels)
        return Chain.of(self.model, execution, params, state)

    def begin(
        self,
        tokens: Any,
        segment_ids: Any = None,
        *,
        positions: Any = None,
        token_mask: Any = None,
    ) -> tuple[Stream, TokenInputs]:
        """Return the stream before the first layer, and the inputs of all layers.

        Args:
            tokens: Ids [B S].
            segment_ids: Documents [B S], 0 for padding; one a row when None.
            positions: Positions [B S], which caches need; the place in the row when None.
            token_mask: False for padding after a row's tokens, with a cache.
        """
        names = ("tokens", "segment_ids", "positions", "token_mask")
        arrays_by_name = zip(names, (tokens, segment_ids, positions, token_mask), strict=True)
        arrays = {name: array for name, array in arrays_by_name if array is not None}
        return _begin(self.model, self.execution, self.params["embedding"]["weight"], arrays)

    def call(self, call: LayerCall, stream: Stream, tokens: TokenInputs) -> Stream:
        """Return the stream after a layer.

        Args:
            call: Layer.
            stream: Stream before it; its cache, if it has one, is that of the layer's stack, and is
                written in place.
            tokens: Inputs of all layers.
        """
        return self._compute(None, call, stream, tokens)

    def mix(self, call: LayerCall, stream: Stream, tokens: TokenInputs) -> Stream:
        """Return the stream after the mixer half of a layer; see `call`."""
        return self._compute("mix", call, stream, tokens)

    def feed(self, call: LayerCall, stream: Stream, tokens: TokenInputs) -> Stream:
        """Return the stream after the feed-forward half of a layer; see `call`."""
        return self._compute("feed", call, stream, tokens)

    def _compute(
        self, half: str | None, call: LayerCall, stream: Stream, tokens: TokenInputs
    ) -> Stream:
        if self.experts is not None and call.stack.kind.feed_forward.is_routed and half != "mix":
            mixed = self.mix(call, stream, tokens) if half is None else stream
            return self.experts.feed(self, call, mixed, tokens)
        params, place = self.store.layer(call)
        numbers = tuple(np.int32(n) for n in (place, call.cache_layer, call.moe_layer))
        program = self.model.context, self.execution, call.stack.kind, half
        cache = stream.cache
        stream = dataclasses.replace(stream, cache=None)
        return _call(*program, params, self.router_state, numbers, stream, tokens, cache)

    def hidden(self, stream: Stream) -> Float[Array, "B S D"]:
        """Return the residual stream as if no layer followed, before the final norm."""
        return _end(self.model, self.execution, stream)

    def norm_output(self, stream: Stream) -> Float[Array, "B S D"]:
        """Return the activations after the final norm of a stream after the last layer."""
        model = self.model
        return model.norm.apply(self.hidden(stream), self.params["final_norm"], model.norm_epsilon)

    def logits(self, stream: Stream, at: Any = None) -> Float[Array, "B S V"]:
        """Return the logits of a stream after the last layer, f32.

        Args:
            stream: Stream.
            at: Index in each row whose logits are computed, alone [B 1 V]; all when None.
        """
        names = ["final_norm", "embedding" if self.model.has_tied_embeddings else "head"]
        names += ["head"] if self.model.extras.has_head_bias else []
        params = {name: self.params[name] for name in names}
        return _logits(self.model, self.execution, params, stream, at)


def stack_parameters(params: Any, stack: LayerStack) -> Any:
    """Return the parameters of a stack of layers from those of the model."""
    return functools.reduce(lambda tree, name: tree[name], stack.path.split("/"), params)


def layer_inputs(
    kind: Layer, router_state: Any, cache_layer: Array, moe_layer: Array
) -> LayerInputs:
    """Return the inputs of one layer, without a key.

    Args:
        kind: Mixer and feed-forward.
        router_state: State of the routers, stacked over MoE layers.
        cache_layer: `LayerCall.cache_layer`.
        moe_layer: `LayerCall.moe_layer`.
    """
    is_routed = kind.feed_forward.is_routed
    layer_state = jax.tree.map(lambda x: _at(x, moe_layer), router_state) if is_routed else {}
    return LayerInputs(
        router_state=layer_state, key=None, stack_layer=cache_layer, moe_layer=moe_layer
    )


def layer_of(params: Any, place: Array) -> Any:
    """Return the parameters of one layer of stacked ones.

    Args:
        params: Parameters with a leading dimension of layers.
        place: Number of the layer in it.
    """
    return jax.tree.map(lambda x: _at(x, place), params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    model: ModelConfig, execution: ExecutionConfig, weight: Array, arrays: dict[str, Any]
) -> tuple[Stream, TokenInputs]:
    mask_ratio = jnp.zeros(arrays["tokens"].shape, jnp.float32)  # nothing is masked
    arguments = arrays | {"context": {"mask_ratio": mask_ratio}}
    inputs = token_inputs(arguments, None, execution.placement)
    stream = first_stream(model, weight, inputs.context["tokens"], execution)
    return model.residual.enter(stream, inputs, model.context, execution)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnames="cache")
def _call(
    context: LayerContext,
    execution: ExecutionConfig,
    kind: Layer,
    half: str | None,
    params: Any,
    router_state: Any,
    numbers: tuple[Array, Array, Array],
    stream: Stream,
    tokens: TokenInputs,
    cache: Any,
) -> Stream:
    block = Block(kind.mixer, kind.feed_forward, context, execution, train=False)
    place, *of_layer = numbers
    layer_params = layer_of(params, place)
    stream = dataclasses.replace(stream, cache=cache)
    inputs = layer_inputs(kind, router_state, *of_layer)
    return block.apply({"params": layer_params}, stream, inputs, tokens, method=half)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _end(model: ModelConfig, execution: ExecutionConfig, stream: Stream) -> Array:
    return model.residual.leave(stream, model.context, execution).x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(
    model: ModelConfig, execution: ExecutionConfig, params: Any, stream: Stream, at: Any
) -> Array:
    x = model.residual.leave(stream, model.context, execution).x
    x = model.norm.apply(x, params["final_norm"], model.norm_epsilon)
    x = read_at(x, at, execution.placement)
    return output_logits(x, head_weight(params, model), model, execution)


def _at(x: Array, number: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
