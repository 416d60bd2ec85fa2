# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the records that pass between the transformer, a layer and the halves of a layer.

They are not checked at run time: tree functions also fill them with shapes, specs and tracers.
"""

from __future__ import annotations

import typing
from typing import Any, Literal, NamedTuple

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.layers.observer import Observations
from jaxmoe.routing import RouterStatistics
from sharding.products.low_rank import Mix
from sharding.sequence_parallel import TokenOrder

Half = Literal["mixer", "feed_forward"]
"""A half of a layer."""


@typing.no_type_check
@struct.dataclass
class TokenInputs:
    """Arrays of the tokens that every layer receives."""

    token_mask: Bool[Array, "B S"]
    """False for padding."""
    positions: Int[Array, "B S"] | None = None
    """Positions in the document, rising within a segment; the place in the row when None."""
    segment_ids: Int[Array, "B S"] | None = None
    """Document of each token, 0 for padding; one segment a row when None."""
    context: dict[str, Array] = struct.field(default_factory=dict)
    """Further [B S] arrays for routers, see `jaxmoe.routing.base.RouterInputs`; and the recorded
    experts of all MoE layers [B S L K], see `jaxmoe.routing.replay`."""
    order: TokenOrder | None = None
    """Order of the tokens, where rows differ in it."""
    mix: Mix | None = None
    """How an adapter's additions to the matrices of this half of the layer are mixed."""


class HeadArrays(NamedTuple):
    """Queries, keys and values of a layer of attention, as its softmax reads them."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B S M H"]
    v: Float[Array, "B S M V"]


@typing.no_type_check
@struct.dataclass
class LayerInputs:
    """Inputs that differ from layer to layer; stacked over layers they have a leading L."""

    router_state: Any
    """State of the layer's router; an empty dict in a dense layer."""
    key: Array | None
    """PRNG key of this layer and step, for routers with noise."""
    stack_layer: Int[Array, "*L"]
    """Number among the layers of its stack's cache: in the first turn of a loop, of the stack."""
    moe_layer: Int[Array, "*L"]
    """Number among the MoE layers; meaningless in a dense layer."""
    expert_outputs: Float[Array, "A D"] | None = None
    """`RoutingInputs.expert_outputs`."""
    carry: dict[str, Array] = struct.field(default_factory=dict)
    """`Stream.carry` as it reaches the mixer, which the layer fills in."""


@typing.no_type_check
@struct.dataclass
class Stream:
    """Arrays that flow from layer to layer."""

    x: Float[Array, "B S *n D"]
    """The residual stream; where the residual has n of them, [B S n D] between halves."""
    carry: dict[str, Array] = struct.field(default_factory=dict)
    """Arrays that parts of a layer hand to the next layer; see `jaxmoe.layers.carry`."""
    cache: Any = None
    """Caches of the mixers of a stack, with a leading dimension of its layers; in a period of
    layers one by place in the period. Each layer writes its part. As the stream is what a loop over
    layers carries, it is written in place."""


Flow = Stream | tuple[Stream, Stream]
"""Stream of a scan, or those of two halves of the rows."""
FlowTokens = TokenInputs | tuple[TokenInputs, TokenInputs]
"""Inputs of all layers for a `Flow`."""


@typing.no_type_check
@struct.dataclass
class LayerCache:
    """Cache that a mixer reads and writes."""

    entries: Any
    """Caches of all layers of its stack, with a leading dimension of the layers."""
    layer: Int[Array, ""]
    """Number of the layer among them."""


@typing.no_type_check
@struct.dataclass
class MixerOutputs:
    """Results of a mixer beside its activations."""

    cache: Any = None
    """`LayerCache.entries` with the new ones of the layer, if they were given."""
    carry: dict[str, Array] = struct.field(default_factory=dict)
    """Arrays of `Stream.carry` that change."""
    losses: dict[str, Float[Array, ""]] = struct.field(default_factory=dict)
    """Losses of the gates of an adapter, in training."""
    observations: Observations | None = None
    """What the observer has seen, of the global batch."""


@typing.no_type_check
@struct.dataclass
class RoutingInputs:
    """Inputs of a feed-forward beside its activations; each field may be a part of one layer's."""

    token_mask: Bool[Array, "B S"]
    """False for padding."""
    segment_ids: Int[Array, "B S"]
    """Document of each token."""
    router_state: Any
    """State of this layer's router."""
    key: Array | None = None
    """PRNG key of this layer and step, for routers with noise."""
    carry: dict[str, Array] = struct.field(default_factory=dict)
    """`Stream.carry` as it reaches the feed-forward."""
    layer: Int[Array, ""] | None = None
    """Number among the MoE layers."""
    context: dict[str, Array] = struct.field(default_factory=dict)
    """Further [B S] arrays for `RouterInputs.context`, and recorded experts [B S L K]."""
    mix: Mix | None = None
    """How an adapter's additions to dense matrices are mixed."""
    expert_outputs: Float[Array, "A D"] | None = None
    """Outputs of the routed experts by assignment, where another program has computed them on one
    device; the layer then needs no weights of theirs."""


@typing.no_type_check
@struct.dataclass
class FeedForwardOutputs:
    """Results of a feed-forward beside its activations; a dense one has none."""

    statistics: RouterStatistics | None = None
    """Routing statistics of the global batch."""
    carry: dict[str, Array] = struct.field(default_factory=dict)
    """Arrays of `Stream.carry` that change."""
    losses: dict[str, Float[Array, "*L"]] = struct.field(default_factory=dict)
    """Losses of the balancers that read this layer's weights, and of the gates of an adapter, in
    training."""
    observations: Observations | None = None
    """What the observer has seen, of the global batch."""


@typing.no_type_check
@struct.dataclass
class LayerOutputs:
    """Results of a layer beside the stream; stacked over layers they have a leading L."""

    statistics: RouterStatistics | None
    """Routing statistics of the global batch; None for a dense layer."""
    losses: dict[str, Float[Array, "*L"]]
    """Losses of the balancers that read the layer's weights, and of the gates of an adapter."""
    observations: Observations | None = None
    """What the observer has seen, of the global batch."""
