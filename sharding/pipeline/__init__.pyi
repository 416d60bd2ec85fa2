# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from sharding.pipeline.gpipe import GPipeConfig as GPipeConfig
from sharding.pipeline.interleaved import InterleavedConfig as InterleavedConfig
from sharding.pipeline.order import PipelineOrder as PipelineOrder
from sharding.pipeline.schedule import Paths as Paths
from sharding.pipeline.schedule import Run as Run
from sharding.pipeline.schedule import Schedule as Schedule
from sharding.pipeline.schedule import Work as Work
from sharding.pipeline.slots import Slots as Slots
from sharding.pipeline.slots import plan_slots as plan_slots
from sharding.pipeline.times import forward_schedule as forward_schedule
