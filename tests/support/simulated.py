# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Small simulated instances for tests of policies."""

from __future__ import annotations

import dataclasses

from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.simulation import WORKLOADS, ModelSizes, Roofline, Simulation
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve import Facts, LatencyObjective

SIZES = ModelSizes(
    num_layers=12,
    embed_dim=1024,
    dense=60_000_000,
    head=50_000_000,
    expert=2_000_000,
    num_experts=32,
    top_k=4,
    moe_layers=12,
    kv_bytes=24_576,
    pair_flops=12 * 4 * 1024.0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticks(Roofline):
    """Every step takes one second."""

    def cost(self, parts, *, share=1.0, nano_batches=1):
        found = Roofline.cost(self, parts, share=share, nano_batches=nano_batches)
        return dataclasses.replace(found, seconds=1.0)


COST = Roofline(sizes=SIZES, chip=CHIPS["v5e"])
FACTS = Facts(
    num_pages=600,
    page_size=16,
    max_running=32,
    max_length=4096,
    num_layers=12,
    capabilities=frozenset({"pages", "partitions", "layers"}),
    cost=COST,
)
ONE_LANE = [name for name, one in EVERY_BATCHING.items() if "partitions" not in one.needs]
"""Policies that an executor on pages can run."""
OBJECTIVE = LatencyObjective(ttft=0.5, tpot=0.02)


def arrivals(name="gamma", objective=OBJECTIVE, **fields):
    small = {"prompt_median": 120.0, "answer_median": 6.0}
    given = {"rate": 60.0, "requests": 12, **small, **fields}
    return WORKLOADS[name](**given).arrivals(objective, FACTS.max_length)


def simulated(policy="split_fuse", given=None, *, cost=COST, fields=None, facts=None, **options):
    facts = dataclasses.replace(FACTS, cost=cost, **(facts or {}))
    config = EVERY_BATCHING[policy](**(fields or {}))
    given = arrivals() if given is None else given
    return Simulation(
        given, facts, config, cost, keeps_plans=True, keeps_sequences=True, **options
    ).run()
