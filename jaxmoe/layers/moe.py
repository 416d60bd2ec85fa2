# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: router, gate, capacity, dispatcher, experts and shared experts, put together.

    selection = router.route(x)          who goes where
    gates     = gate(selection)          with what weight
    y         = sum over a token's experts of gate * expert(x)
    y         = gate.mix_shared(y, shared(x))          if there are shared experts

Everything from routing to combining runs in one island, on the tokens of one device. Statistics are
summed over devices there and returned, so that a loss of them is that of the global batch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.experts import Experts, apply_experts
from jaxmoe.layers.feed_forward import FeedForward
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.parameters import declare
from jaxmoe.routing import Router, RouterInputs, RouterStatistics
from jaxmoe.routing.capacity import limit
from sharding import axes as ax
from sharding.assignments import Assignments
from sharding.expert_parallel import expert_parallel
from sharding.expert_parallel.permute import loads


class RouterParameters(nn.Module):
    """Declares what a router says it needs."""

    router: Router

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """The router's parameters by name."""
        declarations = self.router.declarations()
        return {name: declare(self, name, declarations[name]) for name in declarations}


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer."""

    model: ModelConfig
    moe: MoEConfig
    execution: ExecutionConfig
    train: bool

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        token_mask: Bool[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        router_state: Any,
        key: Array | None,
    ) -> tuple[Float[Array, "B S D"], RouterStatistics]:
        """Routes, computes, combines.

        Args:
            x: normed input.
            token_mask: False for padding.
            segment_ids: document of each token.
            router_state: of this layer.
            key: for routers with noise.

        Returns:
            The output, and the statistics of the global batch.
        """
        moe, placement = self.moe, self.execution.placement
        router = build_router(self.model, moe)
        params = RouterParameters(router, name="router")()
        weights = Experts(self.model.embed_dim, moe, name="experts")()
        x = x.astype(self.execution.precision.compute_dtype)

        rows = (ax.ACT_BATCH, None)
        expert_axis = self.execution.dispatcher.expert_axis()
        arguments = {
            "params": (params, jax.tree.map(_whole, params)),
            "weights": (
                weights,
                jax.tree.map(lambda w: (expert_axis,) + (None,) * (w.ndim - 1), weights),
            ),
            "state": (router_state, jax.tree.map(_whole, router_state)),
            "keys": ({} if key is None else {"route": key}, {} if key is None else {"route": ()}),
            "token_mask": (token_mask, rows),
            "segment_ids": (segment_ids, rows),
        }
        island = placement.island(
            partial(_route_and_compute, router=router, layer=self),
            in_axes=((ax.ACT_BATCH, None, None), {k: axes for k, (_, axes) in arguments.items()}),
            out_axes=((ax.ACT_BATCH, None, None), ()),
        )
        routed, statistics = island(x, {name: value for name, (value, _) in arguments.items()})
        routed = placement.place(routed, (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))
        if not moe.num_shared_experts:
            return routed, statistics
        shared = FeedForward(
            self.model.embed_dim,
            moe.num_shared_experts * moe.expert_dim,
            self.execution,
            role_in="shared_in",
            role_out="shared_out",
            name="shared",
        )(x)
        return moe.gate.build().mix_shared(routed, shared), statistics


def build_router(model: ModelConfig, moe: MoEConfig) -> Router:
    """The router of this model's sizes."""
    return moe.router.build(num_experts=moe.num_experts, top_k=moe.top_k, embed_dim=model.embed_dim)


def _whole(array: Array) -> tuple[None, ...]:
    return (None,) * array.ndim


def _route_and_compute(
    x: Float[Array, "B S D"],
    given: dict[str, Any],
    *,
    batch_axes: tuple[str, ...],
    router: Router,
    layer: MoE,
) -> tuple[Float[Array, "B S D"], RouterStatistics]:
    """The island: local tokens, gathered weights, statistics summed over `batch_axes`."""
    moe, (batch, length, width) = layer.moe, x.shape
    tokens = x.reshape(batch * length, width)  # T, D
    multiplier = jnp.float32(layer.model.multipliers.router)
    inputs = RouterInputs(
        x=tokens.astype(jnp.float32) * multiplier,
        token_mask=given["token_mask"].reshape(-1),  # T
        segment_ids=given["segment_ids"].reshape(-1),  # T
    )
    key = given["keys"].get("route")
    output = router.route(given["params"], given["state"], inputs, train=layer.train, key=key)
    selection, statistics = output.selection, output.statistics
    assignments = Assignments(
        token_ids=selection.token_ids,
        expert_ids=selection.expert_ids,
        gates=moe.gate.build()(selection, selection.scores),
        top_k=selection.top_k,
    )
    if moe.capacity is not None:
        assignments = limit(
            assignments, moe.capacity, sequence_length=length, num_experts=moe.num_experts
        )
        kept = loads(assignments.expert_ids, moe.num_experts).astype(jnp.float32)
        statistics = dataclasses.replace(statistics, kept=kept)

    def experts(rows: Array, group_sizes: Array) -> Array:
        kernel = layer.execution.kernels.grouped_swiglu
        return apply_experts(rows, group_sizes, given["weights"], kernel)

    y = expert_parallel(
        tokens,
        assignments,
        experts,
        num_experts=moe.num_experts,
        config=layer.execution.dispatcher,
    )
    if batch_axes:
        statistics = jax.tree.map(lambda leaf: jax.lax.psum(leaf, batch_axes), statistics)
    return y.reshape(batch, length, width), statistics
