# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps all instances as they are."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.contrib.fleet.scaling.base import Scaler, ScalingConfig, Wanted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedScalingConfig(ScalingConfig):
    """All instances, always."""

    name: ClassVar[str] = "fixed"

    @property
    def seconds(self) -> float:
        """Infinity: there is nothing to decide."""
        return math.inf

    def first(self, num_instances: int) -> int:
        """Return all instances."""
        return num_instances

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        return lambda view: Wanted()
