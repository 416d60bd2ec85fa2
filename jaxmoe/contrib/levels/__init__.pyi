# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.levels.buckets import BucketsConfig as BucketsConfig
from jaxmoe.contrib.levels.cost import LevelCost as LevelCost
from jaxmoe.contrib.levels.measures import LevelMeasures as LevelMeasures
from jaxmoe.contrib.levels.milp import MilpConfig as MilpConfig
from jaxmoe.contrib.levels.plan import LevelAssigner as LevelAssigner
from jaxmoe.contrib.levels.plan import LevelPlan as LevelPlan
from jaxmoe.contrib.levels.plan import Room as Room
from jaxmoe.contrib.levels.pricing import level_packing as level_packing
from jaxmoe.contrib.levels.rows import LevelPacking as LevelPacking
from jaxmoe.contrib.levels.zones import ZonesConfig as ZonesConfig

ASSIGNERS: Registry
