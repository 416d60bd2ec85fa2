# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.contrib.slow_links.methods.a2cid2 import A2cid2Config as A2cid2Config
from jaxmoe.contrib.slow_links.methods.co2 import CO2Config as CO2Config
from jaxmoe.contrib.slow_links.methods.coded import CodedConfig as CodedConfig
from jaxmoe.contrib.slow_links.methods.diloco import DiLoCoConfig as DiLoCoConfig
from jaxmoe.contrib.slow_links.methods.econtrol import EControlConfig as EControlConfig
from jaxmoe.contrib.slow_links.methods.heterogeneous import (
    HeterogeneousConfig as HeterogeneousConfig,
)
from jaxmoe.contrib.slow_links.methods.noloco import NoLoCoConfig as NoLoCoConfig
from jaxmoe.contrib.slow_links.methods.one_bit_adam import OneBitAdamConfig as OneBitAdamConfig
from jaxmoe.contrib.slow_links.methods.robust import RobustConfig as RobustConfig
from jaxmoe.contrib.slow_links.methods.single_merge import SingleMergeConfig as SingleMergeConfig
from jaxmoe.contrib.slow_links.methods.sparse import SparseConfig as SparseConfig
from jaxmoe.contrib.slow_links.methods.spes import SpesConfig as SpesConfig
from jaxmoe.contrib.slow_links.methods.streaming import StreamingConfig as StreamingConfig
from jaxmoe.contrib.slow_links.sequential_codes import Multiplexed as Multiplexed
from jaxmoe.contrib.slow_links.sequential_codes import SelectiveReattempt as SelectiveReattempt
