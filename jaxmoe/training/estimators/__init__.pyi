# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.training.estimators.backprop import BackpropConfig as BackpropConfig
from jaxmoe.training.estimators.base import Gradients as Gradients
from jaxmoe.training.estimators.base import StepGradients as StepGradients

ESTIMATORS: Registry
