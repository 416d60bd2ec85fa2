# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which instance of a fleet serves a request, and how many instances there are."""

from __future__ import annotations

import dataclasses

from jaxmoe.contrib.fleet.dispatch import DispatchConfig, LeastLoadedDispatchConfig
from jaxmoe.contrib.fleet.scaling import FixedScalingConfig, ScalingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How several instances share the requests of an engine."""

    dispatch: DispatchConfig = LeastLoadedDispatchConfig()
    """Which instance serves a request, where there are several."""
    scaling: ScalingConfig = FixedScalingConfig()
    """How many instances take requests, and on how many devices each is."""
