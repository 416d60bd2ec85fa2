# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines `MoEConfig`, the sizes and parts of a Mixture-of-Experts feed-forward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxmoe.catalog import choice
from jaxmoe.configs import check_choices
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.carry import CarriedArray
from jaxmoe.layers.context import (
    FeedForwardBase,
    FeedForwardSizes,
    LayerContext,
    require_positive,
)
from jaxmoe.layers.feed_forwards.activations import ActivationBase, SwiGLUConfig
from jaxmoe.routing.balancers.base import Balancer
from jaxmoe.routing.balancers.load_balance import LoadBalanceConfig
from jaxmoe.routing.balancers.router_z import RouterZConfig
from jaxmoe.routing.base import Router, RouterBase
from jaxmoe.routing.capacity import CapacityBase
from jaxmoe.routing.composition import check_parts
from jaxmoe.routing.gates import GateBase, RenormalizedGateConfig
from jaxmoe.routing.routers.token_choice.topk import SoftmaxTopKConfig
from jaxmoe.routing.zero_computation import ZeroComputationConfig
from sharding import axes as ax
from sharding.expert_parallel import Dispatcher
from sharding.expert_parallel.routes import TokenRoute

SHORTCUT: Final = "shortcut"
"""Name in the carry of the activations [B S D] that routed experts read with `routed_input`."""


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEOptions:
    """What published models add to a MoE layer; the defaults add nothing."""

    name: ClassVar[str] = "options"
    width_fields: ClassVar[tuple[str, ...]] = ("shared_dim",)

    shared_dim: int | None = None
    """Hidden units of the shared branch, of all its experts together; when None it has
    num_shared_experts * expert_dim. Needs num_shared_experts of 1 or more."""
    has_shared_gate: bool = False
    """Whether the output of the shared branch is multiplied by sigmoid(x w) of each token."""
    shared_scale: float = 1.0
    """Factor of the output of the shared branch."""
    has_expert_bias: bool = False
    """Whether the products of the routed experts have biases: gate_up_bias [E 2 F], and down_bias
    [E D] before the gate's factor (gpt-oss)."""
    routed_input: Literal["layer", "shortcut"] = "layer"
    """What the router and the routed experts read: the input of the layer, or what a layer before
    carries as its shortcut (ScMoE, LongCat-Flash); the shared branch reads the input."""

    def __post_init__(self):
        check_choices("moe.options", self)
        if self.shared_dim is not None and self.shared_dim < 1:
            raise ValueError(
                f"moe.options.shared_dim={self.shared_dim} must be at least 1; for a layer without"
                " shared experts set it to None and moe.num_shared_experts to 0"
            )
        require_positive("moe.options", self, "shared_scale")

    def check_unshared(self) -> None:
        """Check that nothing is about shared experts.

        Raises:
            ValueError: A field is.
        """
        for field, neutral in (
            ("shared_dim", None),
            ("has_shared_gate", False),
            ("shared_scale", 1.0),
        ):
            if (value := getattr(self, field)) != neutral:
                raise ValueError(
                    f"moe.options.{field}={value} is about shared experts, and"
                    " moe.num_shared_experts is 0: set moe.num_shared_experts to 1 or more, or"
                    f" moe.options.{field} to {neutral}"
                )


_NO_OPTIONS = MoEOptions()


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(FeedForwardBase):
    """A Mixture-of-Experts feed-forward layer: router, gate, balancers, capacity, experts."""

    name: ClassVar[str] = "moe"
    module_name: ClassVar[str] = "moe"
    is_routed: ClassVar[bool] = True
    width_fields: ClassVar[tuple[str, ...]] = ("expert_dim", "options")

    num_experts: int = 8
    """Routed experts (E)."""
    top_k: int = 2
    """Routed experts per token (K); shared experts are not counted."""
    expert_dim: int = 128
    """Hidden units of one expert (F)."""
    activation: ActivationBase = SwiGLUConfig()
    """Function of the projections of a token, in routed and shared experts."""
    num_shared_experts: int = 0
    """Experts applied to every token, which are computed as one; 0: there is no shared branch."""
    router: RouterBase = SoftmaxTopKConfig()
    """Rule by which experts are chosen."""
    gate: GateBase = RenormalizedGateConfig()
    """Factor of each chosen expert's output."""
    balancers: tuple[Balancer, ...] = (LoadBalanceConfig(), RouterZConfig())
    """Losses that keep the load even and the logits small."""
    capacity: CapacityBase | None = None
    """Limit or grain of the load of an expert; the router's choice as it is when None."""
    zero_computation: ZeroComputationConfig | None = None
    """Further experts that the router may choose, which compute nothing; not in num_experts."""
    options: MoEOptions | None = None
    """What some published models add; nothing when None."""

    def __post_init__(self):
        check_choices("moe", self)
        require_positive("moe", self, "num_experts", "top_k", "expert_dim")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k={self.top_k} must not exceed moe.num_experts={self.num_experts}"
            )
        if self.num_shared_experts < 0:
            raise ValueError(f"moe.num_shared_experts={self.num_shared_experts} must be 0 or more")
        if not self.num_shared_experts:
            self.extras.check_unshared()
        names = [balancer.name for balancer in self.balancers]
        if len(set(names)) != len(names):
            raise ValueError(f"moe.balancers names one balancer twice: {', '.join(names)}")
        self.build_router(embed_dim=1)  # the router validates the sizes
        check_parts(self)

    @property
    def extras(self) -> MoEOptions:
        """The options, neutral ones where there are none."""
        return self.options or _NO_OPTIONS

    @property
    def num_shared_units(self) -> int:
        """Hidden units of the shared branch; 0 without one."""
        if self.extras.shared_dim is not None:
            return self.extras.shared_dim
        return self.num_shared_experts * self.expert_dim

    @property
    def num_routed(self) -> int:
        """Experts that the router chooses from, those without computation last."""
        return self.num_experts + (self.zero_computation.total if self.zero_computation else 0)

    @property
    def num_zero_computation(self) -> int:
        """Experts without computation that the router chooses from, which have the last ids."""
        return self.num_routed - self.num_experts

    @property
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""
        adds = None if self.capacity is None else self.capacity.traits
        return FeedForwardSizes(
            row_slots=self.num_experts * (0 if adds is None else adds.row_slots),
            batch_slots=self.num_experts * (0 if adds is None else adds.batch_slots),
            shared_dim=self.num_shared_units,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            num_projections=self.activation.num_projections,
        )

    @property
    def keeps_order(self) -> bool:
        """Whether rows must be in the order of their tokens: a limit fills up in that order."""
        return self.capacity is not None and self.capacity.traits.needs_sequences

    @property
    def is_token_major(self) -> bool:
        """Whether assignments are in the order of the tokens, K for each."""
        adds = self.capacity is not None and not self.capacity.traits.is_token_major
        return self.router.traits.is_token_major and not adds

    def build_router(self, embed_dim: int) -> Router:
        """Return the router.

        Args:
            embed_dim: D.
        """
        return self.router.build(num_experts=self.num_routed, top_k=self.top_k, embed_dim=embed_dim)

    def carries(self, context: LayerContext, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return what the next MoE layer reads: logits for its router, places for its tokens.

        `expert_device` is the device of the expert axes with most of the token's experts, -1 before
        the first MoE layer.
        """
        del context
        arrays = {}
        if self.router.traits.carries_logits:
            arrays["router_logits"] = CarriedArray(features=(self.num_routed,))
        if current_route(execution) is not None:
            arrays["expert_device"] = CarriedArray(dtype=jnp.int32, fill=-1)
        return arrays

    def check_execution(
        self, execution: ExecutionConfig, *, sequences: int, length: int, mesh: Mapping[str, int]
    ) -> None:
        """Check that the experts can be spread; see `check_layout`."""
        from jaxmoe.layers.feed_forwards.moe.layout import check_layout  # noqa: PLC0415 (as below)

        check_layout(self, execution, sequences=sequences, length=length, mesh=mesh)

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> nn.Module:
        """Return the module of one layer."""
        from jaxmoe.layers.feed_forwards.moe.layer import MoELayer  # noqa: PLC0415 (it imports this)

        return MoELayer(self, context, execution, train, name=name)


def token_route(dispatcher: Dispatcher) -> TokenRoute | None:
    """Return how a dispatcher lets tokens move before they are dispatched; None: they stay.

    Args:
        dispatcher: The dispatcher.
    """
    if dispatcher.traits.token_route is None:
        return None
    name, argument = dispatcher.traits.token_route
    return choice("token_route", name)(argument)


def current_route(execution: ExecutionConfig) -> TokenRoute | None:
    """Return how tokens move between devices of the current mesh; None: they stay.

    Args:
        execution: Dispatcher and rules.
    """
    if (route := token_route(execution.dispatcher)) is None:
        return None
    axes = execution.placement.mesh_axes(ax.EXPERTS)
    sizes = jax.sharding.get_abstract_mesh().shape
    return route if math.prod(sizes[axis] for axis in axes) > 1 else None
