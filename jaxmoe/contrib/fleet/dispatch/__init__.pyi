# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.fleet.dispatch.base import DispatchConfig as DispatchConfig
from jaxmoe.contrib.fleet.dispatch.base import FleetView as FleetView
from jaxmoe.contrib.fleet.dispatch.base import Move as Move
from jaxmoe.contrib.fleet.dispatch.base import RequestDispatcher as RequestDispatcher
from jaxmoe.contrib.fleet.dispatch.base import Role as Role
from jaxmoe.contrib.fleet.dispatch.base import Route as Route
from jaxmoe.contrib.fleet.dispatch.dist_serve import DistServeConfig as DistServeConfig
from jaxmoe.contrib.fleet.dispatch.dual_map import DualMapConfig as DualMapConfig
from jaxmoe.contrib.fleet.dispatch.least_loaded import (
    LeastLoadedDispatchConfig as LeastLoadedDispatchConfig,
)
from jaxmoe.contrib.fleet.dispatch.llumnix import LlumnixConfig as LlumnixConfig
from jaxmoe.contrib.fleet.dispatch.pd_serve import PDServeConfig as PDServeConfig
from jaxmoe.contrib.fleet.dispatch.prefix_aware import PrefixAwareConfig as PrefixAwareConfig
from jaxmoe.contrib.fleet.dispatch.prfaas import PrfaasConfig as PrfaasConfig
from jaxmoe.contrib.fleet.dispatch.round_robin import RoundRobinConfig as RoundRobinConfig
from jaxmoe.contrib.fleet.dispatch.saga import SagaConfig as SagaConfig

DISPATCH: Registry
