# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Meshes: sizes, -1, Explicit axes, abstract meshes, error messages."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding import MeshConfig, abstract_mesh, make_mesh
from sharding.axes import MESH_AXES

REFUSED_SIZES = {
    "mesh.data=0 must be at least 1, or -1 for the remaining devices": {"data": 0},
    "mesh.tensor=-2 must be at least 1, or -1 for the remaining devices": {"tensor": -2},
    "only one mesh axis may be -1 (the remaining devices)": {"data": -1, "tensor": -1},
}

REFUSED_ON_EIGHT = {
    "mesh (data=3) needs 3 devices, there are 8: choose sizes whose product is 8, or set one axis"
    " to -1": {"data": 3},
    "mesh (data=4 x tensor=4) needs 16 devices, there are 8: choose sizes whose product is 8, or"
    " set one axis to -1": {"data": 4, "tensor": 4},
    "mesh (one device) needs 1 device, there are 8: choose sizes whose product is 8, or set one"
    " axis to -1": {},
    "mesh (data=-1 x tensor=3) needs a multiple of 3 devices, there are 8: choose sizes that divide"
    " 8": {"data": -1, "tensor": 3},
}


@pytest.mark.parametrize(("text", "sizes"), REFUSED_SIZES.items())
def test_bad_mesh_sizes_raise(text, sizes):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MeshConfig(**sizes)


@pytest.mark.parametrize(("text", "sizes"), REFUSED_ON_EIGHT.items())
def test_mesh_sizes_that_do_not_fit_the_devices_raise(text, sizes):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make_mesh(MeshConfig(**sizes))


def test_minus_one_is_the_remaining_devices():
    assert MeshConfig(data=-1).resolve(8) == MeshConfig(data=8)
    assert MeshConfig(data=-1, tensor=2).resolve(8) == MeshConfig(data=4, tensor=2)
    assert MeshConfig(expert=-1, data=8).resolve(8) == MeshConfig(data=8)
    assert MeshConfig(data=-1).resolve(1) == MeshConfig()


def test_batch_shards_are_the_devices_that_hold_different_sequences():
    assert MeshConfig(replica=2, data=3, expert=5, tensor=7).batch_shards == 30


def test_mesh_has_six_explicit_axes():
    mesh = make_mesh(MeshConfig(data=-1, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == dict(replica=1, stage=1, data=4, expert=1, seq=1, tensor=2)
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_a_mesh_of_some_devices():
    devices = jax.devices()[2:4]
    mesh = make_mesh(MeshConfig(data=2), devices)
    assert mesh.devices.ravel().tolist() == devices


def test_abstract_mesh_without_devices_has_shapes():
    mesh = abstract_mesh(MeshConfig(data=256, tensor=16))
    assert mesh.axis_names == MESH_AXES and mesh.size == 4096
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct(
            (512, 32),
            jnp.float32,
            sharding=jax.sharding.NamedSharding(mesh, PartitionSpec("data", "tensor")),
        )
        result = jax.eval_shape(lambda x: x * 2.0, x)
    assert result.sharding.spec == PartitionSpec("data", "tensor")


def test_abstract_mesh_with_open_size_raises():
    text = "an abstract mesh has no devices to count: give every axis its size"
    with pytest.raises(ValueError, match=f"^{text}$"):
        abstract_mesh(MeshConfig(data=-1))
