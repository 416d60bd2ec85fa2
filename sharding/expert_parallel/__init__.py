# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: dispatchers that bring rows to their experts, and `expert_parallel`.

To add a dispatcher: a file in sharding/expert_parallel/ with a subclass of `Dispatcher`
(sharding/expert_parallel/dispatcher.py), its class in `DispatcherConfig` in
sharding/expert_parallel/__init__.py, a row in REGISTRIES of tests/test_architecture.py, a row in
CONFIGS of tests/sharding/expert_parallel/test_expert_parallel.py.
"""

from sharding.expert_parallel.all_gather import AllGatherConfig as AllGatherConfig
from sharding.expert_parallel.all_to_all import AllToAllConfig as AllToAllConfig
from sharding.expert_parallel.all_to_all_dropping import (
    AllToAllDroppingConfig as AllToAllDroppingConfig,
)
from sharding.expert_parallel.dispatch import expert_parallel as expert_parallel
from sharding.expert_parallel.dispatched import ExpertAxes as ExpertAxes
from sharding.expert_parallel.dispatcher import Dispatcher as Dispatcher
from sharding.expert_parallel.least_loaded import LeastLoadedConfig as LeastLoadedConfig
from sharding.expert_parallel.local import LocalConfig as LocalConfig
from sharding.expert_parallel.resident import ResidentConfig as ResidentConfig

DispatcherConfig = (
    LocalConfig | AllGatherConfig | AllToAllConfig | AllToAllDroppingConfig | LeastLoadedConfig
)
"""How rows reach the experts."""
