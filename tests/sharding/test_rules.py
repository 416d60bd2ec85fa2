# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules from logical axes to specs, and their errors."""

import re
import typing

import pytest
from jax.sharding import PartitionSpec

from sharding.axes import BATCH_AXES, LOGICAL_AXES
from sharding.rules import DATA_PARALLEL, FULLY_SHARDED, LogicalAxisRules
from sharding.state_layouts import STATE_LAYOUTS, StateLayoutName
from tests.support.meshes import LAYOUTS, MESHES


def refusal(text):
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize("name", STATE_LAYOUTS)
def test_every_layout_has_one_rule_for_each_logical_axis(name):
    layout = STATE_LAYOUTS[name]
    for rules in (layout.parameters, layout.optimizer):
        assert sorted(axis for axis, _ in rules.rules) == sorted(LOGICAL_AXES)
    assert isinstance(hash(layout), int)


def test_pairs_of_meshes_and_layouts_cover_both():
    assert {mesh for mesh, _ in LAYOUTS} == set(MESHES)
    assert {layout for _, layout in LAYOUTS} == set(STATE_LAYOUTS)
    assert set(STATE_LAYOUTS) == set(typing.get_args(StateLayoutName))


def test_resolve_gives_partition_specs():
    assert DATA_PARALLEL.resolve(("embed", "mlp")) == PartitionSpec(None, "tensor")
    assert FULLY_SHARDED.resolve(("embed", "mlp")) == PartitionSpec(
        ("data", "expert", "seq"), "tensor"
    )
    assert FULLY_SHARDED.resolve(
        ("experts", "expert_embed", "gate_up", "expert_mlp")
    ) == PartitionSpec("expert", ("data", "seq"), None, "tensor")
    assert DATA_PARALLEL.resolve(("act_batch", None)) == PartitionSpec(BATCH_AXES, None)
    assert DATA_PARALLEL.resolve(()) == PartitionSpec()


def test_unknown_logical_axis_gets_a_suggestion():
    with refusal("'embedd' is no logical axis: did you mean 'embed'?"):
        DATA_PARALLEL.resolve(("embedd",))
    with refusal("'zzz' is no logical axis"):
        DATA_PARALLEL.resolve(("zzz",))
    with refusal("'hedas' is no logical axis: did you mean 'heads'?"):
        DATA_PARALLEL.replace(hedas=())


def test_one_mesh_axis_for_two_dimensions_raises():
    text = (
        "logical axes 'heads' and 'mlp' of one array both use the mesh axis 'tensor':"
        " give one of them another rule"
    )
    with refusal(text):
        DATA_PARALLEL.resolve(("heads", "mlp"))


def test_indivisible_dimension_raises():
    shape = {"replica": 1, "stage": 1, "data": 4, "expert": 1, "seq": 1, "tensor": 2}
    FULLY_SHARDED.check_divides("x", (8, 6), ("embed", "mlp"), shape)
    text = (
        "blocks/down: the dimension 'mlp' of size 7 must be divisible by mesh.tensor=2: choose a"
        " multiple of 2, another mesh, or rules that do not spread 'mlp'"
    )
    with refusal(text):
        FULLY_SHARDED.check_divides("blocks/down", (7, 8), ("mlp", "embed"), shape)
    text = (
        "tokens: the dimension 'act_batch' of size 6 must be divisible by mesh.data=4:"
        " choose a multiple of 4, another mesh, or rules that do not spread 'act_batch'"
    )
    with refusal(text):
        FULLY_SHARDED.check_divides("tokens", (6, 5), ("act_batch", None), shape)


def test_incomplete_and_impossible_rules_raise():
    rules = DATA_PARALLEL.rules
    with refusal("rules lack the logical axes layers"):
        LogicalAxisRules(rules=rules[1:])
    with refusal(
        "rule embed=('dat',): 'dat' is no mesh axis (there are replica, stage, data, expert, seq,"
        " tensor)"
    ):
        DATA_PARALLEL.replace(embed=("dat",))


def test_replace_changes_one_rule():
    changed = dict(DATA_PARALLEL.replace(embed=("data",)).rules)
    assert changed.pop("embed") == ("data",)
    assert changed.items() <= dict(DATA_PARALLEL.rules).items()
