# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.training.surrogate import SurrogateConfig as SurrogateConfig
from jaxmoe.training.estimators.backprop import BackpropConfig as BackpropConfig
from jaxmoe.training.estimators.base import Gradients as Gradients
from jaxmoe.training.estimators.base import StepGradients as StepGradients
from jaxmoe.training.estimators.evolution import EvolutionConfig as EvolutionConfig
from jaxmoe.training.estimators.seed_pool import SeedPoolConfig as SeedPoolConfig
from jaxmoe.training.estimators.spsa import SPSAConfig as SPSAConfig

ESTIMATORS: Registry
