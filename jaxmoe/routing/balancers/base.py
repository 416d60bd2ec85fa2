# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Protocols of balancers: auxiliary losses of a MoE layer.

A balancer is a config and a pure function. Most are functions of the summed statistics
(`StatisticsBalancer`): the statistics are summed over all devices first, so the loss is that of the
global batch, the same on every mesh. Others are functions of the weights of router and experts
(`WeightsBalancer`), evaluated once per layer at a cost that does not depend on the batch. Losses of
several layers are added, not averaged: the coefficient is per layer.

To add a balancer: see `jaxmoe/routing/balancers/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterInputs, RouterOutput, RouterStatistics

BalanceScope = Literal["global", "micro_batch", "sequence"]


@runtime_checkable
class StatisticsBalancer(Protocol):
    """Loss of the summed statistics."""

    name: ClassVar[str]
    reads: ClassVar[Literal["statistics"]]
    evens_load: ClassVar[bool]
    """Penalises uneven load; refused by routers whose load is even by construction."""
    is_auxiliary_loss: ClassVar[bool]
    """The load-balancing loss E sum_i f_i P_i of Switch, whose coefficient other libraries have."""
    needs_smooth_load: ClassVar[bool]
    """Needs a router with `Traits.has_smooth_load`."""

    @property
    def coefficient(self) -> float:
        """Weight in the loss."""
        ...

    @property
    def scope(self) -> BalanceScope:
        """Tokens over which the load is summed."""
        ...

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> dict[str, Array]:
        """Return additive, differentiable statistics beyond the fields of `RouterStatistics`."""
        ...

    def loss(self, statistics: RouterStatistics, *, num_free: int = 0) -> Float[Array, ""]:
        """Return the weighted loss, summed over layers.

        Args:
            statistics: Statistics summed over the tokens of the scope; may be stacked over layers.
            num_free: Number of experts without computation, which have the last ids.
        """
        ...


@runtime_checkable
class WeightsBalancer(Protocol):
    """Loss of the weights of one layer's router and experts."""

    name: ClassVar[str]
    reads: ClassVar[Literal["weights"]]
    evens_load: ClassVar[bool]
    is_auxiliary_loss: ClassVar[bool]
    needs_smooth_load: ClassVar[bool]
    router_parameters: ClassVar[tuple[str, ...]]
    """Names of the matrices [D E] that the router must have."""

    @property
    def coefficient(self) -> float:
        """Weight in the loss."""
        ...

    def coupling(
        self,
        router: dict[str, Array],
        experts: dict[str, Array],
        key: Array | None,
    ) -> Float[Array, ""]:
        """Return the weighted loss of one layer in training.

        Args:
            router: Unsharded parameters of the router.
            experts: Unsharded `gate_up [E D 2 F]` and `down [E F D]`.
            key: Key of the layer and step.
        """
        ...


class BalancerBase:
    """Base class of balancer configs, with the defaults of what is asked about a balancer."""

    __slots__ = ()

    is_auxiliary_loss: ClassVar[bool] = False
    needs_smooth_load: ClassVar[bool] = False


class StatisticsBalancerBase(BalancerBase):
    """Base class of configs of balancers that read the statistics."""

    __slots__ = ()

    reads: ClassVar[Literal["statistics"]] = "statistics"

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> dict[str, Array]:
        """Return no further statistics."""
        del output, inputs
        return {}


def of_statistics(balancers: Iterable[Any]) -> tuple[StatisticsBalancer, ...]:
    """Return the balancers that are functions of the summed statistics."""
    return tuple(balancer for balancer in balancers if balancer.reads == "statistics")


def of_weights(balancers: Iterable[Any]) -> tuple[WeightsBalancer, ...]:
    """Return the balancers that are functions of the weights of router and experts."""
    return tuple(balancer for balancer in balancers if balancer.reads == "weights")


def check_coefficient(name: str, coefficient: float) -> None:
    """Check that the coefficient is finite and not negative.

    Raises:
        ValueError: it is not.
    """
    if not 0.0 <= coefficient < float("inf"):
        raise ValueError(f"coefficient={coefficient} of {name} must be finite and not negative")
