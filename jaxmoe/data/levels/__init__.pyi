# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.data.levels.buckets import BucketsConfig as BucketsConfig
from jaxmoe.data.levels.cost import LevelCost as LevelCost
from jaxmoe.data.levels.milp import MilpConfig as MilpConfig
from jaxmoe.data.levels.plan import Assigner as Assigner
from jaxmoe.data.levels.plan import LevelPlan as LevelPlan
from jaxmoe.data.levels.plan import Room as Room
from jaxmoe.data.levels.rows import LevelPacking as LevelPacking
from jaxmoe.data.levels.zones import ZonesConfig as ZonesConfig

ASSIGNERS: Registry
