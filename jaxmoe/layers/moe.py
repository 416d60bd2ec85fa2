# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: router, gate, capacity, dispatcher, experts and shared experts, put together.

    selection = router.route(x)          who goes where
    gates     = gate(selection)          with what weight
    y         = sum over a token's experts of gate * expert(x)
    y         = gate.mix_shared(y, shared(x))          if there are shared experts

Everything from routing to combining runs in one island, on the tokens of one device. Statistics are
summed over devices there and returned, so that a loss of them is that of the global batch. Experts
without computation are applied where their tokens are: nothing of theirs is dispatched.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.experts import WEIGHT_AXES, Experts, apply_experts, encoded
from jaxmoe.layers.feed_forward import FeedForward
from jaxmoe.layers.indicators import mean_cosine, unit_rows
from jaxmoe.layers.moe_layout import MoELayout, moe_layout
from jaxmoe.layers.zero_computation import ZeroComputationExperts, apply_zero_computation
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.parameters import as_factor, declare
from jaxmoe.routing import (
    Extent,
    Router,
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Slots,
    SoftMoEConfig,
)
from jaxmoe.routing.balancers import WeightsBalancer, of_statistics, of_weights
from jaxmoe.routing.capacity import limit
from jaxmoe.routing.telemetry.detailed import observe
from pallas_kernels.jax_versions import agreed
from sharding import axes as ax
from sharding.assignments import Assignments, own_assignments, own_positions
from sharding.expert_parallel import LeastLoadedConfig, expert_parallel
from sharding.expert_parallel.permute import loads
from sharding.products.quantized import logical_axes


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class RoutingInputs:
    """What routing is told beside the activations; every field may be a part of one layer's."""

    token_mask: Bool[Array, "B S"]
    """False for padding."""
    segment_ids: Int[Array, "B S"]
    """Document of each token."""
    router_state: Any
    """Of this layer."""
    key: Array | None = None
    """Of this layer and step, for routers with noise."""
    previous_logits: Float[Array, "B S E"] | None = None
    """Of the MoE layer before, for routers that carry them."""
    layer: Int[Array, ""] | None = None
    """Counted over MoE layers."""
    context: dict[str, Array] = struct.field(default_factory=dict)
    """Further [B S] arrays for `RouterInputs.context`."""


@typing.no_type_check
@struct.dataclass
class RoutingOutputs:
    """What routing returns beside the activations."""

    statistics: RouterStatistics
    """Of the global batch."""
    logits: Float[Array, "B S E"] | None
    """For the next MoE layer, from routers that carry them."""
    losses: dict[str, Float[Array, ""]]
    """Of the balancers that look at this layer's weights, in training."""
    observed: dict[str, Float[Array, "B S"]] = struct.field(default_factory=dict)
    """Detailed telemetry of every token: see `_observe`."""


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
        self, x: Float[Array, "B S D"], routing: RoutingInputs
    ) -> tuple[Float[Array, "B S D"], RoutingOutputs]:
        """Routes, computes, combines.

        Args:
            x: normed input.
            routing: what the router may look at beside it.
        """
        moe, placement = self.moe, self.execution.placement
        router = build_router(self.model, moe)
        params = RouterParameters(router, name="router")()
        weights = Experts(self.model.embed_dim, moe, name="experts")()
        free = ZeroComputationExperts(self.model.embed_dim, moe, name="zero_computation")()
        dtype = self.execution.precision.compute_dtype
        x, layout = x.astype(dtype), moe_layout(moe, self.execution)

        rows = (ax.ACT_BATCH, ax.ACT_SEQ if layout.sequence_axes else None)
        results = (ax.ACT_BATCH, ax.ACT_SEQ if layout.is_spread else None)
        given = {
            "params": (params, jax.tree.map(_whole, params)),
            "free": (free, jax.tree.map(_whole, free)),
            "weights": (
                {name: as_factor(weight, dtype) for name, weight in weights.items()},
                self._weights_enter(weights, layout),
            ),
            "state": (routing.router_state, jax.tree.map(_whole, routing.router_state)),
            "token_mask": (routing.token_mask, rows),
            "segment_ids": (routing.segment_ids, rows),
            "context": (routing.context, jax.tree.map(lambda _: rows, routing.context)),
        }
        optional = {
            "key": (routing.key, ()),
            "layer": (routing.layer, ()),
            "previous_logits": (routing.previous_logits, (*rows, None)),
        }
        given |= {name: pair for name, pair in optional.items() if pair[0] is not None}
        losses = {balancer.name: () for balancer in self.coupling_balancers()}
        if losses:
            given["coupled"] = (weights, jax.tree.map(_whole, weights))
        carries = self.moe.router.traits.carries_logits
        island = placement.island(
            partial(_route_and_compute, router=router, layer=self, layout=layout),
            in_axes=((*rows, None), {name: axes for name, (_, axes) in given.items()}),
            out_axes=(
                (*results, None),
                (),
                {"logits": (*rows, None)} if carries else {},
                losses,
                dict.fromkeys(self.observed_names(), results),
            ),
        )
        arrays = {name: value for name, (value, _) in given.items()}
        routed, statistics, carry, losses, observed = island(x, arrays)
        logits = carry.get("logits")
        if logits is not None:
            logits = placement.place(logits, (ax.ACT_BATCH, ax.ACT_SEQ, None))
        outputs = RoutingOutputs(
            statistics=statistics, logits=logits, losses=losses, observed=observed
        )
        routed = placement.place(routed, (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))
        if not moe.num_shared_experts:
            return routed, outputs
        shared = FeedForward(
            self.model.embed_dim,
            moe.num_shared_experts * moe.expert_dim,
            self.execution,
            role_in="shared_in",
            role_out="shared_out",
            name="shared",
        )(x)
        return moe.gate.build().mix_shared(routed, shared), outputs

    def _weights_enter(self, weights: dict[str, Any], layout: MoELayout) -> dict[str, Any]:
        """Where the experts' weights lie in the island, and as what."""
        entered = jax.tree.map(_whole, weights)
        if layout.experts.all:
            entered = {name: logical_axes(x, WEIGHT_AXES[name]) for name, x in weights.items()}
        halo = self.execution.halo
        # Who borrows an expert is handed its weights, and encodes them.
        if halo is None or isinstance(self.execution.dispatcher, LeastLoadedConfig):
            return entered
        return encoded(entered, halo)

    def coupling_balancers(self) -> tuple[WeightsBalancer, ...]:
        """Those that look at this layer's weights: they belong to training alone."""
        return of_weights(self.moe.balancers) if self.train else ()

    def observed_names(self) -> tuple[str, ...]:
        """What `_observe` returns: nothing unless telemetry is detailed."""
        if self.execution.telemetry != "detailed":
            return ()
        has_pairs = self.moe.top_k > 1 and not isinstance(self.moe.router, SoftMoEConfig)
        return ("router_max_logit", *(("cosine", "has_pair") if has_pairs else ()))


def build_router(model: ModelConfig, moe: MoEConfig) -> Router:
    """The router of this model's sizes."""
    return moe.router.build(num_experts=moe.num_routed, top_k=moe.top_k, embed_dim=model.embed_dim)


def _whole(array: Array) -> tuple[None, ...]:
    return (None,) * array.ndim


def _route_and_compute(
    x: Float[Array, "B S D"],
    given: dict[str, Any],
    *,
    batch_axes: tuple[str, ...],
    router: Router,
    layer: MoE,
    layout: MoELayout,
) -> tuple[Float[Array, "B s D"], RouterStatistics, *tuple[dict[str, Array], ...]]:
    """The island: the tokens of one device; statistics are summed over all of them."""
    moe, (batch, length, width) = layer.moe, x.shape
    tokens = x.reshape(batch * length, width)  # T, D
    extent = Extent(
        sequence_length=length, sequence_axes=layout.sequence_axes, batch_axes=batch_axes
    )
    inputs = _router_inputs(tokens, given, layer.model, extent)
    output = router.route(
        given["params"], given["state"], inputs, train=layer.train, key=given.get("key")
    )
    assignments, statistics = _assign(output, inputs, moe, length)
    if layer.execution.telemetry == "detailed":
        extra = statistics.extra | observe(output, inputs)
        statistics = dataclasses.replace(statistics, extra=extra)

    logits = output.logits
    if layout.own_axes:
        tokens, logits = (own_positions(part, batch, layout.own_axes) for part in (tokens, logits))
        assignments = own_assignments(assignments, batch, layout.own_axes)
    dispatched = partial(
        expert_parallel,
        num_experts=moe.num_experts,
        config=layer.execution.dispatcher,
        axes=layout.experts,
    )
    slots = output.slots
    read = tokens if slots is None else _read_slots(tokens, slots)
    computed = _with_computation(assignments, moe.num_experts)
    experts = partial(
        apply_experts,
        implementation=layer.execution.kernels.grouped_swiglu,
        activations=layer.execution.precision.activations,
        halo=layer.execution.halo,
        expert_tensor=layout.experts.expert_tensor,
    )
    y, dropped = dispatched(read, computed, experts, given["weights"])
    if layout.own_axes:
        dropped = jax.lax.psum(dropped, layout.own_axes)
    kept = statistics.kept - jnp.pad(dropped, (0, moe.num_routed - moe.num_experts))
    statistics = dataclasses.replace(statistics, kept=kept)
    observed = _observe(layer, tokens, logits, computed, dispatched, experts, given["weights"])
    observed = {name: value.reshape(batch, -1) for name, value in observed.items()}
    if slots is not None:
        y = _write_slots(y, slots)
    if moe.zero_computation is not None:
        y = y + apply_zero_computation(tokens, assignments, given["free"], moe)
    if names := batch_axes + layout.sequence_axes:
        statistics = jax.tree.map(lambda leaf: jax.lax.psum(leaf, names), statistics)
    carry = {}
    if moe.router.traits.carries_logits and output.carry is not None:
        carry = {"logits": output.carry.reshape(batch, length, -1)}
    # Of weights alone, which are the same everywhere once they are gathered.
    losses = {
        balancer.name: agreed(
            balancer.coupling(given["params"], given["coupled"], given.get("key"))
        )
        for balancer in layer.coupling_balancers()
    }
    return y.reshape(batch, -1, width), statistics, carry, losses, observed


def _observe(
    layer: MoE,
    tokens: Float[Array, "T D"],
    logits: Float[Array, "T E"],
    assignments: Assignments,
    dispatched: Callable[..., tuple[Array, Array]],
    experts: Callable[..., Array],
    weights: dict[str, Any],
) -> dict[str, Float[Array, " T"]]:
    """The largest router logit of each token, and the mean cosine of its experts' outputs.

    `cosine` is 0 where `has_pair` is: see `jaxmoe/layers/indicators.py`.
    """
    names = layer.observed_names()
    if not names:
        return {}
    tokens, logits, weights = jax.lax.stop_gradient((tokens, logits, weights))
    observed = {"router_max_logit": jnp.max(logits, axis=-1)}
    if "cosine" in names:
        is_kept = (assignments.expert_ids < layer.moe.num_experts).astype(jnp.float32)

        def directions(weights: Any, rows: Array, group_sizes: Array) -> Array:
            return unit_rows(experts(weights, rows, group_sizes))

        alike = dataclasses.replace(assignments, gates=is_kept)
        unit_sum = dispatched(tokens, alike, directions, weights)[0].astype(jnp.float32)
        rows = jax.ops.segment_sum(is_kept, assignments.token_ids, tokens.shape[0])
        observed["cosine"], observed["has_pair"] = mean_cosine(unit_sum, rows)
    return observed


def _router_inputs(
    tokens: Float[Array, "T D"],
    given: dict[str, Any],
    model: ModelConfig,
    extent: Extent,
) -> RouterInputs:
    """The record of `given`, whose [B S] arrays become [T]."""
    context = {name: array.reshape(-1) for name, array in given["context"].items()}
    if "layer" in given:
        context["layer"] = given["layer"]
    previous = given.get("previous_logits")
    return RouterInputs(
        x=tokens.astype(jnp.float32) * jnp.float32(model.multipliers.router),
        token_mask=given["token_mask"].reshape(-1),  # T
        segment_ids=given["segment_ids"].reshape(-1),  # T
        previous_logits=None if previous is None else previous.reshape(tokens.shape[0], -1),
        context=context,
        extent=extent,
    )


def _assign(
    output: RouterOutput, inputs: RouterInputs, moe: MoEConfig, length: int
) -> tuple[Assignments, RouterStatistics]:
    """Gates, capacity and what the balancers want to see."""
    selection, statistics = output.selection, output.statistics
    assignments = Assignments(
        token_ids=selection.token_ids,
        expert_ids=selection.expert_ids,
        gates=moe.gate.build()(selection, selection.scores),
        top_k=selection.top_k,
    )
    if moe.capacity is not None:
        assignments = limit(
            assignments,
            moe.capacity,
            sequence_length=length,
            num_experts=moe.num_experts,
            num_free=moe.num_routed - moe.num_experts,
        )
        kept = loads(assignments.expert_ids, moe.num_routed).astype(jnp.float32)
        statistics = dataclasses.replace(statistics, kept=kept)
    extra = statistics.extra
    for balancer in of_statistics(moe.balancers):
        extra = extra | balancer.observe(output, inputs)
    return assignments, dataclasses.replace(statistics, extra=extra)


def _with_computation(assignments: Assignments, num_experts: int) -> Assignments:
    """Only those whose expert computes: the others become empty, and never enter dispatch."""
    is_computed = assignments.expert_ids < num_experts
    return dataclasses.replace(
        assignments,
        expert_ids=jnp.where(is_computed, assignments.expert_ids, num_experts),
        gates=jnp.where(is_computed, assignments.gates, 0.0),
    )


def _read_slots(tokens: Float[Array, "T D"], slots: Slots) -> Float[Array, "R D"]:
    """The mixtures of tokens that the experts read, sequence by sequence."""
    groups, length, number = slots.dispatch.shape
    x = tokens.astype(jnp.float32).reshape(groups, length, -1)
    mixed = jnp.einsum("gsp,gsd->gpd", slots.dispatch, x, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * number, -1).astype(tokens.dtype)  # G*P, D


def _write_slots(rows: Float[Array, "R D"], slots: Slots) -> Float[Array, "T D"]:
    """The mixtures of the experts' outputs that the tokens receive."""
    groups, length, number = slots.combine.shape
    y = rows.astype(jnp.float32).reshape(groups, number, -1)
    mixed = jnp.einsum("gsp,gpd->gsd", slots.combine, y, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * length, -1).astype(rows.dtype)  # T, D
