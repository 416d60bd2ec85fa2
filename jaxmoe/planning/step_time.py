# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a train step from its FLOPs, its memory traffic and its messages.

    compute        (model FLOPs + those of remat) / devices / (peak * efficiency)
    memory         bytes read and written / bandwidth
    communication  sum over axes of  messages * latency + bytes / bandwidth of the axis
    hidden         min(communication that may be hidden, overlap * max(compute, memory))
    host           bytes to and from host memory / bandwidth of the host's link
    disk           bytes read from files / bandwidth of the disk, which writes as many meanwhile
    step           max(compute, memory) + communication - hidden + max(host, disk);
                   max(compute, memory, communication, host, disk) if everything overlapped

With stages, which recompute the forward pass of every group from its kept input, the layers of the
stages take a third longer (FLOPs: 4 for 3, and those of remat) and 1 + bubble times that; other
layers are computed by all stages alike, those before the stages forward once more. What remat
computes again: `StackFlops.again`.

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

To add a cost: a field of `StepTime` and its value in `time_of`, in
`jaxmoe/planning/step_time.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable

from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.host_link import disk_bytes, host_traffic
from jaxmoe.planning.network.host_order import slowest_link
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.traffic import HIDEABLE, Traffic, traffic_of, waited_traffic
from sharding import axes as ax

_STREAM_PASSES = 30
_AXES_OF_ROWS = (
    ax.ACT_BATCH,
    ax.ACT_SEQ,
    ax.ACT_SEQ_INNER,
    ax.ACT_HEADS,
    ax.EXPERTS,
    ax.EXPERT_MLP,
)
"""Logical axes whose rules `waited_traffic` reads."""


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
    return time_of(Sizes.of(plan), chip)


def time_of(sizes: Sizes, chip: Chip) -> StepTime:
    """Return the same of a step whose sizes are known.

    Args:
        sizes: Sizes of the step.
        chip: Properties of each device.
    """
    plan = sizes.plan
    parameters = sizes.parameters.values()
    local = sum(one.local for one in parameters)
    weights = sum(one.in_use / one.layers * sizes.parameter_passes(one).time for one in parameters)
    stream = sizes.tokens * plan.model.embed_dim * sizes.itemsize
    streams = sum(sizes.stack_passes(stack).time / 3 for stack in sizes.stacks)
    moved = weights * sizes.itemsize + 4 * 8 * local + _STREAM_PASSES * streams * stream
    compute = compute_seconds(sizes, chip)
    memory = moved / chip.memory_bandwidth
    communication = {}
    hideable = 0.0
    for entry in traffic_of(sizes):
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


def least_time(sizes: Sizes, chip: Chip) -> float:
    """Return seconds that a step takes at least: of products, and messages that it waits for.

    It costs a fraction of `time_of`, because it looks at no parameter.

    Args:
        sizes: Sizes of the step.
        chip: Properties of each device.
    """
    waited = sum(seconds_of(entry, sizes.mesh, chip) for entry in waited_traffic(sizes))
    # A sum in another order may differ in its last digits.
    return (compute_seconds(sizes, chip) + waited) * (1 - 1e-9)


def least_time_record(execution: ExecutionConfig) -> tuple[Hashable, ...]:
    """Return all that differs between the `least_time` of the executions that a search compares,
    beside remat and micro-batches: the layouts of training state share it.

    Args:
        execution: Execution with every size of its mesh filled in.
    """
    axes = tuple(map(execution.axis_rules.mesh_axes, _AXES_OF_ROWS))
    return execution.mesh, execution.fold, execution.pipeline, execution.dispatcher, axes


def compute_seconds(sizes: Sizes, chip: Chip) -> float:
    """Return the seconds of the products of a step.

    Args:
        sizes: Sizes of the step.
        chip: Properties of each device.
    """
    return executed_flops(sizes) / math.prod(sizes.mesh.values()) / (chip.flops * chip.efficiency)


def executed_flops(sizes: Sizes) -> float:
    """Return the FLOPs of a step on all devices: recomputation and idle ticks included.

    Args:
        sizes: Sizes of the step.
    """
    plan = sizes.plan
    stages = sizes.mesh[ax.STAGE]
    total = sizes.layout.flops.total * plan.tokens
    for stack in sizes.stacks:
        # Three passes: one forward, and backward the time of two.
        flops = sizes.layout.flops.by_stack[stack.path]
        again = flops.again(sizes.remat(stack))
        if stages == 1:
            total += again * plan.tokens
            continue
        passes = sizes.stack_passes(stack)
        useful = plan.accumulation * stack.num_layers
        executed = passes.time / 3 * flops.total + passes.trained * again
        total += plan.tokens * (stages * executed / useful - flops.total)
    return total


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
