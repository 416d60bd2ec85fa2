# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the text of HLO modules.

text          parses it into computations of instructions
groups        groups of devices, in every printed form
collectives   kind, bytes, groups and executions of the collectives
work          FLOPs, and bytes read and written, loops included
traffic       the kernels of a program for a GPU, by kind: bytes and FLOPs
"""

from jaxmoe.planning.hlo.collectives import KINDS as KINDS
from jaxmoe.planning.hlo.collectives import Collective as Collective
from jaxmoe.planning.hlo.collectives import called_by as called_by
from jaxmoe.planning.hlo.collectives import collectives as collectives
from jaxmoe.planning.hlo.collectives import trip_count as trip_count
from jaxmoe.planning.hlo.groups import Groups as Groups
from jaxmoe.planning.hlo.traffic import KernelTraffic as KernelTraffic
from jaxmoe.planning.hlo.traffic import kernel_traffic as kernel_traffic
from jaxmoe.planning.hlo.traffic import moved_outside as moved_outside
from jaxmoe.planning.hlo.work import ProgramWork as ProgramWork
from jaxmoe.planning.hlo.work import work as work
