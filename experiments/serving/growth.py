# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated requests, as `bench growth` measures what they cost."""

from __future__ import annotations

from collections.abc import Callable

from jaxmoe.contrib.serving_lab.simulation import WORKLOADS, ModelSizes, Roofline, Simulation
from jaxmoe.models.presets import PRESETS
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve import BATCHING, Facts, LatencyObjective


def simulate_requests(number: int) -> Callable[[], object]:
    """Return the simulation of so many requests to OLMoE on one chip.

    Args:
        number: Requests, which arrive at random times.
    """
    cost = Roofline(sizes=ModelSizes.of(PRESETS["olmoe_1b_7b"]()), chip=CHIPS["v5e"])
    facts = Facts(num_pages=4096, page_size=16, max_running=64, max_length=4096, cost=cost)
    workload = WORKLOADS["gamma"](rate=20.0, requests=number)

    def simulate() -> Simulation:
        arrivals = workload.stream(LatencyObjective(), 4096)
        return Simulation(arrivals, facts, BATCHING["split_fuse"](), cost).run()

    return simulate
