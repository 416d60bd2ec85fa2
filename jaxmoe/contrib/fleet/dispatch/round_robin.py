# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves requests by one instance after the other: the baseline."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import DispatchConfig, FleetView, RequestDispatcher, Route
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundRobinConfig(DispatchConfig):
    """One instance after the other."""

    name: ClassVar[str] = "round_robin"

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _RoundRobin()


class _RoundRobin(RequestDispatcher):
    def __init__(self) -> None:
        self._next = 0

    def place(self, request: Request, fleet: FleetView) -> Route:
        del request
        chosen = self._next % len(fleet.members)
        self._next += 1
        return Route(chosen)
