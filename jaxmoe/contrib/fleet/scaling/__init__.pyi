# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.fleet.scaling.base import Hardware as Hardware
from jaxmoe.contrib.fleet.scaling.base import ScalingConfig as ScalingConfig
from jaxmoe.contrib.fleet.scaling.base import ScalingView as ScalingView
from jaxmoe.contrib.fleet.scaling.base import Wanted as Wanted
from jaxmoe.contrib.fleet.scaling.elastic_experts import (
    ElasticExpertsConfig as ElasticExpertsConfig,
)
from jaxmoe.contrib.fleet.scaling.fixed import FixedScalingConfig as FixedScalingConfig
from jaxmoe.contrib.fleet.scaling.polca import PolcaConfig as PolcaConfig
from jaxmoe.contrib.fleet.scaling.slo import SLOConfig as SLOConfig

SCALING: Registry
