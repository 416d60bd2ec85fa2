# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods of training with workers that communicate rarely or briefly.

To add a method: a file in jaxmoe/replicas/ with a config class, as jaxmoe/replicas/diloco.py, its
class in `ReplicasConfig` in jaxmoe/replicas/__init__.py, a row in REGISTRIES of
tests/test_architecture.py, a row in METHODS of tests/jaxmoe/replicas/test_methods.py.
"""

from jaxmoe.configs import registry_of
from jaxmoe.replicas.co2 import CO2Config as CO2Config
from jaxmoe.replicas.dadao import DadaoConfig as DadaoConfig
from jaxmoe.replicas.diloco import DiLoCoConfig as DiLoCoConfig
from jaxmoe.replicas.noloco import NoLoCoConfig as NoLoCoConfig
from jaxmoe.replicas.single_merge import SingleMergeConfig as SingleMergeConfig
from jaxmoe.replicas.sparse import SparseConfig as SparseConfig
from jaxmoe.replicas.spes import SpesConfig as SpesConfig
from jaxmoe.replicas.streaming import StreamingConfig as StreamingConfig
from jaxmoe.replicas.synchronous import SynchronousConfig as SynchronousConfig

ReplicasConfig = (
    SynchronousConfig
    | DiLoCoConfig
    | StreamingConfig
    | SparseConfig
    | NoLoCoConfig
    | CO2Config
    | SingleMergeConfig
    | SpesConfig
    | DadaoConfig
)
"""How the workers of a run communicate."""

REPLICAS = registry_of(ReplicasConfig)
"""{name: config class}."""
