# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Places experts on devices from a routing trace: solvers, measures, token tables.

    trace = load_trace("trace.npz")
    solution = PLACERS["exflow"]().solve(trace, num_devices=8)
    state = jaxmoe.planning.placement.relocate.relocate(model, state, solution.placement)

To add a solver: a config with `name` and `solve` in a file of its own in
`jaxmoe/planning/placement`, the union PlacerConfig in `jaxmoe/planning/placement/__init__.py`, a
row of REGISTRIES in `tests/test_architecture.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.planning.placement.exflow import ExFlowConfig as ExFlowConfig
from jaxmoe.planning.placement.grouping import ExpertGroupingConfig as ExpertGroupingConfig
from jaxmoe.planning.placement.grouping import token_tables as token_tables
from jaxmoe.planning.placement.moetuner import MoETunerConfig as MoETunerConfig
from jaxmoe.planning.placement.solution import Solution as Solution
from jaxmoe.planning.placement.trace import RoutingTrace as RoutingTrace
from jaxmoe.planning.placement.trace import load_trace as load_trace
from jaxmoe.planning.placement.trace import save_trace as save_trace

PlacerConfig = ExFlowConfig | MoETunerConfig | ExpertGroupingConfig

PLACERS = registry_of(PlacerConfig)
