# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.diffusion.masked_diffusion import MaskedDiffusionConfig as MaskedDiffusionConfig
from jaxmoe.training.next_token import NextTokenConfig as NextTokenConfig
from jaxmoe.training.objective import Objective as Objective

OBJECTIVES: Registry
