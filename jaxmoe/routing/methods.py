# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Published methods as named combinations of router, gate, balancers, capacity.

    dataclasses.replace(moe, **METHODS["mixtral"].parts())

Coefficients are those of the papers in the unit of `balancers`: per layer, and layers are added.
Papers rarely specify the reduction over layers; code that averages (MegaBlocks, which trained
OLMoE) corresponds to this coefficient divided by the number of layers: see `jaxmoe.models.presets`.
Sizes (E, K, groups of experts) are not part of a method: DeepSeek's group limit is `router.groups`.
The unit of MoE++'s loss depends on the sizes, so its 0.01 is taken as is:
`balancers/heterogeneous.py`.

To add a method: a row with its source in `jaxmoe/routing/methods.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from jaxmoe import routing
from jaxmoe.routing.capacity import CapacityBase, CapacityConfig
from jaxmoe.routing.gates import SoftmaxGateConfig
from jaxmoe.routing.zero_computation import ZeroComputationConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingMethod:
    """Routing of a MoE layer as published."""

    source: str
    router: Any
    _: dataclasses.KW_ONLY
    gate: Any = SoftmaxGateConfig()
    balancers: tuple[Any, ...] = ()
    capacity: CapacityBase | None = None
    zero_computation: ZeroComputationConfig | None = None

    def parts(self) -> dict[str, Any]:
        """Return the fields of MoEConfig that the method sets."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "source")
        return {name: getattr(self, name) for name in names}

    def sized_for(self, *, steps: int, rows_per_expert: float) -> RoutingMethod:
        """Return the method with what depends on the run adapted to it.

        Args:
            steps: Optimiser steps of the run.
            rows_per_expert: Mean assignments per expert and sequence of a top-k router of the same
                cost.
        """
        capacity = self.capacity
        if capacity is not None:
            capacity = capacity.sized_for(rows_per_expert=rows_per_expert)
        router = self.router.sized_for(steps=steps, rows_per_expert=rows_per_expert)
        return dataclasses.replace(self, router=router, capacity=capacity)


class _Methods(MutableMapping[str, RoutingMethod]):
    """Methods by name, each made when it is looked up, so that the others' files are not read."""

    def __init__(self, rows: Mapping[str, Callable[[], RoutingMethod]]):
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> RoutingMethod:
        return self._rows[name]()

    def __setitem__(self, name: str, method: RoutingMethod) -> None:
        self._rows[name] = lambda: method

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


_ROWS: Final[dict[str, Callable[[], RoutingMethod]]] = {
    # Balance losses.
    "switch": lambda: RoutingMethod(
        "arXiv 2101.03961: top-1, probability as gate, input jitter",
        routing.SoftmaxTopKConfig(softmax="before", jitter=0.01),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01, scope="micro_batch"),),
    ),
    "mixtral": lambda: RoutingMethod(
        "arXiv 2401.04088, section 2.1",
        routing.SoftmaxTopKConfig(softmax="after"),
        balancers=(routing.LoadBalanceConfig(coefficient=0.02),),
    ),
    "olmoe": lambda: RoutingMethod(
        "arXiv 2409.02060",
        routing.SoftmaxTopKConfig(softmax="before"),
        balancers=(
            routing.LoadBalanceConfig(coefficient=0.01),
            routing.RouterZConfig(coefficient=0.001),
        ),
    ),
    "qwen3": lambda: RoutingMethod(
        "arXiv 2505.09388, section 2: renormalized top-k, global-batch balance",
        routing.SoftmaxTopKConfig(softmax="before"),
        gate=routing.RenormalizedGateConfig(),
        balancers=(routing.LoadBalanceConfig(coefficient=0.001),),
    ),
    "hyperp": lambda: RoutingMethod(
        "arXiv 2603.28743: SqrtGate, balance loss 0.1, no z-loss",
        routing.SoftmaxTopKConfig(softmax="after"),
        gate=routing.SqrtGateConfig(),
        balancers=(routing.LoadBalanceConfig(coefficient=0.1),),
    ),
    "global_balance": lambda: RoutingMethod(
        "arXiv 2501.11873: balance over the global batch, weight 0.008",
        routing.SoftmaxTopKConfig(softmax="before"),
        balancers=(
            routing.LoadBalanceConfig(coefficient=0.008),
            routing.RouterZConfig(coefficient=0.001),
        ),
    ),
    "sequence_balance": lambda: RoutingMethod(
        "arXiv 2501.11873: the scope to which the global batch is compared",
        routing.SoftmaxTopKConfig(softmax="before"),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01, scope="sequence"),),
    ),
    "noisy_topk": lambda: RoutingMethod(
        "arXiv 1701.06538: learned noise, importance and load losses of weight 0.1",
        routing.NoisyTopKConfig(),
        balancers=(routing.ImportanceVariationConfig(), routing.LoadVariationConfig()),
    ),
    "gshard": lambda: RoutingMethod(
        "arXiv 2006.16668: top-2, the second dropped at random; capacity is set apart",
        routing.GShardConfig(),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01),),
    ),
    "x_moe": lambda: RoutingMethod(
        "arXiv 2204.09179: cosine of low-rank projections",
        routing.CosineTopKConfig(),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01),),
    ),
    "erc": lambda: RoutingMethod(
        "arXiv 2512.23447: expert-router coupling loss beside the balance loss",
        routing.SoftmaxTopKConfig(softmax="before"),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01), routing.CouplingConfig()),
    ),
    "sigma": lambda: RoutingMethod(
        "arXiv 2512.16248: more experts in low layers until switch_step, set by the run",
        routing.ProgressiveTopKConfig(early_top_k=(2,), final_top_k=1, switch_step=100),
        balancers=(routing.LoadBalanceConfig(coefficient=0.01),),
    ),
    "top_one_balance": lambda: RoutingMethod(
        "arXiv 2512.16248, discussion: its loss for one expert per token",
        routing.SoftmaxTopKConfig(softmax="before"),
        balancers=(routing.TopOneBalanceConfig(coefficient=0.01),),
    ),
    "moe_plus_plus": lambda: RoutingMethod(
        "arXiv 2410.07348: experts without computation, gating residuals",
        routing.MoEPlusPlusConfig(),
        balancers=(routing.HeterogeneousBalanceConfig(),),
        capacity=CapacityConfig(factor=1.1, computing_share=0.75, keep="position"),
        zero_computation=ZeroComputationConfig(),
    ),
    # Loads in whole tiles of a kernel.
    "token_rounding": lambda: RoutingMethod(
        "arXiv 2512.14080: loads of whole tiles in training, otherwise as mixtral",
        routing.SoftmaxTopKConfig(softmax="after"),
        balancers=(routing.LoadBalanceConfig(coefficient=0.02),),
        capacity=routing.TokenRoundingConfig(),
    ),
    "stochastic_rounding": lambda: RoutingMethod(
        "arXiv 2512.14080: token_rounding, up or down so that loads stay in expectation",
        routing.SoftmaxTopKConfig(softmax="after"),
        balancers=(routing.LoadBalanceConfig(coefficient=0.02),),
        capacity=routing.TokenRoundingConfig(rounding="stochastic"),
    ),
    # Selection biases.
    "deepseek_v3": lambda: RoutingMethod(
        "arXiv 2412.19437, section 2.1.2: sigmoid, loss-free bias, routed scaling 2.5",
        routing.SigmoidTopKConfig(bias=routing.LossFreeConfig(rate=1e-3)),
        gate=routing.RenormalizedGateConfig(scale=2.5),
        balancers=(routing.LoadBalanceConfig(coefficient=1e-4, scope="sequence"),),
    ),
    "deepseek_v4": lambda: RoutingMethod(
        "arXiv 2408.15664 with the score sqrt(softplus) of later open configurations",
        routing.SqrtSoftplusTopKConfig(bias=routing.LossFreeConfig(rate=1e-3)),
        gate=routing.RenormalizedGateConfig(),
    ),
    "loss_free": lambda: RoutingMethod(
        "arXiv 2408.15664, algorithm 1",
        routing.SigmoidTopKConfig(bias=routing.LossFreeConfig(rate=1e-3)),
        gate=routing.RenormalizedGateConfig(),
    ),
    "loss_free_rms": lambda: RoutingMethod(
        "arXiv 2408.15664, with the error over its root mean square in place of its sign",
        routing.SigmoidTopKConfig(
            bias=routing.LossFreeConfig(rate=1e-3, rule="rms", is_zero_sum=True)
        ),
        gate=routing.RenormalizedGateConfig(),
    ),
    "bip": lambda: RoutingMethod(
        "arXiv 2502.15451: prices of the current rows in training, the last in evaluation",
        routing.SoftmaxTopKConfig(bias=routing.BipConfig(form="batch")),
        gate=routing.RenormalizedGateConfig(),
    ),
    "bip_online": lambda: RoutingMethod(
        "arXiv 2502.15451: prices of earlier tokens",
        routing.SoftmaxTopKConfig(bias=routing.BipConfig(form="online")),
        gate=routing.RenormalizedGateConfig(),
    ),
    "quantile": lambda: RoutingMethod(
        "arXiv 2502.15451 without its clips, by histogram, on the bias of the step before",
        routing.SigmoidTopKConfig(bias=routing.QuantileConfig()),
        gate=routing.RenormalizedGateConfig(),
    ),
    # Even assignments in training.
    "base": lambda: RoutingMethod(
        "arXiv 2103.16716: sigmoid gate, balanced assignment in training", routing.BaseLayerConfig()
    ),
    "sinkhorn": lambda: RoutingMethod(
        "arXiv 2202.01169: choice by a plan in training, softmax over all as gate",
        routing.SinkhornConfig(),
    ),
    "selective_sinkhorn": lambda: RoutingMethod(
        "arXiv 2511.08972: a plan in few steps, its shares as gates",
        routing.SelectiveSinkhornConfig(),
    ),
    # Without a trained router.
    "kmeans": lambda: RoutingMethod(
        "arXiv 2605.12476: centroids of past tokens, loss-free bias", routing.KMeansConfig()
    ),
    "hash": lambda: RoutingMethod(
        "arXiv 2106.04426: experts fixed by token, a control", routing.HashConfig()
    ),
    "random": lambda: RoutingMethod(
        "arXiv 2110.04260: random experts, a control", routing.UniformRandomConfig()
    ),
    "forced_balance": lambda: RoutingMethod(
        "no paper: experts in turn, a control for benchmarks", routing.ForcedBalanceConfig()
    ),
    # Not causal: for masked diffusion.
    "expert_choice": lambda: RoutingMethod(
        "arXiv 2202.09368: each expert takes its best tokens",
        routing.ExpertChoiceConfig(weights="probability", preference="probability"),
    ),
    "ec_dlm": lambda: RoutingMethod(
        "arXiv 2604.01622: more experts where fewer tokens are masked",
        routing.ExpertChoiceConfig(schedule="linear_reverse"),
        balancers=(routing.RouterZConfig(coefficient=0.001),),
    ),
    "soft_moe": lambda: RoutingMethod(
        "arXiv 2308.00951: experts read mixtures of tokens", routing.SoftMoEConfig()
    ),
}

METHODS: Final = _Methods(_ROWS)
