# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a request where the longest beginning of it is cached, unless that instance is busy.

Source: the prefix-aware routing of AIBrix (arXiv:2504.03648): the cached beginning decides until
the numbers of requests differ by more than a threshold, then the load.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    RequestDispatcher,
    Route,
    cached_tokens,
    load,
)
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefixAwareConfig(DispatchConfig):
    """Longest cached beginning, unless the load is uneven."""

    name: ClassVar[str] = "prefix_aware"

    imbalance: int = 8
    """Requests by which the busiest and the idlest instance may differ."""

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _PrefixAware(self.imbalance)


class _PrefixAware(RequestDispatcher):
    def __init__(self, imbalance: int):
        self._imbalance = imbalance

    def place(self, request: Request, fleet: FleetView) -> Route:
        numbers = range(len(fleet.members))
        requests = [len(view.waiting) + view.num_running for view in fleet.members]
        loads = [load(view) for view in fleet.members]
        if max(requests) - min(requests) > self._imbalance:
            return Route(min(numbers, key=lambda i: (loads[i], i)))
        hits = [cached_tokens(view, request) for view in fleet.members]
        return Route(min(numbers, key=lambda i: (-hits[i], loads[i], i)))
