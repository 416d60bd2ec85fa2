# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes prompts and writes answers on different instances.

Source: DistServe (arXiv:2401.09670): neither phase delays the other; the keys and values of a
prompt travel once, after the first token.
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
    freest,
    load,
)
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistServeConfig(DispatchConfig):
    """Instances for prompts, and others for answers."""

    name: ClassVar[str] = "dist_serve"
    needs_moves: ClassVar[bool] = True

    prefill: int = 0
    """Instances for prompts; half of them when 0."""

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _DistServe()

    def roles(self, num_instances: int) -> tuple[Role, ...]:
        """Return what each instance does."""
        prefill = self.prefill or num_instances // 2
        if not 0 < prefill < num_instances:
            raise ValueError(
                f"prefill={prefill} of {num_instances} instances must leave at least one for each"
                " phase: raise instances"
            )
        return ("prefill",) * prefill + ("decode",) * (num_instances - prefill)


class _DistServe(RequestDispatcher):
    def place(self, request: Request, fleet: FleetView) -> Route:
        del request
        prefill = [i for i, role in enumerate(fleet.roles) if role == "prefill"]
        return Route(
            min(prefill, key=lambda i: (load(fleet.members[i]), i)),
            freest(fleet, "decode"),
        )
