# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a train step from its FLOPs, its memory traffic and its messages.

    compute        (4/3 under remat "full") * model FLOPs / devices / (peak * efficiency)
    memory         bytes read and written / bandwidth
    communication  sum over axes of  messages * latency + bytes / bandwidth of the axis
    hidden         min(communication that may be hidden, overlap * max(compute, memory))
    host           bytes to and from host memory / bandwidth of the host's link
    disk           bytes read from files / bandwidth of the disk, which writes as many meanwhile
    step           max(compute, memory) + communication - hidden + max(host, disk);
                   max(compute, memory, communication, host, disk) if everything overlapped

With stages, which recompute the forward pass of every group from its kept input, the layers of the
stages take a third longer (FLOPs: 4 for 3; 5 under remat "full") and 1 + bubble times that; other
layers are computed by all stages alike, those before the stages forward once more.

Weights are gathered for the next layer and gradients reduced for the last one, so their messages
may be under way beside products; those of tensor, attention, rows and stages are waited for. XLA
hides an unknown part: `Chip.overlap` is 0 unless it is given (`plan --network.overlap`), and the
prediction is then the upper end. Memory traffic counts weights
in use three times, gradients and optimiser state once each way, and about thirty arrays of the size
of the residual stream for each layer. The efficiency of matrix products is an assumption unless a
run has measured it (`jaxmoe/planning/corrections/measured.py`): use these to compare meshes.

A TPU axis runs along a ring of the torus; a GPU axis that spans more than one host is bound by the
network card between hosts, or by the slowest link of its rings where hosts are given
(`plan --network.hosts`). Alpha-beta costs: R. Thakur et al., 2005 (ring algorithms).

To add a cost: a field of `StepTime` and its value in `predict_time`, in
`jaxmoe/planning/step_time.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxmoe.models.flops import flops_per_token, matmul_parameters, stack_mixing_flops
from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.host_link import disk_bytes, host_traffic
from jaxmoe.planning.network.host_order import slowest_link
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.traffic import HIDEABLE, Traffic, step_traffic
from sharding import axes as ax

_STREAM_PASSES = 30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds per step."""

    compute: float
    memory: float
    communication: dict[str, float]
    """Seconds by reason and axes."""
    hidden: float = 0.0
    """Seconds of communication beside products."""
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds between the device and host memory, by reason."""
    disk: float = 0.0
    """Seconds of optimiser state in files; its way through host memory is part of `host`."""

    @property
    def host_seconds(self) -> float:
        """Seconds of host memory and disk, which work at the same time."""
        return max(sum(self.host.values()), self.disk)

    @property
    def all_communication(self) -> float:
        """Seconds of all communication in sequence."""
        return sum(self.communication.values())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return (
            max(self.compute, self.memory)
            + self.all_communication
            - self.hidden
            + self.host_seconds
        )

    @property
    def overlap_bound(self) -> float:
        """Seconds with everything overlapped."""
        return max(self.compute, self.memory, self.all_communication, self.host_seconds)


def predict_time(plan: StepPlan, chip: Chip) -> StepTime:
    """Return the time of a train step.

    Args:
        plan: Step to estimate.
        chip: Properties of each device.
    """
    sizes = Sizes.of(plan)
    num_devices = math.prod(sizes.mesh.values())
    local = sum(map(sizes.local, plan.table))
    weights = sum(
        sizes.in_use(row) / sizes.layers(row) * sizes.row_passes(row).time for row in plan.table
    )
    stream = sizes.tokens * plan.model.embed_dim * sizes.itemsize
    streams = sum(sizes.stack_passes(stack).time / 3 for stack in sizes.stacks)
    moved = weights * sizes.itemsize + 4 * 8 * local + _STREAM_PASSES * streams * stream
    compute = executed_flops(sizes) / num_devices / (chip.flops * chip.efficiency)
    memory = moved / chip.memory_bandwidth
    communication = {}
    hideable = 0.0
    for entry in step_traffic(plan):
        seconds = seconds_of(entry, sizes.mesh, chip)
        communication[f"{entry.reason} over {' x '.join(entry.axes)}"] = seconds
        hideable += seconds * (entry.reason in HIDEABLE)
    return StepTime(
        compute=compute,
        memory=memory,
        communication=communication,
        hidden=min(hideable, chip.overlap * max(compute, memory)),
        host={entry.reason: entry.seconds(chip) for entry in host_traffic(plan)},
        disk=disk_bytes(plan) / chip.disk_bandwidth,
    )


def executed_flops(sizes: Sizes) -> float:
    """Return the FLOPs of a step on all devices: recomputation and idle ticks included.

    Args:
        sizes: Sizes of the step.
    """
    plan = sizes.plan
    model = plan.model
    stages = sizes.mesh[ax.STAGE]
    total = flops_per_token(model, plan.table, plan.sequence_length) * plan.tokens
    for stack in sizes.stacks:
        # Three passes: one forward, and backward the time of two.
        flops = stack_flops(plan, stack) * plan.tokens
        again = 1 / 3 if sizes.remat(stack) in ("full", "offload") else 0.0
        if stages == 1:
            total += flops * again
            continue
        passes = sizes.stack_passes(stack)
        useful = plan.accumulation * stack.num_layers
        executed = passes.time / 3 + passes.trained * again
        total += flops * (stages * executed / useful - 1)
    return total


def stack_flops(plan: StepPlan, stack: LayerStack) -> float:
    """Return the FLOPs per token of the layers of a stack, forward and backward.

    Args:
        plan: Step to estimate.
        stack: Stack of its model.
    """
    rows = [row for row in plan.table if row.path.startswith(f"{stack.path}/")]
    mixing = stack_mixing_flops(plan.model, stack, plan.sequence_length)
    return 6.0 * matmul_parameters(plan.model, ParameterTable(tuple(rows))) + mixing


def seconds_of(traffic: Traffic, mesh: dict[str, int], chip: Chip) -> float:
    """Return the seconds of the messages of one reason in sequence.

    Args:
        traffic: Bytes and messages to send.
        mesh: Size by axis.
        chip: Properties of each device.
    """
    measured = chip.measured_rate(traffic.axes)
    if measured is not None:
        return traffic.messages * measured.latency + traffic.bytes / measured.bandwidth
    reach = _reach(traffic.axes, mesh)
    bandwidth = chip.bandwidth(reach)
    if chip.host_links:
        link = slowest_link(traffic.axes, tuple(mesh.items()), chip.host_links)
        bandwidth = chip.bandwidth(min(reach, chip.domain or reach)) if link is None else link
    hops = traffic.messages * chip.hops(traffic.num_devices) / (traffic.num_devices - 1)
    return hops * chip.link_latency + traffic.bytes / bandwidth


def _reach(axes: Iterable[str], mesh: dict[str, int]) -> int:
    """Return the devices from the first to the last of a group, in mesh order."""
    names = list(mesh)
    reach = 1
    for axis in axes:
        after = math.prod(mesh[name] for name in names[names.index(axis) + 1 :])
        reach += (mesh[axis] - 1) * after
    return reach
