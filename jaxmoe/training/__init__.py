# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains models: state, objectives, loss, step, loop, evaluation and hooks.

To add an objective: `jaxmoe/training/next_token.py` as the example, `jaxmoe/training/__init__.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.contrib.training.swept_layers import SweptLayersConfig as SweptLayersConfig
from jaxmoe.training.fit import Fit as Fit
from jaxmoe.training.fit import fit as fit
from jaxmoe.training.masked_diffusion import MaskedDiffusionConfig as MaskedDiffusionConfig
from jaxmoe.training.next_token import NextTokenConfig as NextTokenConfig
from jaxmoe.training.policy_gradient import PolicyGradientConfig as PolicyGradientConfig

ObjectiveConfig = NextTokenConfig | MaskedDiffusionConfig | SweptLayersConfig | PolicyGradientConfig

OBJECTIVES = registry_of(ObjectiveConfig)
