# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.serve.policies.dispatch.base import DispatchConfig as DispatchConfig
from jaxmoe.serve.policies.dispatch.base import Dispatcher as Dispatcher
from jaxmoe.serve.policies.dispatch.base import FleetView as FleetView
from jaxmoe.serve.policies.dispatch.base import Move as Move
from jaxmoe.serve.policies.dispatch.base import Role as Role
from jaxmoe.serve.policies.dispatch.base import Route as Route
from jaxmoe.serve.policies.dispatch.dist_serve import DistServeConfig as DistServeConfig
from jaxmoe.serve.policies.dispatch.dual_map import DualMapConfig as DualMapConfig
from jaxmoe.serve.policies.dispatch.least_loaded import LeastLoadedConfig as LeastLoadedConfig
from jaxmoe.serve.policies.dispatch.llumnix import LlumnixConfig as LlumnixConfig
from jaxmoe.serve.policies.dispatch.pd_serve import PDServeConfig as PDServeConfig
from jaxmoe.serve.policies.dispatch.prefix_aware import PrefixAwareConfig as PrefixAwareConfig
from jaxmoe.serve.policies.dispatch.prfaas import PrfaasConfig as PrfaasConfig
from jaxmoe.serve.policies.dispatch.round_robin import RoundRobinConfig as RoundRobinConfig
from jaxmoe.serve.policies.dispatch.saga import SagaConfig as SagaConfig

DISPATCH: Registry
