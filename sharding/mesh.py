# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`MeshConfig`, and the functions that make every mesh of the library.

Every mesh has all six axes, in the order of `sharding.axes.MESH_AXES`; an axis of size 1 stays, so
that one device and a pod run the same code. Folding (`sharding/fold.py`) may cut some into pieces.
Axes are Explicit: the sharding of every array is part of its type, and a layout that would need an
implicit collective is an error while tracing.

A mesh becomes current with `jax.set_mesh(mesh)`; the model reads the current one.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.axes import MESH_AXES, REPLICA, SEQ
from sharding.fold import MoEMesh, refine
from sharding.topology import device_array, in_host_order

_sizes = operator.attrgetter(*MESH_AXES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes; one may be -1, which stands for the remaining devices."""

    replica: int = 1
    """Copies of the model, across slices; only gradients travel between them."""
    stage: int = 1
    """Pipeline stages, each with a part of the layers; see sharding/pipeline."""
    data: int = 1
    """Devices that share the sequences of a batch and, fully sharded, the parameters."""
    expert: int = 1
    """Devices that share the routed experts; for dense layers they share the batch as well."""
    seq: int = 1
    """Devices that share the positions of one sequence."""
    tensor: int = 1
    """Devices that share the heads and hidden units of a layer."""

    def __post_init__(self):
        sizes = self.sizes
        for axis, size in zip(MESH_AXES, sizes, strict=True):
            if size != -1 and size < 1:
                raise ValueError(
                    f"mesh.{axis}={size} must be at least 1, or -1 for the remaining devices"
                )
        if sizes.count(-1) > 1:
            raise ValueError("only one mesh axis may be -1 (the remaining devices)")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of MESH_AXES."""
        return _sizes(self)

    @property
    def by_axis(self) -> dict[str, int]:
        """Sizes of the axes by name."""
        return dict(zip(MESH_AXES, self.sizes, strict=True))

    def resolve(self, num_devices: int) -> MeshConfig:
        """Return the same mesh with -1 filled in.

        Args:
            num_devices: Devices of the mesh.

        Raises:
            ValueError: The product of the sizes is not `num_devices`.
        """
        num_fixed = math.prod(size for size in self.sizes if size != -1)
        text = " x ".join(f"{a}={s}" for a, s in zip(MESH_AXES, self.sizes, strict=True) if s != 1)
        has_free = -1 in self.sizes
        if num_devices % num_fixed or (num_fixed != num_devices and not has_free):
            need = f"{'a multiple of ' * has_free}{num_fixed} device{'s' * (num_fixed > 1)}"
            if has_free:
                way = f"sizes that divide {num_devices}"
            else:
                way = f"sizes whose product is {num_devices}, or set one axis to -1"
            raise ValueError(
                f"mesh ({text or 'one device'}) needs {need}, there are {num_devices}: choose {way}"
            )
        free = {axis: num_devices // num_fixed for axis in MESH_AXES if getattr(self, axis) == -1}
        return dataclasses.replace(self, **free)

    @property
    def batch_shards(self) -> int:
        """Parts into which the sequences of a batch are divided."""
        return self.replica * self.data * self.expert


def make_mesh(
    config: MeshConfig,
    devices: Sequence[jax.Device] | None = None,
    *,
    fold: MoEMesh | None = None,
    host_order: Sequence[int] = (),
) -> Mesh:
    """Return a mesh with Explicit axes, rings along links and slices on the axis of replicas.

    Args:
        config: Sizes of the axes; -1 is resolved here.
        devices: Devices of the mesh; None: all devices of all processes.
        fold: Another layout of the same devices for the experts.
        host_order: Processes in the order in which their devices fill the mesh; empty keeps the
            order of the devices.

    Raises:
        ValueError: The sizes do not fit the number of devices or one another, the replicas do not
            fit the slices, or the order does not fit the processes.
    """
    devices = list(jax.devices() if devices is None else devices)
    config = config.resolve(len(devices))
    if host_order:
        placed = in_host_order(devices, host_order)
    else:
        placed = device_array(config.by_axis, devices, slice_axis=REPLICA, ring_axes=(SEQ,))
    names, sizes = named_sizes(config, fold)
    return Mesh(placed.reshape(sizes), names, axis_types=_explicit(names))


def abstract_mesh(config: MeshConfig, *, fold: MoEMesh | None = None) -> AbstractMesh:
    """Return a mesh without devices, for shapes, lowering and plans; no axis may be -1."""
    if -1 in config.sizes:
        raise ValueError("an abstract mesh has no devices to count: give every axis its size")
    names, sizes = named_sizes(config, fold)
    return AbstractMesh(sizes, names, axis_types=_explicit(names))


def named_sizes(
    config: MeshConfig, fold: MoEMesh | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and sizes of the axes of a mesh, folded axes in pieces.

    Args:
        config: Sizes of the axes, all known if there is a fold.
        fold: Layout for the experts.
    """
    if fold is None:
        return MESH_AXES, config.sizes
    cut = dict(refine(config.by_axis, fold).dense)
    parts = [
        part for axis, size in config.by_axis.items() for part in cut.get(axis, ((axis, size),))
    ]
    return tuple(name for name, _ in parts), tuple(size for _, size in parts)


def _explicit(names: tuple[str, ...]) -> tuple[AxisType, ...]:
    return (AxisType.Explicit,) * len(names)


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """Return a tree of NamedSharding.

    Args:
        specs: Tree of PartitionSpec.
        mesh: Mesh whose axes they name.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
