# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from sharding.pipeline.gpipe import GPipeConfig as GPipeConfig
from sharding.pipeline.interleaved import InterleavedConfig as InterleavedConfig
from sharding.pipeline.order import PipelineOrder as PipelineOrder
from sharding.pipeline.schedule import PassRun as PassRun
from sharding.pipeline.schedule import Paths as Paths
from sharding.pipeline.schedule import Schedule as Schedule
from sharding.pipeline.schedule import StageWork as StageWork
from sharding.pipeline.slots import StageSlots as StageSlots
from sharding.pipeline.slots import plan_slots as plan_slots
from sharding.pipeline.times import forward_schedule as forward_schedule
