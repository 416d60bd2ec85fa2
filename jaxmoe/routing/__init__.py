# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing: routers, gates, balancers, selection biases, capacity, named methods, telemetry.

`base.py` documents the records and the contract of a router; `README.md` explains the concepts and
adds a router step by step.

To add a router: a file in `jaxmoe/routing/routers/` with its config (extends `base.RouterBase`) and
its router (extends `routers.linear.StatelessRouter`, or returns one of a family), its config in
RouterConfig in `jaxmoe/routing/__init__.py`, a row in ROUTER_CASES of `tests/support/routers.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.routing.balancers import BalancerConfig as BalancerConfig
from jaxmoe.routing.balancers import CouplingConfig as CouplingConfig
from jaxmoe.routing.balancers import HeterogeneousBalanceConfig as HeterogeneousBalanceConfig
from jaxmoe.routing.balancers import ImportanceVariationConfig as ImportanceVariationConfig
from jaxmoe.routing.balancers import LoadBalanceConfig as LoadBalanceConfig
from jaxmoe.routing.balancers import LoadVariationConfig as LoadVariationConfig
from jaxmoe.routing.balancers import RouterZConfig as RouterZConfig
from jaxmoe.routing.balancers import TopOneBalanceConfig as TopOneBalanceConfig
from jaxmoe.routing.base import Extent as Extent
from jaxmoe.routing.base import Router as Router
from jaxmoe.routing.base import RouterInputs as RouterInputs
from jaxmoe.routing.base import RouterOutput as RouterOutput
from jaxmoe.routing.base import RouterStatistics as RouterStatistics
from jaxmoe.routing.base import Selection as Selection
from jaxmoe.routing.base import Slots as Slots
from jaxmoe.routing.base import Traits as Traits
from jaxmoe.routing.biases import BiasConfig as BiasConfig
from jaxmoe.routing.biases import BipConfig as BipConfig
from jaxmoe.routing.biases import LossFreeConfig as LossFreeConfig
from jaxmoe.routing.biases import QuantileConfig as QuantileConfig
from jaxmoe.routing.capacity import CapacityConfig as CapacityConfig
from jaxmoe.routing.gates import RenormalizedGateConfig as RenormalizedGateConfig
from jaxmoe.routing.gates import SoftmaxGateConfig as SoftmaxGateConfig
from jaxmoe.routing.gates import SqrtGateConfig as SqrtGateConfig
from jaxmoe.routing.methods import METHODS as METHODS
from jaxmoe.routing.methods import Method as Method
from jaxmoe.routing.routers.assignment.base_layer import BaseLayerConfig as BaseLayerConfig
from jaxmoe.routing.routers.assignment.selective_sinkhorn import (
    SelectiveSinkhornConfig as SelectiveSinkhornConfig,
)
from jaxmoe.routing.routers.assignment.sinkhorn import SinkhornConfig as SinkhornConfig
from jaxmoe.routing.routers.expert_choice.expert_choice import (
    ExpertChoiceConfig as ExpertChoiceConfig,
)
from jaxmoe.routing.routers.expert_choice.soft_moe import SoftMoEConfig as SoftMoEConfig
from jaxmoe.routing.routers.token_choice.cosine_topk import CosineTopKConfig as CosineTopKConfig
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig as GroupLimitConfig
from jaxmoe.routing.routers.token_choice.gshard import GShardConfig as GShardConfig
from jaxmoe.routing.routers.token_choice.kmeans import KMeansConfig as KMeansConfig
from jaxmoe.routing.routers.token_choice.moe_plus_plus import MoEPlusPlusConfig as MoEPlusPlusConfig
from jaxmoe.routing.routers.token_choice.noisy_topk import NoisyTopKConfig as NoisyTopKConfig
from jaxmoe.routing.routers.token_choice.progressive_topk import (
    ProgressiveTopKConfig as ProgressiveTopKConfig,
)
from jaxmoe.routing.routers.token_choice.topk import SigmoidTopKConfig as SigmoidTopKConfig
from jaxmoe.routing.routers.token_choice.topk import SoftmaxTopKConfig as SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.topk import (
    SqrtSoftplusTopKConfig as SqrtSoftplusTopKConfig,
)
from jaxmoe.routing.routers.unlearned.forced_balance import (
    ForcedBalanceConfig as ForcedBalanceConfig,
)
from jaxmoe.routing.routers.unlearned.hash_routing import HashConfig as HashConfig
from jaxmoe.routing.routers.unlearned.uniform_random import (
    UniformRandomConfig as UniformRandomConfig,
)
from jaxmoe.routing.zero_computation import ZeroComputationConfig as ZeroComputationConfig

RouterConfig = (
    SoftmaxTopKConfig
    | SigmoidTopKConfig
    | SqrtSoftplusTopKConfig
    | NoisyTopKConfig
    | GShardConfig
    | CosineTopKConfig
    | BaseLayerConfig
    | SinkhornConfig
    | SelectiveSinkhornConfig
    | HashConfig
    | UniformRandomConfig
    | ForcedBalanceConfig
    | ProgressiveTopKConfig
    | MoEPlusPlusConfig
    | KMeansConfig
    | ExpertChoiceConfig
    | SoftMoEConfig
)
GateConfig = SoftmaxGateConfig | RenormalizedGateConfig | SqrtGateConfig

ROUTERS = registry_of(RouterConfig)
GATES = registry_of(GateConfig)
BALANCERS = registry_of(BalancerConfig)
BIASES = registry_of(BiasConfig)
