# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from sharding.expert_parallel.all_gather import AllGatherConfig as AllGatherConfig
from sharding.expert_parallel.all_gather import ResidentConfig as ResidentConfig
from sharding.expert_parallel.all_to_all import AllToAllConfig as AllToAllConfig
from sharding.expert_parallel.all_to_all_dropping import (
    AllToAllDroppingConfig as AllToAllDroppingConfig,
)
from sharding.expert_parallel.dispatch import expert_parallel as expert_parallel
from sharding.expert_parallel.dispatched import ExpertAxes as ExpertAxes
from sharding.expert_parallel.dispatcher import Dispatcher as Dispatcher
from sharding.expert_parallel.local import LocalConfig as LocalConfig
