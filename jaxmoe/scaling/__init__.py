# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameterisations: from a model, a budget and a base point to numbers per role.

To add one: a file with a pure function `(model, budget, base) -> Parameterization` and its config,
which goes into ParameterizationConfig.
"""

from jaxmoe.configs import registry_of
from jaxmoe.scaling.budget import HYPERP_BASE as HYPERP_BASE
from jaxmoe.scaling.budget import BasePoint as BasePoint
from jaxmoe.scaling.budget import Budget as Budget
from jaxmoe.scaling.parameterization import Parameterization as Parameterization
from jaxmoe.scaling.standard import StandardConfig as StandardConfig
from jaxmoe.scaling.standard import standard as standard

ParameterizationConfig = StandardConfig

PARAMETERIZATIONS = registry_of(ParameterizationConfig)
