# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Places experts on devices from a routing trace: solvers, measures, token tables.

    trace = load_trace("trace.npz")
    solution = PLACERS["exflow"]().solve(trace, num_devices=8)
    state = jaxmoe.contrib.placement.relocate.relocate(model, state, solution.placement)

To add a solver: a config that extends `Placer` in a file of its own in `jaxmoe/contrib/placement`,
and its row under `placer` in `jaxmoe/catalog/executions.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

PLACERS = Registry("placer")
