# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lays weights and pages out on another mesh, and counts the bytes that travel for it.

Source: ElasticMoE (arXiv:2510.02613): an instance grows and shrinks while it serves; a device keeps
what it has of its new part and receives the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.contrib.fleet.timing import MeasuredSteps
from jaxmoe.execution import ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.scaling.initialize import parameter_table
from sharding.mesh import MeshConfig, make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resharding:
    """What a change of the mesh has cost."""

    weight_bytes: int
    """Bytes of weights that devices received, before the pause."""
    page_bytes: int
    """Bytes of pages that devices received, between two steps."""
    seconds: float
    """Time between the two steps."""


class MeshLayouts:
    """Lays executors out on other meshes of the devices that each may have."""

    def __init__(self, groups: Sequence[Sequence[Any]], times: MeasuredSteps | None = None):
        """Take the devices.

        Args:
            groups: Devices of each instance, those that it has first.
            times: Gets the time of a step on every new number of devices; None measures nothing.
        """
        self._groups = groups
        self._times = times

    def check(self, number: int, executor: Any, mesh: MeshConfig) -> None:
        """Raise if an instance cannot have a mesh.

        Args:
            number: Instance.
            executor: Its `MeshExecutor`.
            mesh: Mesh with the axes tensor and expert.

        Raises:
            ValueError: Other axes, too few devices, sizes that do not divide, quantised weights, or
                several adapters.
        """
        size = math.prod(mesh.sizes)
        most = len(self._groups[number])
        served = dataclasses.replace(executor.execution, mesh=mesh)
        if min(mesh.sizes) < 1 or size != mesh.tensor * mesh.expert:
            raise ValueError(f"mesh={mesh} must have sizes above 0, of the axes tensor and expert")
        if size > most:
            raise ValueError(
                f"mesh expert={mesh.expert} x tensor={mesh.tensor} needs {size} devices, and"
                f" instance {number} may have {most}: choose sizes whose product is at most {most}"
            )
        check_floating(served)
        if executor.adapters:
            raise ValueError(
                f"the adapters {', '.join(executor.adapters)} are served together on one device:"
                " serve one folded run to change the mesh"
            )
        table = parameter_table(executor.model, rules=served.axis_rules)
        table.check_divides(served.axis_rules, mesh.by_axis)

    def laid_out(self, number: int, executor: Any, mesh: MeshConfig) -> Any:
        """Return an executor of the same weights on a mesh, compiled; the present one serves on.

        Args:
            number: Instance.
            executor: Its `MeshExecutor`.
            mesh: Mesh that `check` has taken.
        """
        devices = self._groups[number][: math.prod(mesh.sizes)]
        execution = dataclasses.replace(executor.execution, mesh=mesh)
        moved = executor.on_mesh(make_mesh(mesh, devices), execution)
        if self._times is not None:
            # Steps of the present executor may run between: the shortest time is the nearest.
            self._times.measure(moved, len(devices), pick=min)
        return moved


def check_floating(execution: ServedConfig) -> None:
    """Raise if weights are quantised, which cannot be laid out on another mesh.

    Args:
        execution: Execution of the weights.
    """
    if (weights := execution.precision.weights) != "floating":
        raise ValueError(
            f"execution.precision.weights={weights!r} stay on the mesh on which they were"
            " quantised: serve floating-point weights, or one instance on one mesh"
        )


def weights_on(model: ModelConfig, params: Any, execution: ServedConfig, mesh: Any) -> Any:
    """Return the parameters laid out on a mesh, wherever they are.

    Args:
        model: Model of the parameters.
        params: Nested dict of floating-point arrays.
        execution: Rules of the mesh.
        mesh: Mesh to lay them out on.

    Raises:
        ValueError: They are quantised.
    """
    check_floating(execution)
    table = parameter_table(model, rules=execution.axis_rules)
    return jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))


def replicated_on(tree: Any, mesh: Any) -> Any:
    """Return a tree of small arrays, whole on every device of a mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def received_bytes(before: Any, after: Any) -> int:
    """Return the bytes that devices have of the second tree and had not of the first.

    Args:
        before: Tree of arrays.
        after: The same arrays, laid out differently.
    """
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return sum(_receive(old, new) for old, new in pairs)


def _receive(old: Any, new: Any) -> int:
    shape = new.shape
    indices = old.sharding.devices_indices_map(shape)
    total = 0
    for device, target_index in new.sharding.devices_indices_map(shape).items():
        total += _size(target_index, shape)
        if device in indices:
            total -= _size(map(_overlap, target_index, indices[device], shape), shape)
    return total * new.dtype.itemsize


def _overlap(first_slice: slice, second_slice: slice, size: int) -> slice:
    (first, end, _), (start, stop, _) = first_slice.indices(size), second_slice.indices(size)
    first = max(first, start)
    end = min(end, stop)
    return slice(first, max(first, end))


def _size(index: Any, shape: tuple[int, ...]) -> int:
    return math.prod(len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True))
