# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
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

SCALING: Registry
