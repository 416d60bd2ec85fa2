# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""ExFlow: places consecutive experts on the same device, so that few tokens change devices.

    x[l, e, c] in {0, 1}     expert e of layer l is on device c
    sum_c x = 1,   sum_e x[l, e, c] = E/P
    max sum over l, a, b, c of affinity[l, a, b] z[l, a, b, c],   z <= x[l, a, c], x[l + 1, b, c]

This is the paper's program (a crossing variable for every traced token, layer and device) with
equal tokens counted together, and with pairs that stay counted instead of pairs that cross. Devices
are interchangeable, so expert e of the first layer may only be on devices 0 to e.

HiGHS proves the optimum of small cases; its bound is weak (an even spread of every expert over the
devices has no crossings), and it is skipped above `integer_program.MOST_ENTRIES`. Other candidates:

    identity   the order of the model
    greedy     layer by layer, each optimal given the layer before (an assignment problem)
    grown      device by device: the expert with most affinity to those already there

each improved layer by layer, given both neighbours, until no layer gains. The best of all is
returned: never worse than identity or greedy.

Source: ExFlow (arXiv 2401.08383): affinity, program, equal shares, without its two levels (nodes,
then devices of a node).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.contrib.placement.integer_program import (
    ConstraintRows,
    assign_evenly,
    follow_layers,
    minimise,
    relative_gap,
    sums,
)
from jaxmoe.contrib.placement.measures import Devices, crossings
from jaxmoe.contrib.placement.solution import Placer, Solution, check_time_limit
from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement, check_devices

Affinity = Int[np.ndarray, "M E E"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExFlowConfig(Placer):
    """Minimises crossings between adjacent layers."""

    name: ClassVar[str] = "exflow"

    time_limit_s: float = 30.0
    """Time limit for HiGHS, seconds; 0 skips it."""

    def __post_init__(self):
        check_time_limit(self.time_limit_s)

    def solve(self, trace: RoutingTrace, num_devices: int) -> Solution:
        """Return a placement.

        Args:
            trace: Routing trace with the affinity.
            num_devices: P.

        Raises:
            ValueError: P does not divide E.
        """
        check_devices(trace.num_experts, num_devices)
        affinity = trace.affinity()
        layers = trace.num_layers
        identity = ExpertPlacement.identity(layers, trace.num_experts, num_devices).device_of
        candidates = {
            "identity": identity,
            "greedy": follow_layers(affinity, identity[0], num_devices),
            "grown": _grow(affinity, trace.loads(), num_devices),
        }
        candidates |= {
            f"{name}, improved": _improve(affinity, devices, num_devices)
            for name, devices in candidates.items()
        }
        solution, bound = _program(affinity, layers, num_devices, self.time_limit_s)
        if solution is not None:
            candidates["highs"] = solution
        costs = {name: crossings(affinity, devices) for name, devices in candidates.items()}
        best = min(costs, key=lambda name: costs[name])
        return Solution(
            placement=ExpertPlacement(candidates[best], num_devices),
            found_by=best,
            cost=float(costs[best]),
            gap=relative_gap(costs[best], bound),
        )


def _grow(
    affinity: Affinity, loads: Int[np.ndarray, "L E"], num_devices: int
) -> Int[np.ndarray, "L E"]:
    """Fill one device after another, each from the busiest free expert of the first layer."""
    layers, number = loads.shape
    device_of = np.full((layers, number), -1)
    share = number // num_devices
    for device in range(num_devices):
        pull = np.zeros((layers, number))
        free = np.full(layers, share)
        layer = 0
        expert = int(np.argmax(np.where(device_of[0] < 0, loads[0], -1)))
        for _ in range(layers * share):
            device_of[layer, expert] = device
            free[layer] -= 1
            if layer > 0:
                pull[layer - 1] += affinity[layer - 1, :, expert]
            if layer + 1 < layers:
                pull[layer + 1] += affinity[layer, expert]
            is_open = (device_of < 0) & (free > 0)[:, None]
            best = int(np.argmax(np.where(is_open, pull, -1.0)))
            layer, expert = divmod(best, number)
    return device_of


def _improve(affinity: Affinity, devices: Devices, num_devices: int) -> Int[np.ndarray, "L E"]:
    """Return devices improved layer by layer, given both neighbours, until no layer gains."""
    devices = devices.copy()
    is_on = np.eye(num_devices)
    is_better = True
    while is_better:
        is_better = False
        for layer in range(len(devices)):
            benefit = np.zeros((devices.shape[1], num_devices))
            if layer > 0:
                benefit += affinity[layer - 1].T @ is_on[devices[layer - 1]]
            if layer + 1 < len(devices):
                benefit += affinity[layer] @ is_on[devices[layer + 1]]
            best = assign_evenly(benefit)
            if _total(benefit, best) > _total(benefit, devices[layer]):
                devices[layer], is_better = best, True
    return devices


def _total(benefit: Float[np.ndarray, "E P"], devices: Int[np.ndarray, " E"]) -> float:
    return float(benefit[np.arange(len(devices)), devices].sum())


def _program(
    affinity: Affinity, num_layers: int, num_devices: int, time_limit_s: float
) -> tuple[Int[np.ndarray, "L E"] | None, float]:
    """Return the placement of HiGHS, or None, and a lower bound of the crossings."""
    number = affinity.shape[1]
    pairs = np.argwhere(affinity > 0)
    if not len(pairs):
        return None, 0.0
    x = np.arange(num_layers * number * num_devices).reshape(num_layers, number, num_devices)
    z = x.size + np.arange(len(pairs) * num_devices).reshape(len(pairs), num_devices)
    layer, expert, next_expert = pairs.T
    weight = affinity[layer, expert, next_expert].astype(float)
    cost = np.zeros(x.size + z.size)
    cost[z] = -weight[:, None]
    upper = np.ones(len(cost))
    if num_layers:
        forbidden = np.arange(num_devices)[None, :] > np.arange(number)[:, None]
        upper[x[0][forbidden]] = 0.0
    ends = [x[layer, expert], x[layer + 1, next_expert]]
    row = np.arange(z.size)
    stays = [
        ConstraintRows(
            row=np.concatenate([row, row]),
            column=np.concatenate([z.ravel(), end.ravel()]),
            value=np.concatenate([np.ones(z.size), -np.ones(z.size)]),
            low=np.full(z.size, -np.inf),
            high=np.zeros(z.size),
        )
        for end in ends
    ]
    shares = x.swapaxes(1, 2).reshape(-1, number)
    constraints = [
        *stays,
        sums(x.reshape(-1, num_devices), 1.0),
        sums(shares, number / num_devices),
    ]
    is_whole = np.arange(len(cost)) < x.size
    solution = minimise(
        cost, constraints, upper=upper, is_whole=is_whole, time_limit_s=time_limit_s
    )
    # Crossings are integers and not negative.
    bound = solution.bound
    if np.isfinite(bound):
        bound = max(float(np.ceil(weight.sum() + bound - 1e-6)), 0.0)
    if solution.values is None:
        return None, bound
    return solution.values[x].argmax(-1), bound
