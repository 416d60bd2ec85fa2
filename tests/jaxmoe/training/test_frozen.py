# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters have no gradient, optimiser state or update; the others train as before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, MuonConfig, train_only
from jaxmoe.parameters import FROZEN
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.scaling import StandardConfig, standard
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step, make_train_step
from sharding import MeshConfig, make_mesh
from sharding.distributed import global_batch
from tests.support.models import TINY
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

FROZEN_ROLES = ("router", "embedding", "attention_out", "norm")
SCHEDULE = LinearConfig().build(10)
BY_NAME = {"adamw": AdamWConfig(weight_decay=0.5), "muon": MuonConfig(weight_decay=0.5)}


def _rules(matrices="adamw", frozen=FROZEN_ROLES):
    rules = standard(TINY, options=StandardConfig(matrices=matrices))
    roles = tuple(
        (role, dataclasses.replace(hyper, group=FROZEN) if role in frozen else hyper)
        for role, hyper in rules.roles
    )
    return dataclasses.replace(rules, roles=roles)


def _named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("adamw", None),
        pytest.param("muon", MeshConfig(data=4, tensor=2), marks=pytest.mark.slow),
        pytest.param("adamw", MeshConfig(stage=2, data=4), marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_stay_bitwise_and_have_no_state(name, mesh):
    rules = _rules(name)
    table = parameter_table(TINY, rules)
    frozen = {row.path for row in table if row.is_frozen}
    optimizer = BY_NAME[name].build(table, SCHEDULE)
    execution = ExecutionConfig() if mesh is None else ExecutionConfig(mesh=mesh)
    made = None if mesh is None else make_mesh(mesh)
    state = init_state(
        TINY, optimizer, jax.random.key(0), execution=execution, parameterization=rules, mesh=made
    )
    before = {path: np.asarray(leaf) for path, leaf in _named(state.params).items()}
    step = make_train_step(TINY, optimizer, execution=execution, table=table)
    layouts = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    for _ in range(2):
        if made is None:
            state, metrics = step(state, batch())
        else:
            with jax.set_mesh(made):
                state, metrics = step(state, global_batch(batch(), made))
    assert not metrics.is_skipped
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == layouts
    for path, leaf in _named(state.params).items():
        is_same = np.array_equal(before[path], np.asarray(leaf))
        assert is_same == (path in frozen), path
    for path in _named(state.opt_state):
        assert not any(path.endswith(f"/{name}") for name in frozen), path
    trained = sum(row.size for row in table.trained_rows)
    moments = {"adamw": 2, "muon": 1, FROZEN: 0}
    wanted = sum(row.size * moments[row.hyper.group] for row in table)
    assert 0 < trained < table.total
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim) == wanted


def test_gradients_of_trained_parameters_are_those_of_the_full_step():
    table = parameter_table(TINY, _rules())
    state = init_state(TINY, optax.sgd(1.0), jax.random.key(0))
    step = Step(model=TINY, optimizer=optax.sgd(1.0), accumulation=2)

    @jax.jit
    def both(state, batch):
        full, part = (
            batch_gradients(dataclasses.replace(step, table=t), state, batch)[1]
            for t in (None, table)
        )
        return full.loss, part.loss, full.grads, part.grads

    full_loss, part_loss, full, part = both(state, batch())
    assert full_loss == part_loss
    full, part = _named(full), _named(part)
    assert set(part) == {row.path for row in table.trained_rows} < set(full)
    for path in part:
        assert_close(part[path], full[path], kind="matmul")
        assert jnp.any(part[path] != 0.0), path


def test_the_step_is_the_same_program_where_nothing_is_frozen():
    table = parameter_table(TINY)
    optimizer = BY_NAME["adamw"].build(table, SCHEDULE)
    state = jax.eval_shape(lambda: init_state(TINY, optimizer, jax.random.key(0)))
    texts = [
        make_train_step(TINY, optimizer, table=given).lower(state, batch()).as_text()
        for given in (None, table)
    ]
    assert texts[0] == texts[1]


def test_train_only_gives_frozen_parameters_zero_updates():
    table = parameter_table(TINY, _rules(frozen=("embedding",)))
    optimizer = train_only(table, optax.adamw(0.1))
    params = table.tree(lambda row: jnp.ones(row.shape, jnp.float32))
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(params, optimizer.init(params), params)
    assert not jnp.any(updates["embedding"]["weight"])
    assert jnp.all(updates["head"]["weight"] != 0.0)
    assert len(jax.tree.leaves(state[0].mu)) == len(table) - 1
    assert train_only(parameter_table(TINY), optimizer) is optimizer


def test_a_plan_counts_no_gradients_of_frozen_parameters():
    def plan(rules):
        execution = ExecutionConfig(mesh=MeshConfig(data=8))
        table = parameter_table(TINY, rules, rules=execution.axis_rules)
        config = AdamWConfig()
        return StepPlan(
            model=TINY,
            table=table,
            optimizer=config.build(table, SCHEDULE),
            optimizer_config=config,
            execution=execution,
            batch_size=8,
            sequence_length=8,
        )

    full, part = (estimate_memory(plan(rules), "cpu") for rules in (None, _rules()))
    assert part.parameters == full.parameters
    assert part.gradients < full.gradients and part.optimizer < full.optimizer
