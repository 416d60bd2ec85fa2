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

To add a method: an entry with its source in METHODS in `jaxmoe/routing/methods.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmoe.routing.balancers import (
    CouplingConfig,
    HeterogeneousBalanceConfig,
    ImportanceVariationConfig,
    LoadBalanceConfig,
    LoadVariationConfig,
    RouterZConfig,
    TopOneBalanceConfig,
)
from jaxmoe.routing.biases import BipConfig, LossFreeConfig, QuantileConfig
from jaxmoe.routing.capacity import CapacityConfig
from jaxmoe.routing.gates import RenormalizedGateConfig, SoftmaxGateConfig, SqrtGateConfig
from jaxmoe.routing.routers.assignment.base_layer import BaseLayerConfig
from jaxmoe.routing.routers.assignment.selective_sinkhorn import SelectiveSinkhornConfig
from jaxmoe.routing.routers.assignment.sinkhorn import SinkhornConfig
from jaxmoe.routing.routers.expert_choice.expert_choice import ExpertChoiceConfig
from jaxmoe.routing.routers.expert_choice.soft_moe import SoftMoEConfig
from jaxmoe.routing.routers.token_choice.cosine_topk import CosineTopKConfig
from jaxmoe.routing.routers.token_choice.gshard import GShardConfig
from jaxmoe.routing.routers.token_choice.kmeans import KMeansConfig
from jaxmoe.routing.routers.token_choice.moe_plus_plus import MoEPlusPlusConfig
from jaxmoe.routing.routers.token_choice.noisy_topk import NoisyTopKConfig
from jaxmoe.routing.routers.token_choice.progressive_topk import ProgressiveTopKConfig
from jaxmoe.routing.routers.token_choice.topk import (
    SigmoidTopKConfig,
    SoftmaxTopKConfig,
    SqrtSoftplusTopKConfig,
)
from jaxmoe.routing.routers.unlearned.forced_balance import ForcedBalanceConfig
from jaxmoe.routing.routers.unlearned.hash_routing import HashConfig
from jaxmoe.routing.routers.unlearned.uniform_random import UniformRandomConfig
from jaxmoe.routing.zero_computation import ZeroComputationConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """Routing of a MoE layer as published."""

    source: str
    router: Any
    _: dataclasses.KW_ONLY
    gate: Any = SoftmaxGateConfig()
    balancers: tuple[Any, ...] = ()
    capacity: CapacityConfig | None = None
    zero_computation: ZeroComputationConfig | None = None

    def parts(self) -> dict[str, Any]:
        """Return the fields of MoEConfig that the method sets."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "source")
        return {name: getattr(self, name) for name in names}


_RENORMALIZED = RenormalizedGateConfig()
_BALANCE = LoadBalanceConfig(coefficient=0.01)

METHODS = {
    # Balance losses.
    "switch": Method(
        "arXiv 2101.03961: top-1, probability as gate, input jitter",
        SoftmaxTopKConfig(softmax="before", jitter=0.01),
        balancers=(LoadBalanceConfig(coefficient=0.01, scope="micro_batch"),),
    ),
    "mixtral": Method(
        "arXiv 2401.04088, section 2.1",
        SoftmaxTopKConfig(softmax="after"),
        balancers=(LoadBalanceConfig(coefficient=0.02),),
    ),
    "olmoe": Method(
        "arXiv 2409.02060",
        SoftmaxTopKConfig(softmax="before"),
        balancers=(LoadBalanceConfig(coefficient=0.01), RouterZConfig(coefficient=0.001)),
    ),
    "qwen3": Method(
        "arXiv 2505.09388, section 2: renormalized top-k, global-batch balance",
        SoftmaxTopKConfig(softmax="before"),
        gate=_RENORMALIZED,
        balancers=(LoadBalanceConfig(coefficient=0.001),),
    ),
    "hyperp": Method(
        "arXiv 2603.28743: SqrtGate, balance loss 0.1, no z-loss",
        SoftmaxTopKConfig(softmax="after"),
        gate=SqrtGateConfig(),
        balancers=(LoadBalanceConfig(coefficient=0.1),),
    ),
    "global_balance": Method(
        "arXiv 2501.11873: balance over the global batch, weight 0.008",
        SoftmaxTopKConfig(softmax="before"),
        balancers=(LoadBalanceConfig(coefficient=0.008), RouterZConfig(coefficient=0.001)),
    ),
    "sequence_balance": Method(
        "arXiv 2501.11873: the scope to which the global batch is compared",
        SoftmaxTopKConfig(softmax="before"),
        balancers=(LoadBalanceConfig(coefficient=0.01, scope="sequence"),),
    ),
    "noisy_topk": Method(
        "arXiv 1701.06538: learned noise, importance and load losses of weight 0.1",
        NoisyTopKConfig(),
        balancers=(ImportanceVariationConfig(), LoadVariationConfig()),
    ),
    "gshard": Method(
        "arXiv 2006.16668: top-2, the second dropped at random; capacity is set apart",
        GShardConfig(),
        balancers=(_BALANCE,),
    ),
    "x_moe": Method(
        "arXiv 2204.09179: cosine of low-rank projections",
        CosineTopKConfig(),
        balancers=(_BALANCE,),
    ),
    "erc": Method(
        "arXiv 2512.23447: expert-router coupling loss beside the balance loss",
        SoftmaxTopKConfig(softmax="before"),
        balancers=(_BALANCE, CouplingConfig()),
    ),
    "sigma": Method(
        "arXiv 2512.16248: more experts in low layers until switch_step, set by the run",
        ProgressiveTopKConfig(early_top_k=(2,), final_top_k=1, switch_step=100),
        balancers=(_BALANCE,),
    ),
    "top_one_balance": Method(
        "arXiv 2512.16248, discussion: its loss for one expert per token",
        SoftmaxTopKConfig(softmax="before"),
        balancers=(TopOneBalanceConfig(coefficient=0.01),),
    ),
    "moe_plus_plus": Method(
        "arXiv 2410.07348: experts without computation, gating residuals",
        MoEPlusPlusConfig(),
        balancers=(HeterogeneousBalanceConfig(),),
        capacity=CapacityConfig(factor=1.1, computing_share=0.75, keep="position"),
        zero_computation=ZeroComputationConfig(),
    ),
    # Selection biases.
    "deepseek_v3": Method(
        "arXiv 2412.19437, section 2.1.2: sigmoid, loss-free bias, routed scaling 2.5",
        SigmoidTopKConfig(bias=LossFreeConfig(rate=1e-3)),
        gate=RenormalizedGateConfig(scale=2.5),
        balancers=(LoadBalanceConfig(coefficient=1e-4, scope="sequence"),),
    ),
    "deepseek_v4": Method(
        "arXiv 2408.15664 with the score sqrt(softplus) of later open configurations",
        SqrtSoftplusTopKConfig(bias=LossFreeConfig(rate=1e-3)),
        gate=_RENORMALIZED,
    ),
    "loss_free": Method(
        "arXiv 2408.15664, algorithm 1",
        SigmoidTopKConfig(bias=LossFreeConfig(rate=1e-3)),
        gate=_RENORMALIZED,
    ),
    "loss_free_rms": Method(
        "arXiv 2408.15664, with the error over its root mean square in place of its sign",
        SigmoidTopKConfig(bias=LossFreeConfig(rate=1e-3, rule="rms", is_zero_sum=True)),
        gate=_RENORMALIZED,
    ),
    "bip": Method(
        "arXiv 2502.15451: prices of the current rows in training, the last in evaluation",
        SoftmaxTopKConfig(bias=BipConfig(form="batch")),
        gate=_RENORMALIZED,
    ),
    "bip_online": Method(
        "arXiv 2502.15451: prices of earlier tokens",
        SoftmaxTopKConfig(bias=BipConfig(form="online")),
        gate=_RENORMALIZED,
    ),
    "quantile": Method(
        "arXiv 2502.15451 without its clips, by histogram, on the bias of the step before",
        SigmoidTopKConfig(bias=QuantileConfig()),
        gate=_RENORMALIZED,
    ),
    # Even assignments in training.
    "base": Method(
        "arXiv 2103.16716: sigmoid gate, balanced assignment in training", BaseLayerConfig()
    ),
    "sinkhorn": Method(
        "arXiv 2202.01169: choice by a plan in training, softmax over all as gate", SinkhornConfig()
    ),
    "selective_sinkhorn": Method(
        "arXiv 2511.08972: a plan in few steps, its shares as gates", SelectiveSinkhornConfig()
    ),
    # Without a trained router.
    "kmeans": Method("arXiv 2605.12476: centroids of past tokens, loss-free bias", KMeansConfig()),
    "hash": Method("arXiv 2106.04426: experts fixed by token, a control", HashConfig()),
    "random": Method("arXiv 2110.04260: random experts, a control", UniformRandomConfig()),
    "forced_balance": Method(
        "no paper: experts in turn, a control for benchmarks", ForcedBalanceConfig()
    ),
    # Not causal: for masked diffusion.
    "expert_choice": Method(
        "arXiv 2202.09368: each expert takes its best tokens",
        ExpertChoiceConfig(weights="probability", preference="probability"),
    ),
    "ec_dlm": Method(
        "arXiv 2604.01622: more experts where fewer tokens are masked",
        ExpertChoiceConfig(schedule="linear_reverse"),
        balancers=(RouterZConfig(coefficient=0.001),),
    ),
    "soft_moe": Method("arXiv 2308.00951: experts read mixtures of tokens", SoftMoEConfig()),
}
