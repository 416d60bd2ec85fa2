# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.routing.biases.base import SelectionBias as SelectionBias
from jaxmoe.routing.biases.bip import BipConfig as BipConfig
from jaxmoe.routing.biases.loss_free import LossFreeConfig as LossFreeConfig
from jaxmoe.routing.biases.quantile import QuantileConfig as QuantileConfig
