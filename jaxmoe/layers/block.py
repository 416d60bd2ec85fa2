# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A layer: a mixer half and a feed-forward half around a residual stream.

    x = read(x);  x = write(x, mixer(norm(x)))
    x = read(x);  x = write(x, feed_forward(norm(x)))

The norms stand there by default; `norm_place` puts them on the outputs, or on both. The halves can
be called apart. A layer returns what it reports and never logs it from inside: under
rematerialisation the inside runs twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmoe.declarations import own_of
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.feed_forwards import FeedForwardBase
from jaxmoe.layers.mixers import MixerBase
from jaxmoe.layers.norms import NormPlace
from jaxmoe.layers.observer import observer_of, unite
from jaxmoe.layers.records import (
    FeedForwardOutputs,
    Half,
    LayerCache,
    LayerInputs,
    LayerOutputs,
    MixerOutputs,
    RoutingInputs,
    Stream,
    TokenInputs,
)
from jaxmoe.layers.view import HalfInputs, Losses

STREAM: Final = "stream"
"""Checkpoint name of a block's input, for remat policies."""


class Block(nn.Module):
    """One layer.

    Attributes:
        mixer: Config of the mixer.
        feed_forward: Config of the feed-forward.
        context: Model-wide numbers.
        execution: How the layer is computed.
        train: Whether routers behave as in training.
    """

    mixer: MixerBase
    feed_forward: FeedForwardBase
    context: LayerContext
    execution: ExecutionConfig
    train: bool

    def setup(self):
        """Build the submodules under the names that parameter paths and checkpoints have."""
        width = self.context.embed_dim
        epsilon = self.context.norm_epsilon
        residual = self.context.residual
        sizes = {"embed_dim": width, "epsilon": epsilon}
        placement = self.execution.placement
        self._mixer_residual = residual.build("mixer", **sizes, placement=placement)
        self._feed_forward_residual = residual.build("feed_forward", **sizes, placement=placement)
        mixer = self.mixer
        feed_forward = self.feed_forward
        self._mixer_norm = self._build_norm(f"{mixer.module_name}_norm", "before")
        self._mixer = mixer.build(
            self.context, self.execution, train=self.train, name=mixer.module_name
        )
        self._mixer_post_norm = self._build_norm(f"{mixer.module_name}_post_norm", "after")
        self._feed_forward = feed_forward.build(
            self.context, self.execution, train=self.train, name=feed_forward.module_name
        )
        if self._feed_forward is None:
            return
        if residual.has_one_norm:
            self._feed_forward_norm = self._mixer_norm
        else:
            self._feed_forward_norm = self._build_norm("feed_forward_norm", "before")
        self._feed_forward_post_norm = self._build_norm("feed_forward_post_norm", "after")

    def _build_norm(self, name: str, place: NormPlace) -> Callable[[Array], Array]:
        """Return a norm, or a function that returns its input where the halves have none."""
        context = self.context
        if context.norm_place not in (place, "both"):
            return _identity
        return context.norm.build(context.embed_dim, context.norm_epsilon, name=name)

    def _replace_stream(self, stream: Stream, normed: Array) -> Stream:
        """Return the stream that a half adds to: where the residual says so, the input's norm."""
        if not self.context.residual.adds_to_norm:
            return stream
        return dataclasses.replace(stream, x=normed)

    def __call__(
        self, stream: Stream, layer: LayerInputs, tokens: TokenInputs
    ) -> tuple[Stream, LayerOutputs]:
        """Compute both halves; the signature is that of a scan's body.

        Args:
            stream: Residual stream and what layers carry beside it.
            layer: Inputs of this layer.
            tokens: Inputs of all layers.
        """
        stream, mixed = self.mix(stream, layer, tokens)
        stream, fed = self.feed(stream, layer, tokens)
        outputs = LayerOutputs(
            statistics=fed.statistics,
            losses=sum_losses(mixed.losses, fed.losses),
            observations=unite(mixed.observations, fed.observations),
        )
        return stream, outputs

    def mix(
        self, stream: Stream, layer: LayerInputs, tokens: TokenInputs
    ) -> tuple[Stream, MixerOutputs]:
        """Compute the mixer half.

        Args:
            stream: Stream before the layer.
            layer: Inputs of this layer.
            tokens: Inputs of all layers.
        """
        stream = _name_activations(stream)
        x, memory = self._mixer_residual.read(stream)
        cache = None if stream.cache is None else LayerCache(stream.cache, layer.stack_layer)
        normed = self._mixer_norm(x)
        stream = self._replace_stream(stream, normed)
        mix, losses = self._additions("mixer", normed, layer, tokens)
        tokens = dataclasses.replace(tokens, mix=mix)
        layer = dataclasses.replace(layer, carry=stream.carry)
        y, outputs = self._mixer(normed, tokens, cache, layer)
        y = self._mixer_post_norm(y)
        carry = stream.carry | outputs.carry
        stream = dataclasses.replace(stream, cache=outputs.cache, carry=carry)
        stream = self._mixer_residual.write(stream, memory, y, self.context.multipliers.residual)
        outputs = dataclasses.replace(outputs, losses=losses)
        return stream, self._observe(outputs, self.mixer.module_name, y, tokens)

    def feed_forward_input(self, stream: Stream) -> Array:
        """Return the activations [B S D] that the feed-forward reads.

        Args:
            stream: Stream after the mixer half.
        """
        return self._feed_forward_norm(self._feed_forward_residual.read(stream)[0])

    def feed(
        self, stream: Stream, layer: LayerInputs, tokens: TokenInputs
    ) -> tuple[Stream, FeedForwardOutputs]:
        """Compute the feed-forward half.

        Args:
            stream: Stream after the mixer half.
            layer: Inputs of this layer.
            tokens: Inputs of all layers.
        """
        residual = self._feed_forward_residual
        x, memory = residual.read(stream)
        if self._feed_forward is None:
            return residual.write(stream, memory, jnp.zeros_like(x), 1.0), FeedForwardOutputs()
        normed = self._feed_forward_norm(x)
        stream = self._replace_stream(stream, normed)
        mix, losses = self._additions("feed_forward", normed, layer, tokens)
        routing = dataclasses.replace(_routing_inputs(stream, layer, tokens), mix=mix)
        y, outputs = self._feed_forward(normed, routing)
        y = self._feed_forward_post_norm(y)
        outputs = dataclasses.replace(outputs, losses=outputs.losses | losses)
        stream = dataclasses.replace(stream, carry=stream.carry | outputs.carry)
        stream = residual.write(stream, memory, y, self.context.multipliers.residual)
        return stream, self._observe(outputs, "feed_forward", y, tokens)

    def _additions(
        self, half: Half, normed: Array, layer: LayerInputs, tokens: TokenInputs
    ) -> tuple[Any, Losses]:
        """Return what each token has of additions to the matrices of a half, and losses."""
        view = self.context.view
        if view is None:
            return None, {}
        key = layer.key
        if key is not None:
            key = jax.random.fold_in(key, get_args(Half).index(half))
        inputs = HalfInputs(x=normed, token_mask=tokens.token_mask, context=tokens.context, key=key)
        placement = self.execution.placement
        return view.mix(own_of(self, half), inputs, placement, train=self.train)

    def _observe(self, outputs: Any, name: str, y: Array, tokens: TokenInputs) -> Any:
        """Return the outputs of a half with what the observer sees of its branch."""
        branch = observer_of(self.execution).branch(name, y, tokens.token_mask)
        return dataclasses.replace(outputs, observations=unite(outputs.observations, branch))


def sum_losses(one: Losses, other: Losses) -> Losses:
    """Return the losses of both halves of a layer, summed where they have the same name."""
    both = {name: one[name] + other[name] for name in one if name in other}
    return one | other | both


def _identity(x: Array) -> Array:
    return x


def _name_activations(stream: Stream) -> Stream:
    """Return the stream with its arrays named for remat policies."""
    carry = {name: checkpoint_name(array, STREAM) for name, array in stream.carry.items()}
    return dataclasses.replace(stream, x=checkpoint_name(stream.x, STREAM), carry=carry)


def _routing_inputs(stream: Stream, layer: LayerInputs, tokens: TokenInputs) -> RoutingInputs:
    segments = tokens.segment_ids
    if segments is None:
        segments = tokens.token_mask.astype(jnp.int32)
    return RoutingInputs(
        token_mask=tokens.token_mask,
        segment_ids=segments,
        router_state=layer.router_state,
        key=layer.key,
        carry=stream.carry,
        layer=layer.moe_layer,
        context=tokens.context,
        expert_outputs=layer.expert_outputs,
    )
