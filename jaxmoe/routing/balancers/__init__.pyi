# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.routing.balancers.base import BalanceScope as BalanceScope
from jaxmoe.routing.balancers.base import StatisticsBalancer as StatisticsBalancer
from jaxmoe.routing.balancers.base import WeightsBalancer as WeightsBalancer
from jaxmoe.routing.balancers.base import of_statistics as of_statistics
from jaxmoe.routing.balancers.base import of_weights as of_weights
from jaxmoe.routing.balancers.base import statistics_losses as statistics_losses
from jaxmoe.routing.balancers.coupling import CouplingConfig as CouplingConfig
from jaxmoe.routing.balancers.heterogeneous import (
    HeterogeneousBalanceConfig as HeterogeneousBalanceConfig,
)
from jaxmoe.routing.balancers.load_balance import LoadBalanceConfig as LoadBalanceConfig
from jaxmoe.routing.balancers.load_balance import conversions as conversions
from jaxmoe.routing.balancers.load_balance import load_balance as load_balance
from jaxmoe.routing.balancers.load_balance import pool_layers as pool_layers
from jaxmoe.routing.balancers.load_variation import (
    ImportanceVariationConfig as ImportanceVariationConfig,
)
from jaxmoe.routing.balancers.load_variation import LoadVariationConfig as LoadVariationConfig
from jaxmoe.routing.balancers.load_variation import squared_variation as squared_variation
from jaxmoe.routing.balancers.router_z import RouterZConfig as RouterZConfig
from jaxmoe.routing.balancers.router_z import router_z as router_z
from jaxmoe.routing.balancers.top_one import TopOneBalanceConfig as TopOneBalanceConfig
