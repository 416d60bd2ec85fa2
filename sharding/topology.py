# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Orders devices in a mesh: rings along links, slices outermost.

A ring passes keys and values from each device to the next, so neighbours on the axis should be
neighbours in the machine. `jax.make_mesh` does not ensure it: on v5e:2x4 its only axis of 8 hops
1, 2, 1, 2 and so on. `ring_order` walks a grid of coordinates instead (a Hamiltonian walk). All but
one dimension are laid in one row by a snake; then on R rows of C devices, R even,

    go along the first row, return through the second without its first device, and so on; close
    the ring through the first devices of all rows.

Every hop is 1, the closing one too. A grid of an odd number of devices has no closed walk, since
every hop changes the colour of a chessboard; a line has none either. Both get an open walk, where
only the closing hop is long: up to the sum of the sizes less the dimensions. Wrap-around links (a
whole v5e or v6e pod, v4 and v5p in cubes of 4) are not counted and can only shorten it.

Slices of a TPU are joined by the data-centre network, which only the replica axis may use
(`jax.experimental.mesh_utils.create_hybrid_device_mesh`). On GPUs, where JAX calls a host a slice,
devices stay in their order: the last axes are within hosts.

To add an axis along which a ring runs: `ring_axes` in `make_mesh` of sharding/mesh.py.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

Coordinates = tuple[int, ...]


def device_array(
    sizes: Mapping[str, int],
    devices: Sequence[Any],
    *,
    slice_axis: str,
    ring_axes: Sequence[str],
) -> np.ndarray:
    """Return devices in the shape of a mesh, as `jax.sharding.Mesh` takes them.

    Args:
        sizes: Sizes of the axes by name, in the order of the mesh; their product is the number of
            devices.
        devices: All devices of the mesh.
        slice_axis: The only axis that may cross slices.
        ring_axes: Axes along which, together, a ring runs; the last is the fastest.

    Raises:
        ValueError: Slices differ in size, or their number does not divide the slice axis.
    """
    names = tuple(sizes)
    shape = tuple(sizes.values())
    by_slice = collections.Counter(_slice(device) for device in devices)
    if len(by_slice) == 1:
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        _check_slices(sizes[slice_axis], slice_axis, by_slice)
        across = [len(by_slice) if name == slice_axis else 1 for name in names]
        within = [size // n for size, n in zip(shape, across, strict=True)]
        array = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    return _along_links(array, [names.index(name) for name in ring_axes])


def in_host_order(devices: Sequence[Any], host_order: Sequence[int]) -> np.ndarray:
    """Return the devices host by host in a given order, those of a host by number.

    A host is a process. `device_array` would sort the devices of GPUs again.

    Args:
        devices: All devices of the mesh.
        host_order: Processes in the order in which their devices fill the mesh.

    Raises:
        ValueError: The order does not name every process of the devices once, or the devices are
            placed by coordinates.
    """
    by_host: dict[int, list[Any]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    if sorted(host_order) != sorted(by_host):
        raise ValueError(
            f"host_order={tuple(host_order)} must name every process of the mesh once:"
            f" {', '.join(map(str, sorted(by_host)))}"
        )
    if any(device.platform == "tpu" for device in devices):
        raise ValueError(
            f"host_order={tuple(host_order)} is for hosts on a network, and devices of a TPU are"
            " placed by their coordinates: leave it out"
        )
    return np.asarray(
        [
            member
            for host in host_order
            for member in sorted(by_host[host], key=lambda member: member.id)
        ]
    )


def ring_order(devices: Sequence[Any]) -> list[Any]:
    """Return the devices, each one hop from the next, in a closed ring where that is possible.

    Args:
        devices: Devices with `coords`, such as those of a TPU, that fill a box of the grid.

    Raises:
        ValueError: They have no coordinates, or do not fill a box.
    """
    box = _box(devices)
    if box is None:
        raise ValueError(
            f"{len(devices)} devices from {devices[0]} to {devices[-1]} fill no box of a grid of"
            " coordinates in one slice: pass all devices of a TPU slice, or of a rectangular part"
        )
    at, shape = box
    return [at[place] for place in _walk(shape)]


def hops(devices: Sequence[Any]) -> list[int]:
    """Return the links from each device to the next and from the last to the first, in a grid.

    Args:
        devices: Devices with `coords`, in the order of a ring.
    """
    following = [*devices[1:], devices[0]]
    return [
        _distance(device, neighbour) for device, neighbour in zip(devices, following, strict=True)
    ]


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _check_slices(size: int, axis: str, by_slice: Mapping[int, int]) -> None:
    if len(set(by_slice.values())) > 1:
        counts = ", ".join(str(count) for count in by_slice.values())
        raise ValueError(
            f"the mesh's devices are in {len(by_slice)} slices, {counts} in each: pass the devices"
            " of whole slices, or as many of each"
        )
    if size % len(by_slice):
        raise ValueError(
            f"mesh.{axis}={size} must be a multiple of the {len(by_slice)} slices that hold the"
            f" {sum(by_slice.values())} devices, as only gradients may travel between slices:"
            f" set mesh.{axis} to {len(by_slice)}, and the other axes to the"
            f" {min(by_slice.values())} devices of one slice"
        )


def _along_links(array: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the array reordered along some axes, equally in all rings, if that is shorter."""
    last = range(array.ndim - len(axes), array.ndim)
    moved = np.moveaxis(array, axes, last)
    rings = moved.reshape(-1, math.prod(array.shape[axis] for axis in axes))
    first = rings[0].tolist()
    if len(first) < 3 or _box(first) is None:
        return array
    walked = rings[:, [first.index(device) for device in ring_order(first)]]
    if _all_hops(walked) >= _all_hops(rings):
        return array
    return np.moveaxis(walked.reshape(moved.shape), last, axes)


def _all_hops(rings: np.ndarray) -> int:
    return sum(sum(hops(ring)) for ring in rings.tolist())


def _coordinates(device: Any) -> Coordinates | None:
    """Return the coordinates of chip and core; None where the machine has no grid."""
    coords = getattr(device, "coords", None)
    return None if coords is None else (*coords, getattr(device, "core_on_chip", 0))


def _distance(device: Any, neighbour: Any) -> int:
    pairs = zip(_coordinates(device) or (), _coordinates(neighbour) or (), strict=True)
    return sum(abs(a - b) for a, b in pairs)


def _box(devices: Sequence[Any]) -> tuple[dict[Coordinates, Any], tuple[int, ...]] | None:
    """Return devices by offset from a corner of their box, and its shape; None without a box."""
    coordinates = [_coordinates(device) for device in devices]
    if None in coordinates or len({_slice(device) for device in devices}) > 1:
        return None
    grid = np.asarray(coordinates)
    corner = grid.min(0)
    shape = tuple(int(extent) for extent in grid.max(0) - corner + 1)
    places = map(tuple, (grid - corner).tolist())
    at = dict(zip(places, devices, strict=True))
    return (at, shape) if len(at) == len(devices) == math.prod(shape) else None


def _snake(shape: Sequence[int]) -> list[Coordinates]:
    """Return all places of a grid, each one hop from the next."""
    if not shape:
        return [()]
    inner = _snake(shape[1:])
    turns = (inner if i % 2 == 0 else inner[::-1] for i in range(shape[0]))
    return [(i, *place) for i, row in enumerate(turns) for place in row]


def _walk(shape: Sequence[int]) -> list[Coordinates]:
    """Return the snake, closed where that is possible."""
    wide = [d for d, size in enumerate(shape) if size > 1]
    if len(wide) < 2 or math.prod(shape) % 2:
        return _snake(shape)
    # One dimension of even size counts the rows; the others, laid in a line, are the columns.
    even = next(d for d in wide if shape[d] % 2 == 0)
    line = _snake([size for d, size in enumerate(shape) if d != even])
    home = [(row, 0) for row in range(shape[even] - 1, 0, -1)]
    outward = [
        (row, column)
        for row in range(shape[even])
        for column in (range(len(line) - 1, 0, -1) if row % 2 else range(bool(row), len(line)))
    ]
    return [(*line[c][:even], r, *line[c][even:]) for r, c in itertools.chain(outward, home)]
