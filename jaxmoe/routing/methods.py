# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Published methods as named combinations of router, gate and balancers.

    dataclasses.replace(moe, **METHODS["mixtral"].parts())

Coefficients are the papers', in the unit of `balancers.py`: of each layer, and layers are added.
Papers seldom say how theirs are put together. Code that averages over layers (MegaBlocks, which
trained OLMoE) means this coefficient divided by their number: see `jaxmoe.models.presets`.

To add a method: one entry, with its source.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmoe.routing.balancers import LoadBalanceConfig, RouterZConfig
from jaxmoe.routing.capacity import CapacityConfig
from jaxmoe.routing.gates import RenormalizedGateConfig, SoftmaxGateConfig, SqrtGateConfig
from jaxmoe.routing.softmax_topk import SoftmaxTopKConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a paper fixes of a MoE layer's routing."""

    router: Any
    gate: Any = SoftmaxGateConfig()
    balancers: tuple[Any, ...] = ()
    capacity: CapacityConfig | None = None
    zero_computation: Any = None
    source: str

    def parts(self) -> dict[str, Any]:
        """Fields of MoEConfig."""
        return {
            "router": self.router,
            "gate": self.gate,
            "balancers": self.balancers,
            "capacity": self.capacity,
            "zero_computation": self.zero_computation,
        }


METHODS = {
    "switch": Method(
        router=SoftmaxTopKConfig(softmax="before"),
        gate=SoftmaxGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.01),),
        source="arXiv 2101.03961: top-1, probability as gate",
    ),
    "mixtral": Method(
        router=SoftmaxTopKConfig(softmax="after"),
        gate=SoftmaxGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.02),),
        source="arXiv 2401.04088, section 2.1",
    ),
    "olmoe": Method(
        router=SoftmaxTopKConfig(softmax="before"),
        gate=SoftmaxGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.01), RouterZConfig(coefficient=0.001)),
        source="arXiv 2409.02060",
    ),
    "qwen3": Method(
        router=SoftmaxTopKConfig(softmax="before"),
        gate=RenormalizedGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.001),),
        source="arXiv 2505.09388, section 2: renormalized top-k, global-batch balance",
    ),
    "hyperp": Method(
        router=SoftmaxTopKConfig(softmax="after"),
        gate=SqrtGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.1),),
        source="arXiv 2603.28743: SqrtGate, balance loss 0.1, no z-loss",
    ),
}
