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
`jaxmoe/scaling`, the union in `jaxmoe/scaling/__init__.py`, a row of CASES in
`tests/jaxmoe/scaling/test_scaling.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.scaling.budget import HYPERP_BASE as HYPERP_BASE
from jaxmoe.scaling.budget import BasePoint as BasePoint
from jaxmoe.scaling.budget import Budget as Budget
from jaxmoe.scaling.completep import CompletePConfig as CompletePConfig
from jaxmoe.scaling.completep import completep as completep
from jaxmoe.scaling.hyperp import HyperPConfig as HyperPConfig
from jaxmoe.scaling.hyperp import hyperp as hyperp
from jaxmoe.scaling.muonh_vanilla import VanillaMuonHConfig as VanillaMuonHConfig
from jaxmoe.scaling.muonh_vanilla import muonh_vanilla as muonh_vanilla
from jaxmoe.scaling.mup import MuPConfig as MuPConfig
from jaxmoe.scaling.mup import MuPMuonConfig as MuPMuonConfig
from jaxmoe.scaling.mup import MuPPlusPlusConfig as MuPPlusPlusConfig
from jaxmoe.scaling.mup import MuPPlusPlusMuonConfig as MuPPlusPlusMuonConfig
from jaxmoe.scaling.mup import mup as mup
from jaxmoe.scaling.parameterization import Parameterization as Parameterization
from jaxmoe.scaling.standard import StandardConfig as StandardConfig
from jaxmoe.scaling.standard import standard as standard

ParameterizationConfig = (
    StandardConfig
    | MuPConfig
    | MuPPlusPlusConfig
    | CompletePConfig
    | MuPMuonConfig
    | MuPPlusPlusMuonConfig
    | VanillaMuonHConfig
    | HyperPConfig
)

PARAMETERIZATIONS = registry_of(ParameterizationConfig)
