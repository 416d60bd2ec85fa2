# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MoETuner: clusters experts by load, then places clusters to minimise the busiest link.

    1.  per layer          min sum_g |load_g - mean|            P clusters of E/P experts
    2.  all layers         min max over pairs of devices {c, d} of
                           (tokens between c and d from a layer to the next)

The second program has a permutation y[l, k, c] of clusters for each layer, and the traffic from
cluster k on c to cluster m on d as z[l, k, m, c, d], a transport plan:

    sum_d z[l, k, m, c, d] = y[l, k, c],    sum_c z[l, k, m, c, d] = y[l + 1, m, d]

which is y[l, k, c] y[l + 1, m, d] for integer y. All links are equal (the paper divides by their
bandwidths), so the devices are interchangeable and the clusters of the first layer are fixed.

Other candidates: for 1 the largest load first to the lightest cluster that is not full, for 2 each
layer the best for the one before, then swaps of two clusters of a layer while the largest traffic
falls (or the sum, at an equal largest). Identity is a candidate in both, so the result is never
worse by imbalance and then by largest traffic.

Source: MoETuner (arXiv 2502.06643). Readings: clusters of equal size, because the mesh splits
experts evenly, while the paper requires clusters that are not empty and equal numbers over all
layers; traffic summed over both directions and all layers. The time limit ends the search, in place
of the paper's tolerance of 2.5%.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jaxmoe.contrib.placement.integer_program import (
    ConstraintRows,
    follow_layers,
    minimise,
    relative_gap,
    sums,
)
from jaxmoe.contrib.placement.measures import flows, imbalance, pair_traffic
from jaxmoe.contrib.placement.solution import Placer, Solution, check_time_limit
from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement, check_devices

Flow = Int[np.ndarray, "M P P"]
Labels = Int[np.ndarray, "L P"]
"""The device of each cluster."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoETunerConfig(Placer):
    """Equalises the loads of the devices first, then minimises the busiest pair of devices."""

    name: ClassVar[str] = "moetuner"

    time_limit_s: float = 30.0
    """Time limit for HiGHS, seconds: half for clusters, half for devices; 0 skips it."""

    def __post_init__(self):
        check_time_limit(self.time_limit_s)

    def solve(self, trace: RoutingTrace, num_devices: int) -> Solution:
        """Return a placement; its cost is the largest traffic of a pair of devices.

        Args:
            trace: Routing trace with loads and affinity.
            num_devices: P.

        Raises:
            ValueError: P does not divide E.
        """
        check_devices(trace.num_experts, num_devices)
        loads = trace.loads()
        affinity = trace.affinity()
        layers = trace.num_layers
        half = self.time_limit_s / 2
        clusters = np.stack(
            [cluster_by_load(layer, num_devices, time_limit_s=half / layers) for layer in loads]
        )
        flow = flows(affinity, clusters, num_devices)
        labels, gap = label_devices(flow, layers, time_limit_s=half)
        placed = np.take_along_axis(labels, clusters, axis=1)
        identity = ExpertPlacement.identity(layers, trace.num_experts, num_devices).device_of

        def cost(devices: np.ndarray) -> tuple[float, float]:
            traffic = pair_traffic(flows(affinity, devices, num_devices))
            return imbalance(loads, devices, num_devices), float(traffic.max())

        is_placed = cost(placed) < cost(identity)
        best = placed if is_placed else identity
        return Solution(
            placement=ExpertPlacement(best, num_devices),
            found_by="clusters on devices" if is_placed else "identity",
            cost=cost(best)[1],
            gap=gap if is_placed else None,
        )


def cluster_by_load(
    loads: Int[np.ndarray, " E"], num_devices: int, *, time_limit_s: float
) -> Int[np.ndarray, " E"]:
    """Return the cluster of each expert, E/P in each, with loads as equal as found.

    Args:
        loads: Assignments of each expert of one layer.
        num_devices: P, the number of clusters.
        time_limit_s: Time limit for HiGHS, seconds.
    """
    number = len(loads)
    share = len(loads) // num_devices
    greedy = np.zeros(number, int)
    device_totals = np.zeros(num_devices)
    free = np.full(num_devices, share)
    for expert in np.argsort(-loads, kind="stable"):
        cluster = int(np.argmin(np.where(free > 0, device_totals, np.inf)))
        greedy[expert] = cluster
        device_totals[cluster] += loads[expert]
        free[cluster] -= 1
    candidates = [np.arange(number) // share, greedy]
    program_labels = _clusters_by_program(loads, num_devices, time_limit_s)
    if program_labels is not None:
        candidates.append(program_labels)
    return min(candidates, key=lambda labels: imbalance(loads[None], labels[None], num_devices))


def _clusters_by_program(
    loads: Int[np.ndarray, " E"], num_devices: int, time_limit_s: float
) -> Int[np.ndarray, " E"] | None:
    number = len(loads)
    mean = loads.sum() / num_devices
    x = np.arange(number * num_devices).reshape(number, num_devices)
    off = x.size + np.arange(num_devices)
    cost = np.concatenate([np.zeros(x.size), np.ones(num_devices)])
    upper = np.ones(x.size + num_devices)
    upper[off] = np.inf
    upper[x[np.arange(num_devices)[None, :] > np.arange(number)[:, None]]] = (
        0.0  # symmetry of the clusters
    )
    clusters = np.arange(num_devices)
    distances = [
        ConstraintRows(
            row=np.concatenate([np.repeat(clusters, number), clusters]),
            column=np.concatenate([x.T.ravel(), off]),
            value=np.concatenate([np.tile(sign * loads, num_devices), -np.ones(num_devices)]),
            low=np.full(num_devices, -np.inf),
            high=np.full(num_devices, sign * mean),
        )
        for sign in (1.0, -1.0)
    ]
    constraints = [*distances, sums(x, 1.0), sums(x.T, number / num_devices)]
    solution = minimise(
        cost,
        constraints,
        upper=upper,
        is_whole=np.arange(len(cost)) < x.size,
        time_limit_s=time_limit_s,
    )
    return None if solution.values is None else solution.values[x].argmax(-1)


def label_devices(
    flow: Flow, num_layers: int, *, time_limit_s: float
) -> tuple[Labels, float | None]:
    """Return the device of each cluster, and the relative gap of the largest traffic.

    Args:
        flow: Pairs of slots between the clusters of adjacent layers.
        num_layers: L.
        time_limit_s: Time limit for HiGHS, seconds.
    """
    number = flow.shape[1]
    same = np.tile(np.arange(number), (num_layers, 1))
    starts = (same, follow_layers(flow, same[0], number))
    candidates = [*starts, *(_swap(flow, labels) for labels in starts)]
    found, bound = _labels_by_program(flow, num_layers, time_limit_s)
    if found is not None:
        candidates.append(found)
    best = min(candidates, key=lambda labels: _crowding(flow, labels))
    return best, relative_gap(_crowding(flow, best)[0], bound)


def _crowding(flow: Flow, labels: Labels) -> tuple[float, float]:
    """Return the largest traffic of a pair of devices, and the sum over pairs."""
    traffic = pair_traffic(flows(flow, labels, flow.shape[1]))
    return float(traffic.max()), float(traffic.sum())


def _swap(flow: Flow, labels: Labels) -> Labels:
    """Return labels improved by swaps of two clusters of a layer."""
    labels, cost, is_better = labels.copy(), _crowding(flow, labels), True
    pairs = np.argwhere(np.triu(np.ones((flow.shape[1],) * 2), 1))
    while is_better:
        is_better = False
        for layer in range(len(labels)):
            for first, second in pairs:
                labels[layer, [first, second]] = labels[layer, [second, first]]
                new = _crowding(flow, labels)
                if new < cost:
                    cost = new
                    is_better = True
                else:
                    labels[layer, [first, second]] = labels[layer, [second, first]]
    return labels


def _labels_by_program(
    flow: Flow, num_layers: int, time_limit_s: float
) -> tuple[Labels | None, float]:
    number = flow.shape[1]
    y = np.arange(num_layers * number**2).reshape(num_layers, number, number)
    layer, k, m = np.argwhere(flow > 0).T
    z = y.size + np.arange(len(layer) * number**2).reshape(len(layer), number, number)
    worst = y.size + z.size
    cost = np.zeros(worst + 1)
    cost[worst] = 1.0
    upper = np.ones(worst + 1)
    upper[worst] = np.inf
    upper[y[0][~np.eye(number, dtype=bool)]] = 0.0
    first, second = np.triu_indices(number, 1)
    weight = np.tile(flow[layer, k, m].astype(float), (len(first), 1))  # pairs of devices, flows
    pair = np.arange(len(first))
    crowded = ConstraintRows(
        row=np.concatenate([np.repeat(pair, 2 * len(layer)), pair]),
        column=np.concatenate(
            [
                np.concatenate([z[:, first, second], z[:, second, first]]).T.ravel(),
                np.full(len(pair), worst),
            ]
        ),
        value=np.concatenate([np.tile(weight, 2).ravel(), -np.ones(len(pair))]),
        low=np.full(len(pair), -np.inf),
        high=np.zeros(len(pair)),
    )
    constraints = [
        *([crowded] if len(pair) else []),
        sums(y.reshape(-1, number), 1.0),
        sums(y.swapaxes(1, 2).reshape(-1, number), 1.0),
        _equals(z.reshape(-1, number), y[layer, k].ravel()),
        _equals(z.swapaxes(1, 2).reshape(-1, number), y[layer + 1, m].ravel()),
    ]
    solution = minimise(
        cost,
        constraints,
        upper=upper,
        is_whole=np.arange(len(cost)) < y.size,
        time_limit_s=time_limit_s,
    )
    return None if solution.values is None else solution.values[y].argmax(-1), solution.bound


def _equals(variables: Int[np.ndarray, "R N"], total: Int[np.ndarray, " R"]) -> ConstraintRows:
    """Return the constraints that each row of variables sums to another variable."""
    rows, width = variables.shape
    return ConstraintRows(
        row=np.concatenate([np.repeat(np.arange(rows), width), np.arange(rows)]),
        column=np.concatenate([variables.ravel(), total]),
        value=np.concatenate([np.ones(variables.size), -np.ones(rows)]),
        low=np.zeros(rows),
        high=np.zeros(rows),
    )
