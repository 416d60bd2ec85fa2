# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Training: state, objectives, loss, step, loop, evaluation, hooks.

To add an objective: see `jaxmoe/training/next_token.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.training.masked_diffusion import MaskedDiffusionConfig as MaskedDiffusionConfig
from jaxmoe.training.next_token import NextTokenConfig as NextTokenConfig

ObjectiveConfig = NextTokenConfig | MaskedDiffusionConfig

OBJECTIVES = registry_of(ObjectiveConfig)
