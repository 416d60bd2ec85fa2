# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base classes of balancers: auxiliary losses of a MoE layer.

A balancer is a config and a pure function. Most are functions of the summed statistics
(`StatisticsBalancer`): the statistics are summed over all devices first, so the loss is that of the
global batch, the same on every mesh. Others are functions of the weights of router and experts
(`WeightsBalancer`), evaluated once per layer at a cost that does not depend on the batch. Losses of
several layers are added, not averaged: the coefficient is per layer.

To add a balancer: see `jaxmoe/routing/balancers/__init__.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Arrays, Key, RouterInputs, RouterOutput, RouterStatistics

BalanceScope = Literal["global", "micro_batch", "sequence"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BalancerTraits:
    """Properties of a balancer that the rest of the library depends on."""

    evens_load: bool = False
    """Penalises uneven load; refused by routers whose load is even by construction."""
    is_auxiliary_loss: bool = False
    """The load-balancing loss E sum_i f_i P_i of Switch, whose coefficient other libraries have."""
    needs_smooth_load: bool = False
    """Needs a router with `Traits.has_smooth_load`."""
    scope: BalanceScope = "global"
    """Tokens over which the load is summed."""


class Balancer(abc.ABC):
    """Base class of balancer configs."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    reads: ClassVar[Literal["statistics", "weights"]]
    coefficient: float
    """Weight in the loss."""

    @property
    def traits(self) -> BalancerTraits:
        """Properties of the balancer."""
        return BalancerTraits()

    def __post_init__(self):
        if not 0.0 <= self.coefficient < float("inf"):
            raise ValueError(
                f"coefficient={self.coefficient} of {self.name} must be finite and not negative"
            )


class StatisticsBalancer(Balancer):
    """Base class of configs of balancers that read the summed statistics."""

    __slots__ = ()

    reads: ClassVar[Literal["statistics", "weights"]] = "statistics"

    @property
    def traits(self) -> BalancerTraits:
        """Evens the load of the whole batch."""
        return BalancerTraits(evens_load=True)

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return additive, differentiable statistics beyond the fields of `RouterStatistics`."""
        del output, inputs
        return {}

    @abc.abstractmethod
    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer, with the arguments of `loss`."""

    def loss(self, statistics: RouterStatistics, *, num_free: int = 0) -> Float[Array, ""]:
        """Return the weighted loss, summed over layers.

        Args:
            statistics: Statistics summed over the tokens of the scope; may be stacked over layers.
            num_free: Number of experts without computation, which have the last ids.
        """
        return self.coefficient * jnp.sum(self.per_layer(statistics, num_free=num_free))


class WeightsBalancer(Balancer):
    """Base class of configs of balancers that read the weights of one layer."""

    __slots__ = ()

    reads: ClassVar[Literal["statistics", "weights"]] = "weights"
    router_parameters: ClassVar[tuple[str, ...]]
    """Names of the matrices [D E] that the router must have."""

    @abc.abstractmethod
    def coupling(self, router: Arrays, experts: Arrays, key: Key) -> Float[Array, ""]:
        """Return the weighted loss of one layer in training.

        Args:
            router: Unsharded parameters of the router.
            experts: Unsharded `gate_up [E D 2 F]` and `down [E F D]`.
            key: Key of the layer and step.
        """


def of_statistics(balancers: Iterable[Any]) -> tuple[StatisticsBalancer, ...]:
    """Return the balancers that are functions of the summed statistics."""
    return tuple(balancer for balancer in balancers if balancer.reads == "statistics")


def statistics_losses(
    balancers: Iterable[Any],
    statistics: RouterStatistics,
    batch_statistics: RouterStatistics | None = None,
    *,
    num_free: int = 0,
) -> dict[str, Float[Array, ""]]:
    """Return the weighted loss, summed over layers, of each balancer that reads statistics.

    Args:
        balancers: Balancers; those that read weights are left out.
        statistics: Statistics of a micro-batch, stacked over layers.
        batch_statistics: Statistics of all tokens so far, for balancers with scope `global`; those
            of the micro-batch when None.
        num_free: Number of experts without computation, which have the last ids.
    """
    wide = statistics if batch_statistics is None else batch_statistics
    losses = {}
    for balancer in of_statistics(balancers):
        read = wide if balancer.traits.scope == "global" else statistics
        losses[balancer.name] = balancer.loss(read, num_free=num_free)
    return losses


def of_weights(balancers: Iterable[Any]) -> tuple[WeightsBalancer, ...]:
    """Return the balancers that are functions of the weights of router and experts."""
    return tuple(balancer for balancer in balancers if balancer.reads == "weights")
