# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of adapters in the compiled step: losses, states, refused steps, micro-batches, meshes."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxmoe.adapters import AdaLoraConfig, LoraConfig, SwitchLoraConfig, TargetsConfig
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.optim import adamw
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import TINY
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

TARGETS = TargetsConfig(roles=("attention_in", "attention_out", "expert_in"))
FOLLOWING = {
    "adalora": AdaLoraConfig(
        rank=4, expert_rank=2, target_rank=2, initial=0, final=4, interval=2, targets=TARGETS
    ),
    "switch_lora": SwitchLoraConfig(
        rank=4, expert_rank=2, candidates=6, rate=0.3, pause=1, targets=TARGETS
    ),
}
OPTIMIZER = adamw(1e-2)


def trained(adapter, *, steps=3, execution=None, accumulation=1, bad=()):
    """State and metrics after some steps; loss weights of those in `bad` are NaN."""
    model = dataclasses.replace(TINY, adapter=adapter)
    execution = execution or ExecutionConfig()
    mesh = mesh_of(execution) if math.prod(execution.mesh.sizes) > 1 else None
    state = init_state(model, OPTIMIZER, jax.random.key(0), execution=execution, mesh=mesh)
    step = make_train_step(
        model,
        OPTIMIZER,
        execution=execution,
        accumulation=accumulation,
        accumulated_balance="two_pass",
    )
    states, metrics = [], None
    for number in range(steps):
        rows = batch(math.nan if number in bad else 1.0)
        if mesh is None:
            state, metrics = step(state, rows)
        else:
            with jax.set_mesh(mesh):
                state, metrics = step(state, global_batch(rows, mesh))
        seen = (state.params, state.opt_state, state.parts.get("adapter"))
        states.append(jax.tree.map(np.asarray, seen))
    assert metrics is not None
    return states, metrics


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_refused_step_changes_nothing_of_the_adapter(name):
    states, metrics = trained(FOLLOWING[name], bad=(2,))
    assert bool(metrics.is_skipped)
    jax.tree.map(np.testing.assert_array_equal, states[1], states[2])
    before, after = (jax.tree.leaves(states[i][2]) for i in (0, 1))
    assert any(np.any(x != y) for x, y in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", FOLLOWING)
def test_micro_batches_add_up_to_the_whole_batch(name):
    whole, metrics = trained(FOLLOWING[name])
    parts, others = trained(FOLLOWING[name], accumulation=2)
    assert_close(parts[-1][2], whole[-1][2], "end_to_end")
    assert_close(others.losses, metrics.losses, "end_to_end")


def test_losses_of_an_adapter_are_reported_and_trained():
    config = FOLLOWING["adalora"]
    weightless = dataclasses.replace(config, orthogonality=0.0)
    (with_loss,), metrics = trained(config, steps=1)
    (without,), others = trained(weightless, steps=1)
    assert float(metrics.losses["orthogonality"]) > 0 and "orthogonality" not in others.losses
    # At e = 0 the cross-entropy has no slope in A and B.
    moved, same = (one[1] for one in (with_loss, without))
    assert sum(float(np.abs(x).sum()) for x in jax.tree.leaves(moved)) > sum(
        float(np.abs(x).sum()) for x in jax.tree.leaves(same)
    )


EXECUTIONS = {
    "data2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2)),
    "data4": ExecutionConfig(mesh=MeshConfig(data=4)),
    "stage2": ExecutionConfig(mesh=MeshConfig(stage=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("mesh", EXECUTIONS)
def test_steps_on_a_mesh_equal_those_of_one_device(mesh, name):
    parts = 2 if mesh == "stage2" else 1
    wanted, metrics = trained(FOLLOWING[name], accumulation=parts)
    found, others = trained(FOLLOWING[name], accumulation=parts, execution=EXECUTIONS[mesh])
    assert_close(found[-1], wanted[-1], "end_to_end")
    assert_close(others.losses, metrics.losses, "end_to_end")


@pytest.mark.parametrize(
    ("execution", "message"),
    [({"offload": OffloadConfig()}, "model.adapter:adalora changes the state after each step")],
)
def test_states_in_other_memory_are_refused(execution, message):
    model = dataclasses.replace(TINY, adapter=FOLLOWING["adalora"])
    with pytest.raises(ValueError, match=message):
        make_train_step(model, OPTIMIZER, execution=ExecutionConfig(**execution))
    make_train_step(
        dataclasses.replace(TINY, adapter=LoraConfig()),
        OPTIMIZER,
        execution=ExecutionConfig(**execution),
    )
