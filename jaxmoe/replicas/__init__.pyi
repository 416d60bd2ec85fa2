# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.replicas.kind import ReplicasKind as ReplicasKind
from jaxmoe.replicas.methods.a2cid2 import A2cid2Config as A2cid2Config
from jaxmoe.replicas.methods.co2 import CO2Config as CO2Config
from jaxmoe.replicas.methods.coded import CodedConfig as CodedConfig
from jaxmoe.replicas.methods.diloco import DiLoCoConfig as DiLoCoConfig
from jaxmoe.replicas.methods.econtrol import EControlConfig as EControlConfig
from jaxmoe.replicas.methods.heterogeneous import HeterogeneousConfig as HeterogeneousConfig
from jaxmoe.replicas.methods.noloco import NoLoCoConfig as NoLoCoConfig
from jaxmoe.replicas.methods.one_bit_adam import OneBitAdamConfig as OneBitAdamConfig
from jaxmoe.replicas.methods.robust import RobustConfig as RobustConfig
from jaxmoe.replicas.methods.single_merge import SingleMergeConfig as SingleMergeConfig
from jaxmoe.replicas.methods.sparse import SparseConfig as SparseConfig
from jaxmoe.replicas.methods.spes import SpesConfig as SpesConfig
from jaxmoe.replicas.methods.streaming import StreamingConfig as StreamingConfig
from jaxmoe.replicas.methods.synchronous import SynchronousConfig as SynchronousConfig
from jaxmoe.replicas.sequential_codes import Multiplexed as Multiplexed
from jaxmoe.replicas.sequential_codes import SelectiveReattempt as SelectiveReattempt

REPLICAS: Registry
