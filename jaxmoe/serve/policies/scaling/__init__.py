# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scaling policies: how many instances, devices and watts a fleet has.

To add one: a config that extends `ScalingConfig` in a file of its own in this folder, the union
`ScalingUnion` here, its name in the row of SCALING in `tests/test_architecture.py`, its property in
`tests/jaxmoe/serve/policies/test_scaling.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.serve.policies.scaling.base import Hardware as Hardware
from jaxmoe.serve.policies.scaling.base import ScalingConfig as ScalingConfig
from jaxmoe.serve.policies.scaling.base import ScalingView as ScalingView
from jaxmoe.serve.policies.scaling.base import Wanted as Wanted
from jaxmoe.serve.policies.scaling.elastic_experts import (
    ElasticExpertsConfig as ElasticExpertsConfig,
)
from jaxmoe.serve.policies.scaling.fixed import FixedConfig as FixedConfig
from jaxmoe.serve.policies.scaling.polca import PolcaConfig as PolcaConfig
from jaxmoe.serve.policies.scaling.slo import SLOConfig as SLOConfig

ScalingUnion = FixedConfig | SLOConfig | ElasticExpertsConfig | PolcaConfig

SCALING = registry_of(ScalingUnion)
