# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that one device exchanges with host memory in a train step.

With S the moments, of stacked layers S', W the parameters of layers in host memory, A the inputs of
the layers of a micro-batch, a micro-batches, and k parts of the L layers of a scan:

    where                    to the device                      to the host
    offload.optimizer host   S + S' / k, and S alone if k = 1   S
    offload.optimizer files  S                                  S
    offload.parameters host  a W (2 L + 1) / L    passes        a W        gradients
                             2 (a - 1) W          sums          (a - 1) W
                             W                    norm
                             2 W (1 + 1 / k)      update        W          parameters
    remat offload            a A                                a A

A loop of the update fetches its last part twice (`Update.fetches`), a pass through streamed layers
the first (`jaxmoe/models/streamed_scan.py`). Gradients have the dtype of
parameters. The forward pass of `accumulated_balance` two_pass is not counted.

To add a reason: a line in `host_traffic`, in `jaxmoe/planning/host_link.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmoe.planning.abstract_step import StepPlan, abstract_state
from jaxmoe.planning.device_bytes import device_bytes
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.sizes import Sizes
from jaxmoe.training.parts.update import state_owners, update_of
from jaxmoe.training.state import layers_on_host


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostTraffic:
    """Bytes between a device and host memory for one reason in one step."""

    reason: str
    to_device: float
    to_host: float

    def seconds(self, chip: Chip) -> float:
        """Return the time of the transfers one after another, with nothing beside them."""
        return (self.to_device + self.to_host) / chip.host_bandwidth


def host_traffic(plan: StepPlan) -> list[HostTraffic]:
    """Return the traffic of a step by reason.

    Args:
        plan: Step to estimate.
    """
    return [*_state(plan), *_inputs(plan)]


def disk_bytes(plan: StepPlan) -> float:
    """Return the bytes of optimiser state that all devices read from files in a step, and write.

    Args:
        plan: Step to estimate.
    """
    if plan.execution.optimizer_memory != "files":
        return 0.0
    leaves = jax.tree.leaves(abstract_state(plan, plan.mesh).opt_state)
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves if leaf.ndim))


def _state(plan: StepPlan) -> Iterator[HostTraffic]:
    execution = plan.execution
    again = plan.accumulation
    if execution.optimizer_memory == "device":
        return
    state = abstract_state(plan, plan.mesh)
    trained = plan.table.select_trained(state.params)
    leaves = jax.tree.leaves(state.opt_state)
    owners = state_owners(state.opt_state, trained)
    fetches = update_of(execution).fetches(plan.model, trained, execution)
    moments = {
        name: _bytes([leaf for leaf, owner in zip(leaves, owners, strict=True) if owner == name])
        for name in fetches
    }
    yield HostTraffic(
        reason="moments",
        to_device=sum(moments[name] * fetches[name] for name in moments),
        to_host=sum(moments.values()),
    )
    away = layers_on_host(plan.model, execution)
    if not away:
        return
    lengths = {scan.name: scan.length for scan in plan.model.scans}
    bytes_by_name = {name: _bytes(jax.tree.leaves(state.params[name])) for name in away}
    layers = {name: _bytes(jax.tree.leaves(trained[name])) for name in away}
    once = sum(layers.values())
    yield HostTraffic(
        reason="layers",
        to_device=again * sum(bytes_by_name[name] * (2 + 1 / lengths[name]) for name in away),
        to_host=0.0,
    )
    yield HostTraffic(
        reason="gradients of layers",
        to_device=(2 * (again - 1) + 1) * once,
        to_host=(again + again - 1) * once,
    )
    yield HostTraffic(
        reason="update of layers",
        to_device=sum(2 * layers[name] * fetches.get(name, 0.0) for name in away),
        to_host=once,
    )


def _inputs(plan: StepPlan) -> Iterator[HostTraffic]:
    execution = plan.execution
    if "offload" not in (execution.remat, execution.remat_dense):
        return
    sizes = Sizes.of(plan)
    layers = sum(stack.num_layers for stack in sizes.stacks if sizes.remat(stack) == "offload")
    stream = sizes.tokens * plan.model.embed_dim * sizes.itemsize * plan.model.residual.arrays
    moved = plan.accumulation * layers * stream
    if moved:
        yield HostTraffic(reason="inputs of layers", to_device=moved, to_host=moved)


def _bytes(leaves: Sequence[Any]) -> int:
    """Return the bytes of the shards of one device."""
    return device_bytes(leaves, "cpu")
