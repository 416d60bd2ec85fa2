# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a request by the instance with the fewest tokens left to compute."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    RequestDispatcher,
    Route,
    load,
)
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeastLoadedDispatchConfig(DispatchConfig):
    """Instance with the fewest tokens left to compute."""

    name: ClassVar[str] = "least_loaded"

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _LeastLoaded()


class _LeastLoaded(RequestDispatcher):
    def place(self, request: Request, fleet: FleetView) -> Route:
        del request
        return Route(min(range(len(fleet.members)), key=lambda i: (load(fleet.members[i]), i)))
