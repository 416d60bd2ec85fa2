# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.optim.adamw import AdamWConfig as AdamWConfig
from jaxmoe.optim.adamw import adamw as adamw
from jaxmoe.optim.groups import GroupMembers as GroupMembers
from jaxmoe.optim.groups import GroupTraits as GroupTraits
from jaxmoe.optim.groups import Optimizer as Optimizer
from jaxmoe.optim.groups import RoleGroups as RoleGroups
from jaxmoe.optim.groups import train_only as train_only
from jaxmoe.optim.hypersphere import adamh as adamh
from jaxmoe.optim.muon import MuonConfig as MuonConfig
from jaxmoe.optim.muon import NewtonSchulzConfig as NewtonSchulzConfig
from jaxmoe.optim.muon import muon as muon
from jaxmoe.optim.muonh import MuonHConfig as MuonHConfig
from jaxmoe.optim.muonh import muonh as muonh
from jaxmoe.optim.newton_schulz import newton_schulz as newton_schulz
from jaxmoe.optim.schedules import SCHEDULES as SCHEDULES
from jaxmoe.optim.schedules import CosineConfig as CosineConfig
from jaxmoe.optim.schedules import LinearConfig as LinearConfig
from jaxmoe.optim.schedules import ScheduleBase as ScheduleBase
from jaxmoe.optim.schedules import WarmupStableDecayConfig as WarmupStableDecayConfig
from jaxmoe.optim.sgd import SGDConfig as SGDConfig

OPTIMIZERS: Registry
