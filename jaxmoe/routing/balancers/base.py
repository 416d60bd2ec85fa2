# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The protocols of balancers: what keeps the experts evenly loaded, and the logits small.

A balancer is a config and a pure function. Most are functions of the summed statistics
(`StatisticsBalancer`): summed over all devices first, they are the loss of the global batch, the
same on every mesh. A few look at the weights of router and experts instead (`WeightsBalancer`),
once per layer, at a cost that does not depend on the batch. Losses of several layers are added,
not averaged: the coefficient is per layer.

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
    """A loss of the summed statistics."""

    name: ClassVar[str]
    reads: ClassVar[Literal["statistics"]]
    evens_load: ClassVar[bool]
    """Whether it is against uneven load: refused by routers whose load is even by construction."""

    @property
    def coefficient(self) -> float:
        """Weight in the loss."""
        ...

    @property
    def scope(self) -> BalanceScope:
        """Tokens that are taken together."""
        ...

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> dict[str, Array]:
        """Additive statistics that it needs beyond `RouterStatistics`, differentiable."""
        ...

    def loss(self, statistics: RouterStatistics, *, num_free: int = 0) -> Float[Array, ""]:
        """Weighted, summed over layers.

        Args:
            statistics: summed over the tokens in question; may be stacked over layers.
            num_free: how many of the experts, the last ones, compute nothing.
        """
        ...


@runtime_checkable
class WeightsBalancer(Protocol):
    """A loss of the weights of one layer's router and experts."""

    name: ClassVar[str]
    reads: ClassVar[Literal["weights"]]
    evens_load: ClassVar[bool]
    router_parameters: ClassVar[tuple[str, ...]]
    """Matrices [D E] that the router must have."""

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
        """Weighted loss of one layer, in training.

        Args:
            router: parameters of the router, whole.
            experts: `gate_up [E D 2 F]` and `down [E F D]`, whole.
            key: of the layer and step.
        """
        ...


def of_statistics(balancers: Iterable[Any]) -> tuple[StatisticsBalancer, ...]:
    """Those that are functions of the summed statistics."""
    return tuple(balancer for balancer in balancers if balancer.reads == "statistics")


def of_weights(balancers: Iterable[Any]) -> tuple[WeightsBalancer, ...]:
    """Those that look at the weights of router and experts."""
    return tuple(balancer for balancer in balancers if balancer.reads == "weights")


def check_coefficient(name: str, coefficient: float) -> None:
    """Refuses a weight that is no weight.

    Raises:
        ValueError: naming the balancer.
    """
    if not 0.0 <= coefficient < float("inf"):
        raise ValueError(f"coefficient={coefficient} of {name} must be finite and not negative")
