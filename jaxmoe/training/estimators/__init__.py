# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the socket `Gradients`: how a step gets its gradient.

To add an estimator: a config that extends `Gradients` in a file of its own in
`jaxmoe/training/estimators`, the union `GradientsConfig` in its `__init__.py`, its name in the row
of ESTIMATORS in `tests/test_architecture.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.contrib.training.surrogate import SurrogateConfig as SurrogateConfig
from jaxmoe.training.estimators.backprop import BackpropConfig as BackpropConfig
from jaxmoe.training.estimators.base import Gradients as Gradients
from jaxmoe.training.estimators.base import StepGradients as StepGradients
from jaxmoe.training.estimators.evolution import EvolutionConfig as EvolutionConfig
from jaxmoe.training.estimators.seed_pool import SeedPoolConfig as SeedPoolConfig
from jaxmoe.training.estimators.spsa import SPSAConfig as SPSAConfig

GradientsConfig = BackpropConfig | SPSAConfig | SeedPoolConfig | EvolutionConfig | SurrogateConfig

ESTIMATORS = registry_of(GradientsConfig)
