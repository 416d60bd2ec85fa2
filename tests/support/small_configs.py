# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A small tree of configs with unions, tuples and checks, for tests of JSON and command line."""

import dataclasses
from typing import ClassVar, Literal


def config(cls):
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


@config
class Softmax:
    """Softmax, then the largest."""

    name: ClassVar[str] = "softmax"
    order: Literal["before", "after"] = "before"
    """Softmax before or after the choice."""


@config
class Sigmoid:
    """Sigmoid scores."""

    name: ClassVar[str] = "sigmoid_topk"
    groups: int = 1
    """Groups of experts."""

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"router.groups={self.groups} must be at least 1")


@config
class SqrtGate:
    """Square root; the only member."""

    name: ClassVar[str] = "sqrt"


@config
class Balance:
    """Load-balancing loss."""

    name: ClassVar[str] = "balance"
    coefficient: float = 0.01
    """Weight of the loss."""


@config
class Bias:
    """Bias without a loss."""

    name: ClassVar[str] = "expert_bias"
    rate: float = 1e-3
    """Step of the bias."""


@config
class MoE:
    """Experts."""

    num_experts: int = 8
    """Routed experts."""
    top_k: int = 2
    """Experts per token."""
    router: Softmax | Sigmoid = Softmax()
    """Choice of experts."""
    gate: SqrtGate = SqrtGate()
    """Union with one member."""
    balancers: tuple[Balance | Bias, ...] = (Balance(),)
    """Balancers of the load."""

    def __post_init__(self):
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k={self.top_k} must not exceed moe.num_experts={self.num_experts}"
            )
        if len(self.balancers) == 2 and self.router == Softmax(order="after"):
            raise ValueError("two balancers need another router")


@config
class Model:
    """A model."""

    moe: MoE | None = MoE()
    """Experts of the model."""
    layers: tuple[int, ...] = ()
    """Layers without experts."""
    pair: tuple[int, float] = (1, 2.0)
    """Two numbers."""
    window: int | None = None
    """Positions seen."""
    decay: float | None = None
    """Decay by distance."""
    is_tied: bool = False
    """One matrix for both ends."""


@config
class Run:
    """A run."""

    name: str = "first"
    """Name of the run."""
    model: Model = Model()
    """Model of the run."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
