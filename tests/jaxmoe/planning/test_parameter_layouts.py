# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters in a step: their collectives carry the bytes of the planner's formulas."""

import collections

import pytest

from jaxmoe.planning.parameter_layouts import parameter_layouts
from jaxmoe.planning.traffic import step_traffic
from sharding import MeshConfig
from sharding.expert_parallel import AllToAllConfig
from sharding.state_layouts import STATE_LAYOUTS
from tests.jaxmoe.planning.test_planning import plan_of

REASONS = {"all-gather": "weights", "reduce-scatter": "gradients"}
MESHES = {
    "data8": MeshConfig(data=8),
    "data2_expert2_tensor2": MeshConfig(data=2, expert=2, tensor=2),
}


def sent(plan):
    """Return the bytes that a device sends in a step, by collective."""
    found = collections.Counter()
    for one in parameter_layouts(plan.table, plan.execution, dict(plan.mesh.shape), 4):
        for change, times in one.sent:
            found[change.collective] += times * change.bytes
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rules", ["data_parallel", "zero2", "fully_sharded"])
def test_bytes_of_layouts_equal_planned_traffic(mesh, rules):
    plan = plan_of(mesh=MESHES[mesh], rules=rules, dispatcher=AllToAllConfig())
    wanted = collections.Counter()
    for one in step_traffic(plan):
        wanted[one.reason] += one.bytes
    found = sent(plan)
    assert found["all-to-all"] == 0
    for collective, reason in REASONS.items():
        assert found[collective] == pytest.approx(wanted[reason]), reason
    copies = wanted["gradients of copies"]
    if mesh == "data8":
        assert found["all-reduce"] == pytest.approx(copies)
    else:  # one all-reduce over several axes sends less than one after the other
        assert copies < found["all-reduce"] < 2 * copies


def test_zero1_sends_as_much_as_data_parallel():
    """A reduce-scatter and an all-gather in place of an all-reduce."""
    given = {"mesh": MESHES["data8"], "dispatcher": AllToAllConfig()}
    whole, cut = (sent(plan_of(rules=rules, **given)) for rules in ("data_parallel", "zero1"))
    assert sum(whole.values()) == pytest.approx(sum(cut.values()))
    assert cut["reduce-scatter"] == cut["all-gather"] > 0


@pytest.mark.parametrize("rules", STATE_LAYOUTS)
def test_every_parameter_returns_to_its_stored_layout(rules):
    plan = plan_of(mesh=MeshConfig(replica=2, data=4), rules=rules)
    for one in parameter_layouts(plan.table, plan.execution, dict(plan.mesh.shape), 4):
        assert not one.stored.partial and not one.updated.partial
        layout = STATE_LAYOUTS[rules]
        axes = next(row.declaration.axes for row in plan.table if row.path == one.path)
        for splits, table in ((one.stored, layout.parameters), (one.updated, layout.optimizer)):
            assert splits.splits == tuple(table.mesh_axes(name) for name in axes)


def test_stages_send_only_the_gradient_of_the_final_norm():
    plan = plan_of(mesh=MeshConfig(stage=2, data=4))
    found = {
        one.path: change.collective
        for one in parameter_layouts(plan.table, plan.execution, dict(plan.mesh.shape), 4)
        for change, _ in one.sent
        if change.axis == "stage"
    }
    assert found == {"final_norm/gain": "all-reduce"}
