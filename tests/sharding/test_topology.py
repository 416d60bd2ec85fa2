# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rings along links and slices on the replica axis, on synthetic grids and described TPUs."""

import dataclasses
import inspect
import itertools
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import MeshConfig, make_mesh
from sharding.axes import MESH_AXES, SEQ
from sharding.topology import device_array, hops, ring_order
from tests.support.tpus import described_tpus

RING = MESH_AXES.index(SEQ)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Fields of a TPU device that topology.py and JAX read."""

    id: int
    coords: tuple[int, ...]
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v9 of no known kind"
    process_index: int = 0


def grid(*shape: int, slice_index: int = 0, corner: int = 0) -> list[Chip]:
    """Chips of a box, the first coordinate the fastest, as JAX lists them."""
    places = [place[::-1] for place in itertools.product(*(range(size) for size in shape[::-1]))]
    return [
        Chip(1000 * slice_index + i, tuple(c + corner for c in place), slice_index)
        for i, place in enumerate(places)
    ]


def placed(devices: list[Chip], **sizes: int) -> np.ndarray:
    every = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    return device_array(every, devices, slice_axis="replica", ring_axes=("seq",))


def rings(array: np.ndarray) -> list[list[Chip]]:
    return np.moveaxis(array, RING, -1).reshape(-1, array.shape[RING]).tolist()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(-2, 3))
def test_every_hop_of_the_ring_walk_is_one_link(shape, corner):
    chips = grid(*shape, corner=corner)
    order = ring_order(chips[::-1])
    assert sorted(order, key=lambda chip: chip.id) == chips
    *inner, closing = hops(order)
    assert set(inner) <= {1}
    wide = sum(size > 1 for size in shape)
    if wide > 1 and math.prod(shape) % 2 == 0:
        assert closing == 1
    else:  # no closed walk exists: the closing hop alone is long
        assert closing <= sum(shape) - len(shape)


def _has_closed_walk(chips: list[Chip]) -> bool:
    """Try all walks."""

    def search(path: list[Chip]) -> bool:
        if len(path) == len(chips):
            return hops(path)[-1] == 1
        near = [chip for chip in chips if chip not in path and hops([path[-1], chip])[0] == 1]
        return any(search([*path, chip]) for chip in near)

    return search(chips[:1])


@pytest.mark.parametrize("shape", [(4,), (2, 2), (3, 3), (2, 3), (3, 1), (2, 2, 2), (3, 4)])
def test_ring_walk_is_closed_where_possible(shape):
    chips = grid(*shape)
    assert (set(hops(ring_order(chips))) == {1}) == _has_closed_walk(chips)


def test_cores_of_a_chip_are_neighbours():
    chips = grid(2, 2)
    cores = [dataclasses.replace(c, id=2 * c.id + k, core_on_chip=k) for c in chips for k in (0, 1)]
    assert set(hops(ring_order(cores))) == {1}


@pytest.mark.parametrize(
    "chips",
    [grid(2, 3)[:-1], grid(2, 2) + grid(2, 2, slice_index=1), grid(2, 2) * 2, jax.devices()],
    ids=["hole", "two slices", "twice", "no coordinates"],
)
def test_devices_that_fill_no_box_raise(chips):
    with pytest.raises(ValueError, match=f"^{len(chips)} devices from .* fill no box of a grid"):
        ring_order(chips)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 4), {"seq": 8}),
        ((4, 4), {"seq": 16}),
        ((4, 4), {"data": 2, "seq": 8}),
        ((2, 2, 2), {"seq": 8}),
        ((2, 2, 4), {"seq": 4, "tensor": 4}),
        ((4, 4, 4), {"data": 8, "seq": 8}),
        ((16, 16), {"replica": 2, "data": 4, "seq": 32}),
    ],
)
def test_rings_of_the_mesh_have_single_hops(shape, sizes):
    array = placed(grid(*(*shape, 1)[:3])[::-1], **sizes)
    assert len(set(array.flat)) == math.prod(shape)
    for ring in rings(array):
        assert set(hops(ring)[:-1]) == {1}


def test_ring_order_changes_only_ring_axes():
    chips = grid(4, 4, 1)
    sizes = {"data": 2, "seq": 4, "tensor": 2}
    ordered = placed(chips, **sizes)
    plain = device_array(
        {axis: sizes.get(axis, 1) for axis in MESH_AXES},
        chips,
        slice_axis="replica",
        ring_axes=(),
    )

    def groups(array: np.ndarray, axis: str) -> set:
        moved = np.moveaxis(array, MESH_AXES.index(axis), -1).reshape(-1, sizes[axis])
        return {frozenset(chip.id for chip in group) for group in moved}

    assert all(groups(ordered, axis) == groups(plain, axis) for axis in ("seq", "tensor"))
    pairs = zip(rings(ordered), rings(plain), strict=True)
    assert all(sum(hops(ring)) <= sum(hops(before)) for ring, before in pairs)


def test_ring_along_pieces_of_an_axis():
    sizes = {"data": 1, "seq_0": 2, "seq_1": 4}
    array = device_array(sizes, grid(2, 4, 1), slice_axis="data", ring_axes=("seq_0", "seq_1"))
    assert array.shape == (1, 2, 4)
    assert set(hops(array.flatten().tolist())) == {1}


def test_replica_axis_follows_slices():
    chips = grid(2, 4, 1) + grid(2, 4, 1, slice_index=1)
    for sizes, expected in (
        ({"replica": 2, "seq": 8}, [{0}, {1}]),
        ({"replica": 4, "seq": 2, "tensor": 2}, [{0}, {0}, {1}, {1}]),
    ):
        array = placed(chips, **sizes)
        assert [{chip.slice_index for chip in replica.flat} for replica in array] == expected
        for ring in rings(array):
            assert set(hops(ring)) == {1}


def test_slices_that_do_not_fit_raise():
    chips = grid(2, 4, 1) + grid(2, 4, 1, slice_index=1)
    text = (
        "mesh.replica=1 must be a multiple of the 2 slices that hold the 16 devices, as only"
        " gradients may travel between slices: set mesh.replica to 2, and the other axes to the"
        " 8 devices of one slice"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        placed(chips, data=16)
    text = "the mesh's devices are in 2 slices, 8, 4 in each: pass the devices of whole slices"
    with pytest.raises(ValueError, match=re.escape(text)):
        placed(chips[:12], replica=2, data=6)


def test_gpu_hosts_are_not_slices():
    """JAX numbers hosts as slices; axes may cross them, the last ones stay within."""
    gpus = [
        dataclasses.replace(chip, platform="gpu", coords=None, device_kind="NVIDIA H100")
        for chip in grid(4) + grid(4, slice_index=1)
    ]
    array = placed(gpus, data=2, seq=4)
    assert list(array.flat) == gpus


def test_meshes_of_devices_without_coordinates_keep_their_order():
    mesh = make_mesh(MeshConfig(data=2, seq=4))
    assert list(mesh.devices.flat) == jax.devices()


TPUS = {
    "v5e:2x4": {"seq": 8},
    "v5e:4x4": {"seq": 16},
    "v6e:2x4": {"seq": 8},
    "v5p:2x2x2": {"seq": 8},
    "v5e:4x8": {"data": 2, "seq": 16},
    "v5p:4x4x4": {"data": 8, "seq": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TPUS)
def test_rings_of_described_tpus(name, monkeypatch):
    devices = described_tpus(monkeypatch, name)
    for ring in rings(make_mesh(MeshConfig(**TPUS[name]), devices).devices):
        assert set(hops(ring)) == {1}


@pytest.mark.slow
def test_replicas_over_two_described_slices(monkeypatch):
    devices = described_tpus(monkeypatch, "v5e:2x4", num_slices=2)
    mesh = make_mesh(MeshConfig(replica=2, seq=8), devices)
    assert [{d.slice_index for d in replica.flat} for replica in mesh.devices] == [{0}, {1}]
    for ring in rings(mesh.devices):
        assert set(hops(ring)) == {1}
    with pytest.raises(ValueError, match="mesh.replica=1 must be a multiple of the 2 slices"):
        make_mesh(MeshConfig(data=16), devices)


def hosts(*processes: int, platform: str = "gpu") -> list[Chip]:
    return [
        Chip(number, (), platform=platform, process_index=process)
        for number, process in enumerate(processes)
    ]


def test_devices_fill_the_mesh_in_the_order_of_their_hosts():
    devices = hosts(0, 0, 1, 1, 2, 2)
    make = inspect.unwrap(make_mesh)  # played devices will do
    mesh = make(MeshConfig(data=3, tensor=2), devices, host_order=(2, 0, 1))
    found = mesh.devices.reshape(3, 2)
    assert [[device.id for device in row] for row in found] == [[4, 5], [0, 1], [2, 3]]
    plain = make(MeshConfig(data=3, tensor=2), devices).devices.ravel()
    assert [device.id for device in plain] == list(range(6))


def test_orders_that_do_not_fit_the_hosts_are_refused():
    message = re.escape("host_order=(0, 2) must name every process of the mesh once: 0, 1")
    with pytest.raises(ValueError, match=f"^{message}$"):
        inspect.unwrap(make_mesh)(MeshConfig(data=2), hosts(0, 1), host_order=(0, 2))
    with pytest.raises(ValueError, match="are placed by their coordinates: leave it out"):
        make = inspect.unwrap(make_mesh)
        make(MeshConfig(data=2), hosts(0, 1, platform="tpu"), host_order=(1, 0))
