# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends a prompt to a remote instance if its keys and values come back before a local one is done.

Source: PrfaaS (arXiv:2604.15039), our reading of its rule. A prompt goes away iff

    time at the remote instance + latency and bytes of keys and values / bandwidth + backlog
        < time at the local instance

The times are those of the work that is there and of the prompt without what is cached; the backlog
is what the link of the remote instance has still to send. By these numbers the choice never takes
longer than to compute every prompt locally. Answers are written locally.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    RequestDispatcher,
    Role,
    Route,
    cached_tokens,
    wait,
)
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrfaasConfig(DispatchConfig):
    """Remote instances for prompts, when that is faster."""

    name: ClassVar[str] = "prfaas"
    needs_moves: ClassVar[bool] = True

    remote: int = 1
    """Instances for prompts alone, the last ones; fewer where the fleet has no more."""
    latency: float = 1e-3
    """Seconds until the first byte arrives."""

    def __post_init__(self) -> None:
        for field in ("remote", "latency"):
            if not (number := getattr(self, field)) >= 0:
                raise ValueError(f"dispatch.{field}={number} must be at least 0")

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return Prfaas(self.latency)

    def roles(self, num_instances: int) -> tuple[Role, ...]:
        """Return what each instance does; the first always serves alone."""
        remote = min(self.remote, num_instances - 1)
        return ("both",) * (num_instances - remote) + ("prefill",) * remote


class Prfaas(RequestDispatcher):
    """Compares the two times."""

    def __init__(self, latency: float):
        self._latency = latency

    def place(self, request: Request, fleet: FleetView) -> Route:
        """Return the faster of the best local and the best remote instance."""
        times = [self.seconds(request, fleet, number) for number in range(len(fleet.members))]
        numbers = {
            role: [i for i, r in enumerate(fleet.roles) if r == role] for role in fleet.roles
        }
        local = min(numbers["both"], key=lambda i: (times[i], i))
        remote = min(numbers.get("prefill", ()), key=lambda i: (times[i], i), default=local)
        return Route(remote, local) if times[remote] < times[local] else Route(local)

    def seconds(self, request: Request, fleet: FleetView, number: int) -> float:
        """Return the predicted seconds until the keys and values of a prompt are at a local one.

        Args:
            request: Request.
            fleet: All instances.
            number: Instance that computes the prompt.
        """
        view = fleet.members[number]
        cached = cached_tokens(view, request)
        computed = wait(view, len(request.prompt) - cached, cached)
        if fleet.roles[number] == "both":
            return computed
        size = len(request.prompt) * view.facts.kv_bytes
        return computed + self._latency + size / fleet.bandwidth + fleet.backlog[number]
