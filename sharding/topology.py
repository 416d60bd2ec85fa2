# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which device stands where in a mesh: rings along links, slices outermost.

A ring passes keys and values from each device to the next, so that neighbours on the axis should be
neighbours in the machine. `jax.make_mesh` does not see to it: on v5e:2x4 its only axis of 8 hops
1, 2, 1, 2 and so on. `ring_order` walks a grid of coordinates instead (a Hamiltonian walk). All but
one dimension are laid in one row by a snake; then on R rows of C devices, R even,

    go along the first row, come back through the second without its first device, and so on; home
    through the first devices of all rows.

Every hop is 1, the closing one too. A grid of an odd number of devices has no closed walk, since
every hop changes the colour of a chessboard; a line has none either. Both get an open walk, whose
closing hop alone is long: up to the sum of the sizes less the dimensions, unless links around the
machine shorten it. Such links (a whole v5e or v6e pod, v4 and v5p in cubes of 4) are not counted:
hops here are those of a grid, and at most what they say.

Slices of a TPU are joined by the data-centre network, over which only the axis of replicas may go
(`jax.experimental.mesh_utils.create_hybrid_device_mesh`). On GPUs, where JAX calls a host a slice,
devices stay in their order: the last axes lie within hosts.

To add an axis along which a ring runs: name it in `ring_axes` of `device_array`'s caller.
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
    """Devices in the shape of a mesh, as `jax.sharding.Mesh` takes them.

    Args:
        sizes: of the axes by name, in the order of the mesh; they multiply to the devices.
        devices: `jax.Device`, all of the mesh.
        slice_axis: the only axis that may lead from one slice to another.
        ring_axes: along these together, the last the fastest, a ring runs.

    Raises:
        ValueError: slices of different sizes, or that do not divide the slice axis.
    """
    names, shape = tuple(sizes), tuple(sizes.values())
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


def ring_order(devices: Sequence[Any]) -> list[Any]:
    """The devices, each one hop from the next; the last from the first where that is possible.

    Args:
        devices: with `coords`, such as those of a TPU; they fill a box of the grid.

    Raises:
        ValueError: they have no coordinates, or fill no box.
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
    """Links from each device to the next and from the last to the first, in a grid.

    Args:
        devices: with `coords`, in the order of a ring.
    """
    following = [*devices[1:], devices[0]]
    return [_distance(one, other) for one, other in zip(devices, following, strict=True)]


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _check_slices(size: int, axis: str, by_slice: Mapping[int, int]) -> None:
    if len(set(by_slice.values())) > 1:
        counts = ", ".join(str(count) for count in by_slice.values())
        raise ValueError(
            f"the mesh's devices lie in {len(by_slice)} slices, {counts} in each: pass the devices"
            " of whole slices, or as many of each"
        )
    if size % len(by_slice):
        raise ValueError(
            f"mesh.{axis}={size} must be a multiple of the {len(by_slice)} slices in which the"
            f" {sum(by_slice.values())} devices lie, as only gradients may travel between slices:"
            f" set mesh.{axis} to {len(by_slice)}, and the other axes to the"
            f" {min(by_slice.values())} devices of one slice"
        )


def _along_links(array: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The array with its places along some axes exchanged, all rings alike, if that is shorter."""
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
    """In the grid of chips, and which core of the chip; None where the machine has no grid."""
    coords = getattr(device, "coords", None)
    return None if coords is None else (*coords, getattr(device, "core_on_chip", 0))


def _distance(one: Any, other: Any) -> int:
    pairs = zip(_coordinates(one) or (), _coordinates(other) or (), strict=True)
    return sum(abs(a - b) for a, b in pairs)


def _box(devices: Sequence[Any]) -> tuple[dict[Coordinates, Any], tuple[int, ...]] | None:
    """Devices by their place from a corner of the box, and its shape; None if they fill none."""
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
    """All places of a grid, each one hop from the next."""
    if not shape:
        return [()]
    rest = _snake(shape[1:])
    turns = (rest if i % 2 == 0 else rest[::-1] for i in range(shape[0]))
    return [(i, *place) for i, row in enumerate(turns) for place in row]


def _walk(shape: Sequence[int]) -> list[Coordinates]:
    """The snake, closed where that is possible."""
    wide = [d for d, size in enumerate(shape) if size > 1]
    if len(wide) < 2 or math.prod(shape) % 2:
        return _snake(shape)
    # One dimension of even size counts the rows; the others, laid in a line, are the columns.
    even = next(d for d in wide if shape[d] % 2 == 0)
    line = _snake([size for d, size in enumerate(shape) if d != even])
    home = [(row, 0) for row in range(shape[even] - 1, 0, -1)]
    there = [
        (row, column)
        for row in range(shape[even])
        for column in (range(len(line) - 1, 0, -1) if row % 2 else range(bool(row), len(line)))
    ]
    return [(*line[c][:even], r, *line[c][even:]) for r, c in itertools.chain(there, home)]
