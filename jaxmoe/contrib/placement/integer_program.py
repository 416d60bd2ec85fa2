# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Solves integer linear programs with HiGHS (`scipy.optimize.milp`) and assignment problems.

    min c . x    low <= A x <= high,    0 <= x <= upper,    some x whole numbers

HiGHS takes no starting point here, so callers keep the better of its solution and their own
(`Found.values` is None if the time was too short). `bound` is a lower bound of the cost, also after
the time limit; the relative gap is computed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.optional import require

MOST_ENTRIES = 50_000
"""Nonzero coefficients above which a program is skipped: HiGHS checks the time between its steps,
and the first step alone then takes minutes (80,000: 14 s, nothing found)."""


@dataclasses.dataclass(frozen=True)
class ConstraintRows:
    """Linear constraints as coordinates of their nonzero coefficients."""

    row: Int[np.ndarray, " N"]
    column: Int[np.ndarray, " N"]
    value: Float[np.ndarray, " N"]
    low: Float[np.ndarray, " R"]
    high: Float[np.ndarray, " R"]


@dataclasses.dataclass(frozen=True)
class ProgramSolution:
    """Result of HiGHS."""

    values: Float[np.ndarray, " X"] | None
    """Best solution found, or None."""
    bound: float
    """Lower bound of the cost; -inf if unknown."""


def minimise(
    cost: Float[np.ndarray, " X"],
    constraints: Sequence[ConstraintRows],
    *,
    upper: Float[np.ndarray, " X"],
    is_whole: Bool[np.ndarray, " X"],
    time_limit_s: float,
) -> ProgramSolution:
    """Return the cheapest solution that HiGHS finds within the time limit.

    Args:
        cost: Cost of each variable.
        constraints: Constraints that all hold.
        upper: Upper bound of each variable; the lower bound is 0.
        is_whole: Whether each variable is an integer.
        time_limit_s: Time limit in seconds; 0 skips HiGHS.
    """
    entries = sum(len(rows.value) for rows in constraints)
    if time_limit_s <= 0.0 or entries > MOST_ENTRIES:
        return ProgramSolution(None, -np.inf)
    optimize = require("scipy.optimize")
    sparse = require("scipy.sparse")
    bounds = [
        optimize.LinearConstraint(
            sparse.csr_array(
                (rows.value, (rows.row, rows.column)), shape=(len(rows.low), len(cost))
            ),
            rows.low,
            rows.high,
        )
        for rows in constraints
    ]
    result = optimize.milp(
        cost,
        integrality=is_whole.astype(int),
        bounds=optimize.Bounds(np.zeros(len(cost)), upper),
        constraints=bounds,
        options={"time_limit": time_limit_s},
    )
    bound = getattr(result, "mip_dual_bound", None)
    return ProgramSolution(result.x, -np.inf if bound is None else float(bound))


def sums(variables: Int[np.ndarray, "R N"], total: float) -> ConstraintRows:
    """Return the constraints that each row of variables has a given sum.

    Args:
        variables: Columns of the variables.
        total: Sum of each row.
    """
    number, width = variables.shape
    return ConstraintRows(
        row=np.repeat(np.arange(number), width),
        column=variables.ravel(),
        value=np.ones(variables.size),
        low=np.full(number, total),
        high=np.full(number, total),
    )


def relative_gap(cost: float, bound: float) -> float | None:
    """Return the largest relative distance of a cost from the optimum; None without a bound."""
    if not np.isfinite(bound):
        return None
    return max(cost - bound, 0.0) / cost if cost > 0.0 else 0.0


def assign_evenly(benefit: Float[np.ndarray, "E P"]) -> Int[np.ndarray, " E"]:
    """Return the device of each expert, E/P on each device, with the largest total benefit.

    Args:
        benefit: Benefit of each expert on each device.
    """
    num_experts, num_devices = benefit.shape
    slots = np.repeat(benefit, num_experts // num_devices, axis=1)
    optimize: Any = require("scipy.optimize")
    _, chosen = optimize.linear_sum_assignment(slots, maximize=True)
    return chosen // (num_experts // num_devices)


def follow_layers(
    pairs: Int[np.ndarray, "M E E"], first: Int[np.ndarray, " E"], num_devices: int
) -> Int[np.ndarray, "L E"]:
    """Return each layer's best devices given the layer before.

    Args:
        pairs: Benefit of each two experts of adjacent layers on one device.
        first: Devices of the first layer.
        num_devices: P.
    """
    layers = [first]
    is_on = np.eye(num_devices)
    for benefit in pairs:
        layers.append(assign_evenly(benefit.T @ is_on[layers[-1]]))
    return np.stack(layers)
