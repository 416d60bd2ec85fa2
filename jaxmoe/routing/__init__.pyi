# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.routing.balancers.base import Balancer as Balancer
from jaxmoe.routing.balancers.coupling import CouplingConfig as CouplingConfig
from jaxmoe.routing.balancers.heterogeneous import (
    HeterogeneousBalanceConfig as HeterogeneousBalanceConfig,
)
from jaxmoe.routing.balancers.load_balance import LoadBalanceConfig as LoadBalanceConfig
from jaxmoe.routing.balancers.load_variation import (
    ImportanceVariationConfig as ImportanceVariationConfig,
)
from jaxmoe.routing.balancers.load_variation import LoadVariationConfig as LoadVariationConfig
from jaxmoe.routing.balancers.router_z import RouterZConfig as RouterZConfig
from jaxmoe.routing.balancers.top_one import TopOneBalanceConfig as TopOneBalanceConfig
from jaxmoe.routing.base import Extent as Extent
from jaxmoe.routing.base import Router as Router
from jaxmoe.routing.base import RouterBase as RouterBase
from jaxmoe.routing.base import RouterInputs as RouterInputs
from jaxmoe.routing.base import RouterOutput as RouterOutput
from jaxmoe.routing.base import RouterStatistics as RouterStatistics
from jaxmoe.routing.base import Selection as Selection
from jaxmoe.routing.base import Slots as Slots
from jaxmoe.routing.base import Traits as Traits
from jaxmoe.routing.biases.base import SelectionBias as SelectionBias
from jaxmoe.routing.biases.bip import BipConfig as BipConfig
from jaxmoe.routing.biases.loss_free import LossFreeConfig as LossFreeConfig
from jaxmoe.routing.biases.quantile import QuantileConfig as QuantileConfig
from jaxmoe.routing.capacity import CapacityBase as CapacityBase
from jaxmoe.routing.capacity import CapacityConfig as CapacityConfig
from jaxmoe.routing.gates import GateBase as GateBase
from jaxmoe.routing.gates import RenormalizedGateConfig as RenormalizedGateConfig
from jaxmoe.routing.gates import SoftmaxGateConfig as SoftmaxGateConfig
from jaxmoe.routing.gates import SqrtGateConfig as SqrtGateConfig
from jaxmoe.routing.methods import METHODS as METHODS
from jaxmoe.routing.methods import RoutingMethod as RoutingMethod
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
from jaxmoe.routing.routers.token_choice.sparse_mixer import SparseMixerConfig as SparseMixerConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig as LogitBiasConfig
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
from jaxmoe.routing.token_rounding import TokenRoundingConfig as TokenRoundingConfig
from jaxmoe.routing.zero_computation import ZeroComputationConfig as ZeroComputationConfig

ROUTERS: Registry
GATES: Registry
BALANCERS: Registry
BIASES: Registry
CAPACITIES: Registry
