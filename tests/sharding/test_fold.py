# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Folded meshes: two layouts of the same devices and their common refinement."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxmoe.execution import ExecutionConfig
from sharding import MeshConfig, MoEMesh, abstract_mesh
from sharding.axes import MESH_AXES, is_our_mesh, whole_axis
from sharding.fold import refine
from sharding.rules import DATA_PARALLEL, FULLY_SHARDED


def sizes(**given):
    return dict.fromkeys(MESH_AXES, 1) | given


def test_fold_over_all_devices_cuts_no_axis():
    """The example of Megatron: TP 4, CP 2, DP 8 and EP 64."""
    cut = refine(sizes(data=8, seq=2, tensor=4), MoEMesh(expert=64))
    assert cut.dense == (
        ("data", (("data", 8),)),
        ("seq", (("seq", 2),)),
        ("tensor", (("tensor", 4),)),
    )
    assert (cut.expert, cut.expert_tensor, cut.expert_data) == (("data", "seq", "tensor"), (), ())


def test_fold_cuts_an_axis_in_two():
    cut = refine(sizes(data=4, tensor=2), MoEMesh(expert=4))
    assert dict(cut.dense)["data"] == (("data_0", 2), ("data_1", 2))
    assert (cut.expert, cut.expert_data) == (("data_1", "tensor"), ("data_0",))
    mesh = abstract_mesh(MeshConfig(data=4, tensor=2), fold=MoEMesh(expert=4))
    assert mesh.axis_names == ("replica", "stage", "data_0", "data_1", "expert", "seq", "tensor")
    assert is_our_mesh(mesh.axis_names)


def test_folded_rules_name_the_pieces():
    cut = refine(sizes(data=4, tensor=2), MoEMesh(expert=2, expert_tensor=2))
    rules = FULLY_SHARDED.on_fold(cut)
    dense = ("data_0", "data_1", "expert", "seq")
    assert rules.resolve(("embed", "mlp")) == PartitionSpec(dense, "tensor")
    axes = ("experts", "expert_embed", "gate_up", "expert_mlp")
    assert rules.resolve(axes) == PartitionSpec("data_1", "data_0", None, "tensor")
    assert DATA_PARALLEL.on_fold(cut).mesh_axes("expert_embed") == ()


POWERS = st.sampled_from([1, 2, 4, 8])


def test_seq_inner_cuts_the_sequence_axis():
    """For attention with two axes along the sequence; experts need no cut."""
    cut = refine(sizes(data=2, seq=8, tensor=2), MoEMesh(seq_inner=4))
    assert cut.names("seq") == ("seq_0", "seq_1") and cut.expert == ()
    assert dict(cut.dense)["seq"] == (("seq_0", 2), ("seq_1", 4))
    with pytest.raises(ValueError, match="fold.seq_inner=3 must divide mesh.seq=8"):
        refine(sizes(seq=8), MoEMesh(seq_inner=3))


@given(data=POWERS, seq=POWERS, tensor=POWERS, expert=POWERS, expert_tensor=POWERS)
def test_both_layouts_of_a_fold_number_devices_equally(data, seq, tensor, expert, expert_tensor):
    """For any powers of two, the number of a device is the same in both."""
    devices = data * seq * tensor
    if devices % (expert * expert_tensor):
        return
    fold = MoEMesh(expert=expert, expert_tensor=expert_tensor)
    cut = refine(sizes(data=data, seq=seq, tensor=tensor), fold)
    parts = {name: size for _, pieces in cut.dense for name, size in pieces}
    assert list(dict.fromkeys(map(whole_axis, parts))) == ["data", "seq", "tensor"]
    number = np.arange(devices).reshape(list(parts.values()))
    digits = dict(zip(parts, np.indices(number.shape), strict=True))

    def read(names):
        value = np.zeros(number.shape, int)
        for name in names:
            value = value * parts[name] + digits[name]
        return value

    dense = (read(cut.names("data")) * seq + read(cut.names("seq"))) * tensor
    assert (dense + read(cut.names("tensor")) == number).all()
    moe = (read(cut.expert_data) * expert + read(cut.expert)) * expert_tensor
    assert (moe + read(cut.expert_tensor) == number).all()
    assert math.prod(parts[name] for name in cut.expert) == expert


REFUSED = {
    "fold.expert=0 must be at least 1": lambda: MoEMesh(expert=0),
    "fold.expert=3 x fold.expert_tensor=1 must divide the 8 devices of a replica (mesh data x seq x"
    " tensor): choose divisors of 8": lambda: refine(sizes(data=8), MoEMesh(expert=3)),
    "mesh.expert=2 and fold.expert=4 both spread experts: set mesh.expert to 1": lambda: refine(
        sizes(data=2, expert=2), MoEMesh(expert=4)
    ),
    "fold.expert=3, fold.expert_tensor=1 and mesh data=3, seq=1, tensor=2 have no common"
    " refinement: 3 devices do not divide into groups of 2; choose sizes of which each product"
    " divides the next, such as powers of two": lambda: refine(
        sizes(data=3, tensor=2), MoEMesh(expert=3)
    ),
    "a folded mesh needs the size of every axis, and one is -1: give it": lambda: (
        ExecutionConfig(fold=MoEMesh(expert=2)).axis_rules
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_in_words(text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        REFUSED[text]()
