# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing: who goes where, with what weight, and how the load is kept even.

To add a router: a file with its config (`name`, `traits`, `build`) and its class (`declarations`,
`init`, `route`, `update`; see `base.Router`), which members of the family in `token_choice` have
already, its config into RouterConfig below, a row in ROUTER_CASES of
tests/test_jaxmoe/test_router_contract.py. Gates: the same with their union. Balancers and selection
biases: see their packages.
"""

from jaxmoe.configs import registry_of
from jaxmoe.routing.balancers import BALANCERS as BALANCERS
from jaxmoe.routing.balancers import BalancerConfig as BalancerConfig
from jaxmoe.routing.balancers import LoadBalanceConfig as LoadBalanceConfig
from jaxmoe.routing.balancers import RouterZConfig as RouterZConfig
from jaxmoe.routing.base import Extent as Extent
from jaxmoe.routing.base import Router as Router
from jaxmoe.routing.base import RouterInputs as RouterInputs
from jaxmoe.routing.base import RouterOutput as RouterOutput
from jaxmoe.routing.base import RouterStatistics as RouterStatistics
from jaxmoe.routing.base import Selection as Selection
from jaxmoe.routing.base import Slots as Slots
from jaxmoe.routing.base import Traits as Traits
from jaxmoe.routing.biases import BIASES as BIASES
from jaxmoe.routing.biases import BiasConfig as BiasConfig
from jaxmoe.routing.biases import LossFreeConfig as LossFreeConfig
from jaxmoe.routing.capacity import CapacityConfig as CapacityConfig
from jaxmoe.routing.expert_choice import ExpertChoiceConfig as ExpertChoiceConfig
from jaxmoe.routing.gates import RenormalizedGateConfig as RenormalizedGateConfig
from jaxmoe.routing.gates import SoftmaxGateConfig as SoftmaxGateConfig
from jaxmoe.routing.gates import SqrtGateConfig as SqrtGateConfig
from jaxmoe.routing.groups import GroupLimitConfig as GroupLimitConfig
from jaxmoe.routing.methods import METHODS as METHODS
from jaxmoe.routing.methods import Method as Method
from jaxmoe.routing.soft_moe import SoftMoEConfig as SoftMoEConfig
from jaxmoe.routing.softmax_topk import SoftmaxTopKConfig as SoftmaxTopKConfig

RouterConfig = SoftmaxTopKConfig | ExpertChoiceConfig | SoftMoEConfig
GateConfig = SoftmaxGateConfig | RenormalizedGateConfig | SqrtGateConfig

ROUTERS = registry_of(RouterConfig)
GATES = registry_of(GateConfig)
