# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Offers a request to the instances for prompts until an idle one accepts: none has a queue.

Source: P/D-Serve (arXiv:2408.08147). A queue at an instance is chosen by a guess of its load; where
requests wait outside instead, the first that is idle takes the oldest. The numbers of instances for
prompts and for answers are in the ratio of the times that a run of the same scenario has measured
(`measured`). The prompt of one request at a time is our reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    RequestDispatcher,
    Role,
    Route,
    freest,
    is_at_rest,
)
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PDServeConfig(DispatchConfig):
    """Instances for prompts that take a request when idle, and others for answers."""

    name: ClassVar[str] = "pd_serve"
    needs_moves: ClassVar[bool] = True

    prefill_seconds: float = 1.0
    """Measured seconds of work on prompts; only the ratio to the next number counts."""
    decode_seconds: float = 1.0
    """Measured seconds of work on answers."""

    def __post_init__(self) -> None:
        for field in ("prefill_seconds", "decode_seconds"):
            if not (seconds := getattr(self, field)) > 0:
                raise ValueError(
                    f"dispatch.{field}={seconds} must be positive: give times that a run has"
                    " measured, or the same number for prefill and decode"
                )

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _PDServe()

    def roles(self, num_instances: int) -> tuple[Role, ...]:
        """Return what each instance does: numbers in the ratio of the measured times."""
        if num_instances < 2:
            raise ValueError(
                f"dispatch='pd_serve' of {num_instances} instance must leave at least one for each"
                " phase: raise instances"
            )
        share = self.prefill_seconds / (self.prefill_seconds + self.decode_seconds)
        prefill = min(max(round(share * num_instances), 1), num_instances - 1)
        return ("prefill",) * prefill + ("decode",) * (num_instances - prefill)

    def after_pilot(self, run: Callable[[], Mapping[Role, float]]) -> PDServeConfig:
        """Return the policy with the ratio of a pilot."""
        seconds = run()
        prefill = seconds.get("prefill", 0.0)
        decode = seconds.get("decode", 0.0)
        if not (prefill > 0 and decode > 0):
            return self  # nothing was measured
        return dataclasses.replace(self, prefill_seconds=prefill, decode_seconds=decode)


class _PDServe(RequestDispatcher):
    def place(self, request: Request, fleet: FleetView) -> Route | None:
        for number, role in enumerate(fleet.roles):
            view = fleet.members[number]
            pages = num_pages(len(request.prompt) + 1, view.facts.page_size)
            if role == "prefill" and is_at_rest(view) and pages <= view.pool.num_free:
                return Route(number, freest(fleet, "decode"))
        return None
