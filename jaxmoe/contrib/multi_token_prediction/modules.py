# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind a model, each of which predicts one token further ahead.

With h^0 the states of the model after its final norm and t_j the tokens, module k computes

    x_i   = P [norm(embed(t_{i+k})); norm(h^{k-1}_i)]        P [2 D, D]
    h^k_i = layer(x_i)                                       of the kind of the model's last layer
    z^k_i = head(norm(h^k_i))                                predicts t_{i+k+1}

Embedding and head are those of the model. A token t_{i+k} outside of the document of t_i, and
padding, are neither routed nor counted. The order in the brackets is that of published weights.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.carry import initial_carry
from jaxmoe.layers.records import LayerInputs, LayerOutputs, Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.layer_scan import scan_layers
from jaxmoe.models.stacks import Scan
from jaxmoe.models.transformer import first_stream, initial_router_state, token_inputs
from jaxmoe.routing.replay import EXPERTS
from sharding import axes as ax
from sharding.constrain import Placement

_OF_MODULES: Final = 0x4D  # separates draws of their routers from those of the model's


@typing.no_type_check
@struct.dataclass
class ModuleInputs:
    """Inputs that differ from module to module; stacked over modules they have a leading K."""

    layer: LayerInputs
    """Inputs of its layer."""
    embedded: Float[Array, "*K B S D"]
    """Embedding of the token that it reads beside each state."""
    ids: Int[Array, "*K B S"]
    """That token."""
    mask: Bool[Array, "*K B S"]
    """False where there is no such token."""


@typing.no_type_check
@struct.dataclass
class ModuleOutputs:
    """Results of a module beside the stream; stacked over modules they have a leading K."""

    layer: LayerOutputs
    """Results of its layer."""
    hidden: Float[Array, "*K B S D"]
    """States that the head reads."""


class _Projection(nn.Module):
    """The product of two states side by side with one matrix."""

    width: int
    placement: Placement

    @nn.compact
    def __call__(self, pair: Float[Array, "B S E"]) -> Float[Array, "B S D"]:
        weight = declare(
            self,
            "weight",
            Declaration(
                shape=(2 * self.width, self.width), axes=(ax.EMBED, ax.CONNECTIONS), role="mlp_in"
            ),
        )
        stream = (ax.ACT_BATCH, ax.ACT_SEQ, None)
        region = self.placement.region(
            _multiply, in_axes=(stream, (None, None)), out_axes=(ax.ACT_BATCH, ax.ACT_SEQ, None)
        )
        return region(pair, weight.astype(pair.dtype))


def _multiply(pair: Array, weight: Array, *, batch_axes: tuple[str, ...]) -> Array:
    del batch_axes
    product = jnp.einsum("bse,ed->bsd", pair, weight, preferred_element_type=jnp.float32)
    return product.astype(pair.dtype)


class ModuleBlock(Block):
    """One module: norms and projection, a layer, and the norm before the head."""

    def setup(self):
        """Build the submodules under the names that parameter paths and checkpoints have."""
        super().setup()
        context = self.context
        width = context.embed_dim
        epsilon = context.norm_epsilon
        self._token_norm = context.norm.build(width, epsilon, name="token_norm")
        self._state_norm = context.norm.build(width, epsilon, name="state_norm")
        self._projection = _Projection(width, self.execution.placement, name="projection")
        self._head_norm = context.norm.build(width, epsilon, name="head_norm")

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, stream: Stream, module: ModuleInputs, tokens: TokenInputs
    ) -> tuple[Stream, ModuleOutputs]:
        """Compute the module; the signature is that of a scan's body.

        Args:
            stream: States of the model, or of the module before.
            module: Inputs of this module.
            tokens: Inputs of all modules.
        """
        pair = (self._token_norm(module.embedded), self._state_norm(stream.x))
        stream = dataclasses.replace(stream, x=self._projection(jnp.concatenate(pair, axis=-1)))
        context = tokens.context | {"tokens": module.ids}
        tokens = dataclasses.replace(tokens, token_mask=module.mask, context=context)
        stream, outputs = super().__call__(stream, module.layer, tokens)
        return stream, ModuleOutputs(layer=outputs, hidden=self._head_norm(stream.x))


def module_scan(
    scan: Scan, model: ModelConfig, execution: ExecutionConfig, *, train: bool
) -> nn.Module:
    """Return the Linen module of all modules, called as `(stream, inputs, tokens)`.

    Args:
        scan: Layers of the modules.
        model: Model with them.
        execution: How they are computed.
        train: Whether routers behave as in training.
    """
    return scan_layers(scan, model.context, execution, train=train, block=ModuleBlock)


def module_layers(model: ModelConfig, router_state: Any, key: Array | None) -> LayerInputs:
    """Return the inputs of the layers of all modules, [K ...].

    Args:
        model: Model with the modules.
        router_state: State of all routers, those of the modules behind the model's.
        key: PRNG key of the step, or None.
    """
    scan = model.further_scan
    assert scan is not None  # the model has modules
    (stack,) = scan.stacks
    numbers = stack.moe_layers
    count = stack.num_layers
    state = {}
    if numbers:
        state = jax.tree.map(lambda leaf: leaf[numbers.start : numbers.stop], router_state)
    keys = None
    if key is not None:
        keys = jax.random.split(jax.random.fold_in(key, _OF_MODULES), count)
    first = numbers.start if numbers else 0
    return LayerInputs(
        router_state=state,
        key=keys,
        moe_layer=first + jnp.arange(count, dtype=jnp.int32),
        stack_layer=jnp.arange(count, dtype=jnp.int32),
    )


def first_inputs(model: ModelConfig, stream: Stream) -> tuple[ModuleInputs, TokenInputs]:
    """Return inputs of the modules of the right shapes, with which they are initialised.

    Args:
        model: Model with the modules.
        stream: Embedded tokens.
    """
    shape = stream.x.shape[:2]
    layers = module_layers(model, initial_router_state(model), None)
    count = layers.stack_layer.shape[0]
    zeros = jnp.zeros(shape, jnp.int32)
    context = {"index": zeros, "tokens": zeros, "mask_ratio": jnp.zeros(shape, jnp.float32)}
    inputs = ModuleInputs(
        layer=layers,
        embedded=jnp.stack([stream.x] * count),
        ids=jnp.zeros((count, *shape), jnp.int32),
        mask=jnp.ones((count, *shape), bool),
    )
    return inputs, TokenInputs(token_mask=jnp.ones(shape, bool), context=context)


def module_outputs(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    hidden: Float[Array, "B S D"],
    arrays: Mapping[str, Any],
    ahead: Int[Array, "B S K"],
    mask: Bool[Array, "B S K"],
    *,
    first: int = 0,
    order: Any = None,
    router_state: Any = None,
    key: Array | None = None,
    cache: Any = None,
    train: bool = False,
) -> tuple[Stream, ModuleOutputs]:
    """Return the states after consecutive modules, and the results of each, [K ...].

    Args:
        model: Model with the modules.
        execution: How they are computed.
        params: Parameters of the model.
        hidden: States of the model after its final norm, or of the module before the first.
        arrays: Arrays of the tokens, see `jaxmoe.models.transformer.token_inputs`.
        ahead: Token that each module reads beside each state.
        mask: False where there is no such token.
        first: Number of the first of the modules, from 0; there are as many as `ahead` has columns.
        order: Order in which all arrays are laid out.
        router_state: State of all routers; fresh when None.
        key: PRNG key of the step, for routers with noise.
        cache: Cache of the layers of all modules, which the stream then has with the new entries.
        train: Whether routers behave as in training.
    """
    scan = model.further_scan
    assert scan is not None  # the model has modules
    (stack,) = scan.stacks
    count = ahead.shape[2]
    chosen = slice(first, first + count)
    part = dataclasses.replace(stack, layers=stack.layers[chosen])
    placement = execution.placement
    rows = (ax.ACT_BATCH, ax.ACT_SEQ)
    context = {name: array for name, array in arrays["context"].items() if name != EXPERTS}
    tokens = token_inputs({**arrays, "context": context}, order, placement)
    table = params["embedding"]["weight"]
    state = initial_router_state(model) if router_state is None else router_state
    by_module = [placement.place(ahead[:, :, k], rows) for k in range(count)]
    masks = [placement.place(mask[:, :, k], rows) for k in range(count)]
    embedded = [first_stream(model, table, ids, execution).x for ids in by_module]
    layers = module_layers(model, state, key)
    inputs = ModuleInputs(
        layer=jax.tree.map(lambda leaf: leaf[chosen], layers),
        embedded=jnp.stack(embedded),
        ids=jnp.stack(by_module),
        mask=jnp.stack(masks) & tokens.token_mask[None],
    )
    carry = initial_carry(model.carries(execution), ahead.shape[:2], execution)
    stream = Stream(x=hidden, carry=carry, cache=cache)
    modules = module_scan(dataclasses.replace(scan, stacks=(part,)), model, execution, train=train)
    weights = params[scan.name]
    if count < stack.num_layers:
        weights = jax.tree.map(lambda leaf: leaf[chosen], weights)
    return cast(
        tuple[Stream, ModuleOutputs], modules.apply({"params": weights}, stream, inputs, tokens)
    )
