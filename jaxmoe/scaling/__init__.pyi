# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.scaling.completep import CompletePConfig as CompletePConfig
from jaxmoe.scaling.completep import CompletePExponents as CompletePExponents
from jaxmoe.scaling.completep import completep as completep
from jaxmoe.scaling.hyperp import HyperPConfig as HyperPConfig
from jaxmoe.scaling.hyperp import HyperPExponents as HyperPExponents
from jaxmoe.scaling.hyperp import hyperp as hyperp
from jaxmoe.scaling.laws import BatchExponents as BatchExponents
from jaxmoe.scaling.laws import DepthExponents as DepthExponents
from jaxmoe.scaling.laws import TokenExponents as TokenExponents
from jaxmoe.scaling.muonh_vanilla import VanillaMuonHConfig as VanillaMuonHConfig
from jaxmoe.scaling.muonh_vanilla import muonh_vanilla as muonh_vanilla
from jaxmoe.scaling.mup import MuPConfig as MuPConfig
from jaxmoe.scaling.mup import MuPMuonConfig as MuPMuonConfig
from jaxmoe.scaling.mup import MuPPlusPlusConfig as MuPPlusPlusConfig
from jaxmoe.scaling.mup import MuPPlusPlusMuonConfig as MuPPlusPlusMuonConfig
from jaxmoe.scaling.mup import mup as mup
from jaxmoe.scaling.parameterization import HYPERP_BASE as HYPERP_BASE
from jaxmoe.scaling.parameterization import BasePoint as BasePoint
from jaxmoe.scaling.parameterization import Budget as Budget
from jaxmoe.scaling.parameterization import Parameterization as Parameterization
from jaxmoe.scaling.parameterization import ParameterizationBase as ParameterizationBase
from jaxmoe.scaling.standard import StandardConfig as StandardConfig
from jaxmoe.scaling.standard import StandardExponents as StandardExponents
from jaxmoe.scaling.standard import standard as standard

PARAMETERIZATIONS: Registry
