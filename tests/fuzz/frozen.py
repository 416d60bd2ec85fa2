# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws roles whose parameters are not trained for a share of the runs of `meshes`.

It takes a generator of its own, so that the other draws are those of a run before frozen parameters
were drawn.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxmoe.parameters import FROZEN, ParameterTable
from jaxmoe.run.plan import RunPlan
from tests.fuzz.outcome import is_likely

SHARE = 0.2
"""Share of the draws that have frozen parameters."""


def draw_frozen(rng: np.random.Generator, table: ParameterTable) -> tuple[str, ...]:
    """Return some of the roles of a table, not all; in most draws none."""
    roles = sorted({row.declaration.role for row in table})
    if not is_likely(rng, SHARE):
        return ()
    return tuple(map(str, rng.permutation(roles)[: rng.integers(1, len(roles))]))


def freeze(plan: RunPlan, roles: tuple[str, ...]) -> RunPlan:
    """Return the plan without training of the parameters of some roles."""
    if not roles:
        return plan
    rows = (
        dataclasses.replace(row, hyper=dataclasses.replace(row.hyper, group=FROZEN))
        if row.declaration.role in roles
        else row
        for row in plan.table
    )
    table = ParameterTable(tuple(rows))
    optimizer = plan.config.optimizer.build(table, plan.schedule)
    return dataclasses.replace(plan, table=table, optimizer=optimizer)
