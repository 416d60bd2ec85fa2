# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.planning.placement.exflow import ExFlowConfig as ExFlowConfig
from jaxmoe.planning.placement.grouping import ExpertGroupingConfig as ExpertGroupingConfig
from jaxmoe.planning.placement.grouping import token_tables as token_tables
from jaxmoe.planning.placement.moetuner import MoETunerConfig as MoETunerConfig
from jaxmoe.planning.placement.solution import Placer as Placer
from jaxmoe.planning.placement.solution import Solution as Solution
from jaxmoe.planning.placement.trace import RoutingTrace as RoutingTrace
from jaxmoe.planning.placement.trace import load_trace as load_trace
from jaxmoe.planning.placement.trace import save_trace as save_trace

PLACERS: Registry
