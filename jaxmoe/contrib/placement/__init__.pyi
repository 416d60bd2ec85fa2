# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.placement.exflow import ExFlowConfig as ExFlowConfig
from jaxmoe.contrib.placement.grouping import ExpertGroupingConfig as ExpertGroupingConfig
from jaxmoe.contrib.placement.moetuner import MoETunerConfig as MoETunerConfig
from jaxmoe.contrib.placement.solution import Placer as Placer
from jaxmoe.contrib.placement.solution import Solution as Solution

PLACERS: Registry
