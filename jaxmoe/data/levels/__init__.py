# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packs the documents of a step into micro-batches by level, for attention by level.

At level l the devices of a row form groups of 2^l, and each group attends to documents of its own
(`sharding/sequence_parallel/by_level.py`). An assigner chooses the level of every document.

To add an assigner: a file in `jaxmoe/data/levels/` with a subclass of `Assigner` (plan.py), its
class in `AssignConfig`, a row in REGISTRIES of tests/test_architecture.py.
"""

from jaxmoe.data.levels.buckets import BucketsConfig
from jaxmoe.data.levels.cost import LevelCost
from jaxmoe.data.levels.milp import MilpConfig
from jaxmoe.data.levels.plan import Assigner, LevelPlan, Room
from jaxmoe.data.levels.rows import LevelPacking
from jaxmoe.data.levels.zones import ZonesConfig

AssignConfig = BucketsConfig | MilpConfig | ZonesConfig
"""How the level of each document is chosen."""

__all__ = [
    "AssignConfig",
    "Assigner",
    "BucketsConfig",
    "LevelCost",
    "LevelPacking",
    "LevelPlan",
    "MilpConfig",
    "Room",
    "ZonesConfig",
]
