# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The Mixture-of-Experts layer: router, gate, capacity, dispatcher, experts and shared experts.

    selection = router.route(x)                         experts of each token
    gates     = gate(selection)                         their weights
    y         = sum over a token's experts of gate * expert(x)
    y         = gate.mix_shared(y, shared(x))           if there are shared experts
    y         = gate.mix_shared(y, sigmoid(x w) shared(x))             with a gate of their own

This module declares the parameters and lays out the arguments; `computation.py` computes from
routing to combining in one region, on the tokens of one device. Statistics are summed over devices
there, so that a loss of them equals that of the global batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, as_factor, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.layers.feed_forwards.moe.computation import Computation, LocalInputs, LocalOutputs
from jaxmoe.layers.feed_forwards.moe.config import SHORTCUT, MoEConfig
from jaxmoe.layers.feed_forwards.moe.experts import (
    WEIGHT_AXES,
    Experts,
    encoded_axes,
    in_halves,
    is_by_kernel,
)
from jaxmoe.layers.feed_forwards.moe.layout import MoELayout, moe_layout
from jaxmoe.layers.feed_forwards.moe.zero_computation import ZeroComputationExperts
from jaxmoe.layers.observer import RoutedCall, observer_of
from jaxmoe.layers.records import FeedForwardOutputs, RoutingInputs
from jaxmoe.routing import Router
from jaxmoe.routing.balancers import of_weights
from pallas_kernels.grouped_swiglu import reads_halves
from sharding import axes as ax
from sharding.products.low_rank import LowRank
from sharding.products.quantized import logical_axes


class RouterParameters(nn.Module):
    """Declares the parameters of a router."""

    router: Router

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """Return the router's parameters by name."""
        declarations = self.router.declarations()
        return {name: declare(self, name, declarations[name]) for name in declarations}


class SharedGate(nn.Module):
    """A gate of the shared experts, one number for each token (arXiv 2407.10671, Qwen2-MoE)."""

    embed_dim: int
    execution: ExecutionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], shared: Float[Array, "B S D"]
    ) -> Float[Array, "B S D"]:
        """Return the output of the shared experts times sigmoid(x w), in its dtype.

        Args:
            x: Normed input of the layer.
            shared: Output of the shared experts.
        """
        declaration = Declaration(
            shape=(self.embed_dim, 1), axes=(ax.NORM, ax.ROUTER_DIM), role="router"
        )
        logits = self.execution.placement.einsum(
            "bsd,do->bso",
            x.astype(jnp.float32),
            declare(self, "weight", declaration).astype(jnp.float32),
            axes=(ax.ACT_BATCH, ax.ACT_SEQ, None),
        )
        return (shared.astype(jnp.float32) * jax.nn.sigmoid(logits)).astype(shared.dtype)


class MoELayer(nn.Module):
    """A Mixture-of-Experts feed-forward layer."""

    moe: MoEConfig
    context: LayerContext
    execution: ExecutionConfig
    train: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], routing: RoutingInputs
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Route, compute and combine.

        Args:
            x: Normed input.
            routing: Arrays that the router may read beside it.

        Returns:
            The output in the compute dtype, and what routing reports.
        """
        moe = self.moe
        placement = self.execution.placement
        width = self.context.embed_dim
        router = moe.build_router(width)
        params = RouterParameters(router, name="router")()
        weights: dict[str, Any] = {}
        if routing.expert_outputs is None:
            weights = Experts(width, moe, name="experts")()
        free: dict[str, Any] = {}
        if moe.zero_computation is not None:
            free = ZeroComputationExperts(width, moe.zero_computation, name="zero_computation")()
        x = x.astype(self.execution.precision.compute_dtype)
        layout = moe_layout(moe, self.execution)
        computation = Computation(
            moe=moe,
            context=self.context,
            execution=self.execution,
            layout=layout,
            router=router,
            train=self.train,
        )
        arguments, axes = self._arguments(params, weights, free, routing, layout)
        row_axes, result_axes = _row_axes(layout)
        # Routers see whole sequences under a capacity, and tokens move after it.
        carry_axes = {"router_logits": (*row_axes, None), "expert_device": result_axes}
        carried = moe.carries(self.context, self.execution)
        routed = self._routed_input(x, routing)
        region = placement.region(
            computation.run,
            in_axes=((*row_axes, None), axes),
            out_axes=LocalOutputs(
                y=(*result_axes, None),
                statistics=(),
                carry={name: axes for name, axes in carry_axes.items() if name in carried},
                losses={balancer.name: () for balancer in computation.coupling_balancers},
                observed=observer_of(self.execution).expert_axes(moe, result_axes),
            ),
        )
        local_outputs = region(routed, arguments)
        carry = local_outputs.carry
        tokens = _of_rows(carry, (ax.ACT_BATCH, ax.ACT_SEQ))
        outputs = FeedForwardOutputs(
            statistics=local_outputs.statistics,
            losses=local_outputs.losses,
            carry={name: placement.place(array, tokens[name]) for name, array in carry.items()},
            observations=observer_of(self.execution).routing(
                RoutedCall(
                    x=routed,
                    statistics=local_outputs.statistics,
                    values=local_outputs.observed,
                    weights=weights,
                    routing=routing,
                    placement=placement,
                )
            ),
        )
        y = placement.place(local_outputs.y, (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))
        return self._add_shared(x, y, routing), outputs

    def _routed_input(self, x: Float[Array, "B S D"], routing: RoutingInputs) -> Array:
        """Return what the router and the routed experts read, in the compute dtype."""
        if self.moe.extras.routed_input == "layer":
            return x
        if SHORTCUT not in routing.carry:
            raise ValueError(
                f"moe.options.routed_input={self.moe.extras.routed_input}: no layer of the model"
                " carries a shortcut: name the feed-forward shortcut_dense in model.layers, or set"
                " moe.options.routed_input to layer"
            )
        return routing.carry[SHORTCUT].astype(x.dtype)

    def _add_shared(self, x: Array, y: Array, routing: RoutingInputs) -> Float[Array, "B S D"]:
        """Return the output of the routed experts with that of the shared ones, if there are any.

        Args:
            x: Normed input.
            y: Output of the routed experts.
            routing: Read for `mix`.
        """
        moe = self.moe
        if not moe.num_shared_experts:
            return y
        shared = FeedForward(
            self.context.embed_dim,
            moe.num_shared_units,
            self.execution,
            role_in="shared_in",
            role_out="shared_out",
            activation=moe.activation,
            name="shared",
        )(x, routing)[0]
        if moe.extras.has_shared_gate:
            gate = SharedGate(self.context.embed_dim, self.execution, name="shared_gate")
            shared = gate(x, shared)
        if moe.extras.shared_scale != 1.0:
            shared = shared * jnp.asarray(moe.extras.shared_scale, shared.dtype)
        return moe.gate.build().mix_shared(y, shared)

    def _arguments(
        self,
        params: dict[str, Array],
        weights: dict[str, Any],
        free: dict[str, Array],
        routing: RoutingInputs,
        layout: MoELayout,
    ) -> tuple[LocalInputs, LocalInputs]:
        """Return the arguments of the region, and their logical axes in the same record."""
        dtype, (row_axes, _) = self.execution.precision.compute_dtype, _row_axes(layout)
        factors = {name: as_factor(weight, dtype) for name, weight in weights.items()}
        names = self.moe.carries(self.context, self.execution)
        carry = {name: routing.carry[name] for name in names if name in routing.carry}
        kernel = self.execution.implementations.grouped_swiglu
        is_fused = is_by_kernel(self.moe.activation, factors) and reads_halves(kernel)
        if layout.gathers_width and self.execution.encoded_product is None and is_fused:
            factors = in_halves(factors)
        arguments = LocalInputs(
            router=params,
            weights=factors,
            constants=free,
            coupled=_merge(weights) if self.train and of_weights(self.moe.balancers) else {},
            routing=dataclasses.replace(routing, carry=carry, mix=None),
        )
        routing_axes: dict[str, Any] = {
            "token_mask": row_axes,
            "segment_ids": row_axes,
            "router_state": _whole(routing.router_state),
            "key": None if routing.key is None else (),
            "carry": _of_rows(carry, row_axes),
            "layer": None if routing.layer is None else (),
            "context": _of_rows(routing.context, row_axes),
            "expert_outputs": None if routing.expert_outputs is None else (None, None),
        }
        axes = LocalInputs(
            router=_whole(params),
            weights=self._weight_axes(factors, layout),
            constants=_whole(free),
            coupled=_whole(arguments.coupled),
            routing=RoutingInputs(**routing_axes),
        )
        return arguments, axes

    def _weight_axes(self, weights: dict[str, Any], layout: MoELayout) -> dict[str, Any]:
        """Return the logical axes of the experts' weights in the region, and their encoding."""
        axes = _whole(weights)
        if layout.experts.all:
            axes = {name: logical_axes(x, WEIGHT_AXES[name]) for name, x in weights.items()}
        product = self.execution.encoded_product
        # A dispatcher that lends experts to other devices encodes the weights after sending them.
        if product is None or self.execution.dispatcher.traits.lends_experts:
            return axes
        return encoded_axes(axes, product)


def _merge(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with the additions of adapters in them."""
    return {
        name: weight.merge() if isinstance(weight, LowRank) else weight
        for name, weight in weights.items()
    }


def _row_axes(layout: MoELayout) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Return the logical axes of [B S] arguments and of [B s] results."""
    row_axes = (ax.ACT_BATCH, ax.ACT_SEQ if layout.sequence_axes else None)
    return row_axes, (ax.ACT_BATCH, ax.ACT_SEQ if layout.is_spread else None)


def _of_rows(arrays: dict[str, Array], row_axes: tuple[str | None, ...]) -> dict[str, Any]:
    """Return the logical axes of arrays [B S ...] that are split by tokens only."""
    return {name: row_axes + (None,) * (array.ndim - 2) for name, array in arrays.items()}


def _whole(arrays: Any) -> Any:
    """Return axes that leave every array of a tree whole on each device."""
    return jax.tree.map(lambda array: (None,) * array.ndim, arrays)
