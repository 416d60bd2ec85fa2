# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a MoE layer on the tokens of one device: route, dispatch, compute, combine.

`Computation.run` is the body of the layer's region. Experts without computation are applied where
their tokens are and are not dispatched.
"""

from __future__ import annotations

import dataclasses
import typing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.layers.feed_forwards.moe.layout import MoELayout
from jaxmoe.layers.feed_forwards.moe.zero_computation import apply_zero_computation
from jaxmoe.layers.observer import ExpertCall, Observer, observer_of
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.routing import Extent, Router, RouterInputs, RouterOutput, RouterStatistics, Slots
from jaxmoe.routing.balancers import WeightsBalancer, of_statistics, of_weights
from jaxmoe.routing.capacity import RouterChoice
from jaxmoe.routing.replay import EXPERTS
from pallas_kernels.jax_versions import as_unvarying
from sharding.assignments import Assignments, combine, own_assignments, own_positions
from sharding.expert_parallel import expert_parallel
from sharding.expert_parallel.permute import loads
from sharding.expert_parallel.routes import TokenMoves


# Records are not checked at run time: tree functions also fill them with shapes, specs and axes.
@typing.no_type_check
@struct.dataclass
class LocalInputs:
    """Arguments of the region beside the activations, or their logical axes.

    An absent argument is None, and so are its axes.
    """

    router: dict[str, Array]
    """Parameters of the router."""
    weights: dict[str, Any]
    """Weights of the experts held by a device, in the compute dtype, quantised or encoded."""
    constants: dict[str, Array]
    """Parameters of the experts without computation."""
    coupled: dict[str, Any]
    """All experts' weights as stored, for balancers that read them; empty otherwise."""
    routing: RoutingInputs
    """Inputs of the router, of the carried arrays those that `MoEConfig.carries` names."""


@typing.no_type_check
@struct.dataclass
class LocalOutputs:
    """Results of the region, or their logical axes."""

    y: Any
    """Combined output of the routed experts [B s D]."""
    statistics: Any
    """`RouterStatistics`."""
    carry: dict[str, Any]
    """What the next MoE layer reads: router logits [B S E], and the device of each token [B s]."""
    losses: dict[str, Any]
    """Losses [] of the balancers that read weights."""
    observed: dict[str, Any]
    """Values of every token [B s ...], from `Observer.experts`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The static part of the region."""

    moe: MoEConfig
    """Sizes and parts."""
    context: LayerContext
    """Model-wide numbers."""
    execution: ExecutionConfig
    """Dispatcher, kernels and precision."""
    layout: MoELayout
    """Mesh axes of the region."""
    router: Router
    """The router, built."""
    train: bool
    """Whether routers behave as in training."""

    def run(
        self, x: Float[Array, "B S D"], local: LocalInputs, *, batch_axes: tuple[str, ...]
    ) -> LocalOutputs:
        """Compute the routed experts for the tokens of one device.

        Args:
            x: Activations in the compute dtype.
            local: The other arguments.
            batch_axes: Mesh axes over which sequences are spread.
        """
        moe, layout, (batch, length, width) = self.moe, self.layout, x.shape
        routing = local.routing
        key = routing.key
        sequence_axes = layout.sequence_axes
        tokens = x.reshape(batch * length, width)  # T, D

        # Route: experts, gates and capacity.
        extent = Extent(sequence_length=length, sequence_axes=sequence_axes, batch_axes=batch_axes)
        inputs = _router_inputs(tokens, routing, self.context.multipliers.router, extent)
        output = self.router.route(
            local.router, routing.router_state, inputs, train=self.train, key=key
        )
        observer = observer_of(self.execution)
        assignments, statistics = assign(output, inputs, moe, observer, train=self.train, key=key)
        logits = output.logits
        if layout.own_axes:  # whole sequences were routed; continue with the device's own positions
            tokens, logits = (own_positions(a, batch, layout.own_axes) for a in (tokens, logits))
            assignments = own_assignments(assignments, batch, layout.own_axes)

        # Dispatch, compute and combine.
        dispatch_assignments = _without_zero_computation(assignments, moe.num_experts)
        rows = tokens if output.slots is None else _read_slots(tokens, output.slots)
        moves = self._token_moves(routing)
        dispatch = partial(self._dispatcher(), moves=moves)
        outputs = routing.expert_outputs
        if outputs is None:
            y, dropped = dispatch(rows, dispatch_assignments, self._experts(), local.weights)
        else:
            y = combine(outputs, dispatch_assignments, tokens.shape[0])
            dropped = jnp.zeros((moe.num_experts,), jnp.float32)
        if not layout.is_spread:  # equal along axes of one device, which the type must say
            further_axes = (axis for axis in layout.experts.all if axis not in batch_axes)
            single = tuple(axis for axis in further_axes if jax.lax.axis_size(axis) == 1)
            y, dropped = jax.lax.psum((y, dropped), single)
        if output.slots is not None:
            y = _write_slots(y, output.slots)
        if moe.zero_computation is not None:
            y = y + apply_zero_computation(
                tokens, assignments, local.constants, moe.zero_computation, moe.num_experts
            )

        # Report.
        if layout.own_axes:
            dropped = jax.lax.psum(dropped, layout.own_axes)
        num_kept = statistics.kept - jnp.pad(dropped, (0, moe.num_zero_computation))
        statistics = dataclasses.replace(statistics, kept=num_kept)
        carry = {}
        if moves is not None:
            ids = dispatch_assignments.expert_ids.reshape(-1, moe.top_k)
            measures = moves.measures(ids, moe.num_experts, layout.experts)
            if layout.own_axes:
                measures = jax.lax.psum(measures, layout.own_axes)
            statistics = dataclasses.replace(statistics, extra=statistics.extra | measures)
            device = moves.carry_tokens(ids, moe.num_experts, layout.experts)
            carry["expert_device"] = device.reshape(batch, -1)
        if names := batch_axes + sequence_axes:
            statistics = jax.tree.map(lambda leaf: jax.lax.psum(leaf, names), statistics)
        if moe.router.traits.carries_logits and output.carry is not None:
            carry["router_logits"] = output.carry.reshape(batch, length, -1)
        return LocalOutputs(
            y=y.reshape(batch, -1, width),
            statistics=statistics,
            carry=carry,
            losses=self._losses(local, key),
            observed=self._observe(tokens, logits, dispatch_assignments, local.weights, batch),
        )

    def _token_moves(self, routing: RoutingInputs) -> TokenMoves | None:
        """Return how the tokens move, from what is known before routing; None: they stay."""
        if self.layout.route is None:
            return None
        assert routing.layer is not None  # routes of tokens are of whole models
        arrays = (routing.context["tokens"], routing.token_mask, routing.carry["expert_device"])
        batch = arrays[0].shape[0]
        own_axes = self.layout.own_axes
        arrays = tuple(array.reshape(-1) for array in arrays)
        if own_axes:
            arrays = tuple(own_positions(array, batch, own_axes) for array in arrays)
        devices = jax.lax.axis_size(self.layout.experts.expert)
        return self.layout.route.moves(routing.layer, *arrays, num_devices=devices)

    @property
    def coupling_balancers(self) -> tuple[WeightsBalancer, ...]:
        """Balancers that read this layer's weights; none outside training."""
        return of_weights(self.moe.balancers) if self.train else ()

    def _dispatcher(self) -> Any:
        return partial(
            expert_parallel,
            num_experts=self.moe.num_experts,
            config=self.execution.dispatcher,
            axes=self.layout.experts,
            reads_tokens=self.execution.implementations.expert_rows == "indexed",
        )

    def _experts(self) -> Any:
        return partial(
            apply_experts,
            activation=self.moe.activation,
            scales_input=self.moe.gate.scales_input,
            implementation=self.execution.implementations.grouped_swiglu,
            activations=self.execution.precision.activations,
            encoded=self.execution.encoded_product,
            expert_tensor=self.layout.experts.expert_tensor,
            gathers_width=self.layout.gathers_width,
        )

    def _observe(
        self, tokens: Array, logits: Array, assignments: Assignments, weights: Any, batch: int
    ) -> dict[str, Array]:
        """Return what the observer sees of every token [B s]."""
        call = ExpertCall(
            tokens=tokens,
            logits=logits,
            assignments=assignments,
            dispatch=self._dispatcher(),
            experts=self._experts(),
            weights=weights,
            expert_tensor=self.layout.experts.expert_tensor,
        )
        observed = observer_of(self.execution).experts(self.moe, call)
        return {
            name: value.reshape(batch, -1, *value.shape[1:]) for name, value in observed.items()
        }

    def _losses(self, local: LocalInputs, key: Array | None) -> dict[str, Array]:
        """Return the losses of weights, which are equal on all devices once gathered."""
        return {
            balancer.name: as_unvarying(balancer.coupling(local.router, local.coupled, key))
            for balancer in self.coupling_balancers
        }


def _router_inputs(
    tokens: Float[Array, "T D"], routing: RoutingInputs, multiplier: float, extent: Extent
) -> RouterInputs:
    """Return the inputs of a router, whose [B S] arrays become [T], of recorded experts [T K].

    Args:
        tokens: Activations.
        routing: Inputs of the region.
        multiplier: Factor of the router logits.
        extent: Place of the tokens in the batch.
    """
    context = dict(routing.context)
    replayed = None
    if EXPERTS in context:
        experts = context.pop(EXPERTS).astype(jnp.int32)
        replayed = jax.lax.dynamic_index_in_dim(experts, routing.layer, axis=2, keepdims=False)
        replayed = replayed.reshape(tokens.shape[0], -1)
    context = {name: array.reshape(-1) for name, array in context.items()}
    if routing.layer is not None:
        context["layer"] = routing.layer
    previous = routing.carry.get("router_logits")
    return RouterInputs(
        x=tokens.astype(jnp.float32) * jnp.float32(multiplier),
        token_mask=routing.token_mask.reshape(-1),  # T
        segment_ids=routing.segment_ids.reshape(-1),  # T
        previous_logits=None if previous is None else previous.reshape(tokens.shape[0], -1),
        context=context,
        replayed=replayed,
        extent=extent,
    )


def assign(
    output: RouterOutput,
    inputs: RouterInputs,
    moe: MoEConfig,
    observer: Observer,
    *,
    train: bool = False,
    key: Array | None = None,
) -> tuple[Assignments, RouterStatistics]:
    """Apply the gate and the capacity to a router's selection.

    Args:
        output: Output of the router.
        inputs: Its inputs.
        moe: Gate, capacity and balancers.
        observer: Observer of the router.
        train: Whether a capacity for training acts.
        key: Key of this layer and step; None where no random numbers are drawn.

    Returns:
        The assignments of tokens to experts, and the statistics of this device's tokens.
    """
    gate = moe.gate.build()
    choice = RouterChoice(
        gate.assign(output.selection),
        output,
        inputs,
        gate,
        num_experts=moe.num_experts,
        num_free=moe.num_zero_computation,
        key=key,
    )
    assignments = choice.assignments
    statistics = output.statistics
    extra = statistics.extra
    capacity = moe.capacity
    if capacity is not None and (train or not capacity.traits.is_for_training):
        assignments, more = capacity.assign(choice)
        num_kept = loads(assignments.expert_ids, moe.num_routed).astype(jnp.float32)
        statistics = dataclasses.replace(statistics, kept=num_kept)
        extra = extra | more
    for balancer in of_statistics(moe.balancers):
        extra = extra | balancer.observe(output, inputs)
    extra = extra | observer.router(output, inputs)
    return assignments, dataclasses.replace(statistics, extra=extra)


def _without_zero_computation(assignments: Assignments, num_experts: int) -> Assignments:
    """Empty the assignments to experts without computation, so that they are not dispatched.

    Args:
        assignments: Assignments to all experts.
        num_experts: Experts that compute; those without computation have higher numbers.
    """
    is_computed = assignments.expert_ids < num_experts
    return dataclasses.replace(
        assignments,
        expert_ids=jnp.where(is_computed, assignments.expert_ids, num_experts),
        gates=jnp.where(is_computed, assignments.gates, 0.0),
    )


def _read_slots(tokens: Float[Array, "T D"], slots: Slots) -> Float[Array, "R D"]:
    """Return the mixtures of tokens that the experts read, sequence by sequence.

    Args:
        tokens: Activations of whole sequences.
        slots: Weights of the mixtures.
    """
    groups, length, number = slots.dispatch.shape
    x = tokens.astype(jnp.float32).reshape(groups, length, -1)
    mixed = jnp.einsum("gsp,gsd->gpd", slots.dispatch, x, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * number, -1).astype(tokens.dtype)  # G*P, D


def _write_slots(rows: Float[Array, "R D"], slots: Slots) -> Float[Array, "T D"]:
    """Return the mixtures of the experts' outputs that the tokens receive.

    Args:
        rows: Outputs of the experts.
        slots: Weights of the mixtures.
    """
    groups, length, number = slots.combine.shape
    y = rows.astype(jnp.float32).reshape(groups, number, -1)
    mixed = jnp.einsum("gsp,gpd->gsd", slots.combine, y, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * length, -1).astype(rows.dtype)  # T, D
