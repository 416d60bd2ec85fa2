# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A pre-norm block, and a stack of equal blocks as one scan.

    x = x + m * attention(norm(x))
    x = x + m * feed_forward(norm(x))          m: the residual multiplier

What a layer reports is returned, never logged from inside: under rematerialisation the inside runs
twice.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.layers.attention import Attention, AttentionOutputs
from jaxmoe.layers.feed_forward import FeedForward
from jaxmoe.layers.gather import SECONDARY, WHOLE, gather_across_replicas, use_whole
from jaxmoe.layers.indicators import (
    Indicators,
    observe_attention,
    observe_branch,
    observe_routing,
)
from jaxmoe.layers.latent_attention import LatentAttention
from jaxmoe.layers.moe import MoE, RoutingInputs, RoutingOutputs
from jaxmoe.layers.norms import RMSNorm
from jaxmoe.models.config import LatentAttentionConfig, ModelConfig, Stack
from jaxmoe.routing import RouterStatistics
from sharding import axes as ax


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class TokenInputs:
    """What every layer is told of the tokens."""

    positions: Int[Array, "B S"] | None
    """arange when None."""
    segment_ids: Int[Array, "B S"] | None
    """One segment a row when None; 0 is padding."""
    token_mask: Bool[Array, "B S"]
    """False for padding."""
    context: dict[str, Array]
    """Further [B S] arrays for routers; see `jaxmoe.routing.base.RouterInputs`."""
    places: Int[Array, "B S"] | None = None
    """Of each token in its row, where rows are laid out and each in its own way."""


@typing.no_type_check
@struct.dataclass
class LayerInputs:
    """What differs from layer to layer; stacked, with a leading L."""

    router_state: Any
    cache: Any
    """`KVCache` or `LatentCache`, as the attention is; or None."""
    key: Array | None
    moe_layer: Int[Array, "*L"]
    """Number among the MoE layers; of no meaning in a dense layer."""


@typing.no_type_check
@struct.dataclass
class Stream:
    """What flows from layer to layer."""

    x: Float[Array, "B S D"]
    """The residual stream."""
    router_logits: Float[Array, "B S E"] | None = None
    """Of the last MoE layer, for routers that carry them; zeros before the first."""


@typing.no_type_check
@struct.dataclass
class LayerOutputs:
    """What a layer returns beside the residual stream; stacked, with a leading L."""

    statistics: RouterStatistics | None
    cache: Any
    losses: dict[str, Array]
    """Of the balancers that look at a layer's weights."""
    indicators: Indicators | None = None
    """Of the global batch, with detailed telemetry."""


STREAM: Final = "stream"
"""Name of what flows into a block, for remat policies."""


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    model: ModelConfig
    execution: ExecutionConfig
    is_moe: bool
    train: bool

    @nn.compact
    def __call__(
        self, stream: Stream, layer: LayerInputs, tokens: TokenInputs
    ) -> tuple[Stream, LayerOutputs]:
        """One block; the signature is that of a scan's body."""
        model, execution, x = self.model, self.execution, checkpoint_name(stream.x, STREAM)
        multiplier = jnp.asarray(model.multipliers.residual, x.dtype)

        def norm(name: str, x: Array) -> Array:
            return RMSNorm(model.embed_dim, model.norm_epsilon, name=name)(x)

        is_latent = isinstance(model.attention, LatentAttentionConfig)
        kind = LatentAttention if is_latent else Attention
        attention = kind(model, execution, name="attention")
        y, attended = attention(
            norm("attention_norm", x),
            tokens.positions,
            tokens.segment_ids,
            layer.cache,
            tokens.places,
        )
        attention_output = y
        x = x + multiplier * y.astype(x.dtype)
        y, routed = norm("feed_forward_norm", x), None
        if self.is_moe and model.moe is not None:
            moe = MoE(model, model.moe, execution, self.train, name="moe")
            y, routed = moe(y, _routing_inputs(stream, layer, tokens))
        else:
            y = FeedForward(model.embed_dim, model.dense_dim, execution, name="feed_forward")(y)
        x = x + multiplier * y.astype(x.dtype)
        logits = stream.router_logits if routed is None else routed.logits
        outputs = LayerOutputs(
            statistics=None if routed is None else routed.statistics,
            cache=attended.cache,
            losses={} if routed is None else routed.losses,
        )
        if execution.telemetry == "detailed":
            outputs = dataclasses.replace(
                outputs,
                indicators=_observe(attention_output, attended, y, routed, tokens.token_mask),
            )
        return Stream(x=x, router_logits=logits), outputs


def _observe(
    attention_output: Float[Array, "B S D"],
    attended: AttentionOutputs,
    feed_forward_output: Float[Array, "B S D"],
    routed: RoutingOutputs | None,
    token_mask: Bool[Array, "B S"],
) -> Indicators:
    """The indicators of one layer."""
    found = (
        observe_attention(attended.logits, token_mask)
        | observe_branch("attention", attention_output, token_mask)
        | observe_branch("feed_forward", feed_forward_output, token_mask)
    )
    if routed is None:
        return found
    return found | observe_routing(routed.statistics, routed.observed, token_mask)


def _routing_inputs(stream: Stream, layer: LayerInputs, tokens: TokenInputs) -> RoutingInputs:
    segments = tokens.segment_ids
    if segments is None:
        segments = tokens.token_mask.astype(jnp.int32)
    return RoutingInputs(
        token_mask=tokens.token_mask,
        segment_ids=segments,
        router_state=layer.router_state,
        key=layer.key,
        previous_logits=stream.router_logits,
        layer=layer.moe_layer,
        context=tokens.context,
    )


def stack_of_blocks(
    model: ModelConfig,
    execution: ExecutionConfig,
    stack: Stack,
    *,
    train: bool,
    is_gathered: bool = False,
) -> nn.Module:
    """The blocks of one stack as a scan over their stacked parameters, rematerialised as asked.

    Args:
        model: what is computed.
        execution: how.
        stack: which layers.
        train: for the routers.
        is_gathered: there is a collection of gathered parameters beside the cut ones.
    """
    body = Block
    if is_gathered:
        body = use_whole(body)
    elif execution.state_layout.gathered == "replica":
        body = gather_across_replicas(body, execution.precision.compute_dtype)
    if execution.remat != "none":
        body = nn.remat(body, policy=remat_policy(execution.remat), prevent_cse=False)
    scanned = nn.scan(
        body,
        # Intermediates: when a caller captures them.
        variable_axes={"params": 0, "intermediates": 0, WHOLE: 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
        out_axes=0,
        length=stack.num_layers,
        unroll=min(execution.unroll, stack.num_layers),
        metadata_params={nn.PARTITION_NAME: ax.LAYERS, "size": stack.num_layers},
    )
    return scanned(model, execution, stack.is_moe, train, name=stack.name)


def remat_policy(remat: Remat) -> Any:
    """What the backward pass finds rather than computes; always what was gathered across replicas.

    Args:
        remat: not "none".
    """
    policies = jax.checkpoint_policies
    secondary = policies.save_only_these_names(SECONDARY)
    if remat == "full":
        return secondary
    if remat == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SECONDARY],
            names_which_can_be_offloaded=[STREAM],
            offload_src="device",
            offload_dst="pinned_host",
        )
    dots = policies.dots_with_no_batch_dims_saveable
    return policies.save_from_both_policies(dots, secondary)
