# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameterisations: numbers per role from a model, a budget and a base point.

    standard             AdamW (any group by an option); no multipliers
    mup                  AdamW; rates 1/width
    mup_plus_plus        AdamW; and 1/sqrt(depth)
    completep            AdamW; width and depth, epsilon and decay too
    mup_muon             Muon
    mup_plus_plus_muon   Muon; and 1/sqrt(depth): the baseline of HyperP's paper
    muonh_vanilla        MuonH alone
    hyperp               MuonH with laws of depth, batch and tokens

To add a parameterisation: a config with `build(model, budget, base)` in a file of its own in
`jaxmoe/scaling`, its row under `parameterization` in `jaxmoe/catalog/runs.py`, a row of CASES in
`tests/jaxmoe/scaling/test_scaling.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

PARAMETERIZATIONS = Registry("parameterization")
