# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""An optimiser defined outside the library goes through table, build, memory and traffic."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import (
    AdamWConfig,
    GroupMembers,
    GroupTraits,
    LinearConfig,
    MuonConfig,
    Optimizer,
    RoleGroups,
)
from jaxmoe.optim.muon import NewtonSchulzConfig
from jaxmoe.optim.steps import straight_steps
from jaxmoe.parameters import FROZEN, Group, ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.scaling import standard
from jaxmoe.scaling.initialize import parameter_table
from sharding.mesh import MeshConfig
from tests.support.models import TINY, in_groups

SCHEDULE = LinearConfig(floor=1.0).build(10)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SignConfig(Optimizer):
    """Sign descent for matrices, which it sees whole, and gradient descent for all else."""

    name: ClassVar[str] = "sign"
    groups: ClassVar[Mapping[Group, GroupTraits]] = {
        "sign": GroupTraits(moments_per_parameter=3, has_whole_matrices=True, takes_vectors=False),
        "adamw": GroupTraits(moments_per_parameter=0),
    }
    role_groups: ClassVar[RoleGroups] = RoleGroups(matrices="sign")

    learning_rate: float = 0.5
    slow_ratio: float = 0.1

    def rate_ratio(self, group: Group) -> float:
        """Return the ratio of the slow group."""
        return 1.0 if group == "sign" else self.slow_ratio

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return steps of sign descent or gradient descent."""
        sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
        kind = sign if members.group == "sign" else optax.identity()
        return straight_steps(kind, members.rate, multiplier=members.multipliers())


def _table(group, **rules):
    """The standard parameterisation with hidden matrices in a group."""
    return parameter_table(TINY, in_groups(standard(TINY), group, "adamw"), **rules)


def _plan(config, group):
    execution = ExecutionConfig(mesh=MeshConfig(data=8))
    table = _table(group, rules=execution.axis_rules)
    return StepPlan(
        model=TINY,
        table=table,
        optimizer=config.build(table, SCHEDULE),
        optimizer_config=config,
        execution=execution,
        batch_size=8,
        sequence_length=8,
    )


def test_a_new_optimizer_builds_from_the_table_and_its_config():
    config = SignConfig()
    table = _table("sign")
    rows = {row.path: row for row in table}
    assert {row.hyper.group for row in table} == {"sign", "adamw"}
    matrix, gain = rows["moe_blocks_0/attention/q"], rows["final_norm/gain"]
    assert config.peak_rate(matrix) == 0.5 and config.peak_rate(gain) == pytest.approx(0.05)
    params = table.tree(lambda row: jnp.ones(row.shape, jnp.float32))
    optimizer = config.build(table, SCHEDULE)
    grads = jax.tree.map(lambda p: 2 * p, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert jnp.allclose(updates["moe_blocks_0"]["attention"]["q"], -0.5)
    assert jnp.allclose(updates["final_norm"]["gain"], -0.05 * 2)


def test_its_traits_decide_memory_traffic_and_dtype():
    ours, muon = _plan(SignConfig(), "sign"), _plan(MuonConfig(), "muon")
    plain = _plan(AdamWConfig(), "adamw")
    update = [estimate_memory(plan, "cpu").update for plan in (ours, muon, plain)]
    assert update[0] == update[1] > update[2]
    sent = [{one.reason for one in step_traffic(plan)} for plan in (ours, muon, plain)]
    assert sent[0] == sent[1] and sent[0] - sent[2] == {"whole matrices"}
    assert SignConfig.traits("sign").moments_per_parameter == 3
    assert SignConfig.traits(FROZEN).moments_per_parameter == 0
    assert SignConfig().resolve_dtype("bfloat16") == SignConfig()
    assert MuonConfig().resolve_dtype("bfloat16").iteration.dtype == "bfloat16"
    single = MuonConfig(newton_schulz=NewtonSchulzConfig(dtype="float32"))
    assert single.resolve_dtype("bfloat16") == single


def test_refusals_name_the_optimizer_that_has_the_group():
    with pytest.raises(ValueError, match=r"'muon' has no group sign.* choose optimizer:sign"):
        MuonConfig().build(_table("sign"), SCHEDULE)
    rows = (
        dataclasses.replace(row, hyper=dataclasses.replace(row.hyper, group="sign"))
        for row in _table("sign")
    )
    with pytest.raises(ValueError, match="is a vector, and the group sign is for matrices"):
        SignConfig().build(ParameterTable(tuple(rows)), SCHEDULE)
