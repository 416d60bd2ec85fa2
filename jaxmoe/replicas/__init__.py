# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods of training with workers that communicate rarely or briefly.

To add a method: a file in jaxmoe/replicas/ with a config class, as jaxmoe/replicas/diloco.py, its
class in `ReplicasConfig` in jaxmoe/replicas/__init__.py, a row in REGISTRIES of
tests/test_architecture.py, a row in METHODS of tests/jaxmoe/replicas/test_methods.py, or of
GRADIENT_METHODS in tests/jaxmoe/replicas/test_gradient_methods.py.
"""

from jaxmoe.configs import registry_of
from jaxmoe.replicas.coded import CodedConfig as CodedConfig
from jaxmoe.replicas.diloco import DiLoCoConfig as DiLoCoConfig
from jaxmoe.replicas.econtrol import EControlConfig as EControlConfig
from jaxmoe.replicas.one_bit_adam import OneBitAdamConfig as OneBitAdamConfig
from jaxmoe.replicas.robust import RobustConfig as RobustConfig
from jaxmoe.replicas.sequential_codes import Multiplexed as Multiplexed
from jaxmoe.replicas.sequential_codes import SelectiveReattempt as SelectiveReattempt
from jaxmoe.replicas.synchronous import SynchronousConfig as SynchronousConfig

ReplicasConfig = (
    SynchronousConfig
    | DiLoCoConfig
    | CodedConfig
    | EControlConfig
    | OneBitAdamConfig
    | RobustConfig
)
"""How the workers of a run communicate."""

REPLICAS = registry_of(ReplicasConfig)
"""{name: config class}."""
