# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How rows reach the experts: the union of dispatchers, and the seam."""

from sharding.expert_parallel.dispatch import expert_parallel as expert_parallel
from sharding.expert_parallel.dispatched import ExpertAxes as ExpertAxes
from sharding.expert_parallel.local import LocalConfig as LocalConfig

DispatcherConfig = LocalConfig
