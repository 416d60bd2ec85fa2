# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Updates of an optimiser state in host memory, part by part, against updates of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, MuonConfig, MuonHConfig
from jaxmoe.scaling import standard
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.accumulation import GradientSums
from jaxmoe.training.parts.update import Clipped, WholeUpdate, update_params
from jaxmoe.training.state import TrainState, put_away
from jaxmoe.training.step import Step, make_train_step
from tests.support.models import FULL, in_groups
from tests.support.tolerances import assert_close

MODEL = dataclasses.replace(FULL, num_layers=5, has_tied_embeddings=False)
WHOLE = ExecutionConfig(offload=OffloadConfig())
PARTS = ExecutionConfig(offload=OffloadConfig(parts=3))  # 4 layers divide by 4
OPTIMIZERS = {
    "adamw": (AdamWConfig(), "adamw", "adamw"),
    "muon": (MuonConfig(), "muon", "adamw"),
    "muonh": (MuonHConfig(), "muonh", "adamh"),
}


def optimizer_named(name):
    config, matrices, head = OPTIMIZERS[name]
    table = parameter_table(MODEL, in_groups(standard(MODEL), matrices, head))
    return config.build(table, LinearConfig().build(8))


def values_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def update(execution, optimizer, is_good=True):
    """Function from parameters, state and gradients to new parameters, updates and state."""

    step = Step(model=MODEL, optimizer=optimizer, execution=execution)

    def run(params, opt_state, grads):
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=opt_state,
            router_state={},
            rng=jax.random.key(0),
            skipped=jnp.int32(0),
            skipped_in_a_row=jnp.int32(0),
        )
        norm = optax.tree.norm(grads)
        summed = GradientSums(grads=None, loss=norm, losses={}, statistics=None)
        new = update_params(step, state, summed, Clipped(grads, norm, norm, jnp.ones(())))
        kept = new.opt_state.kept(is_good & new.opt_state.is_finite)
        return new.params, new.updates, kept

    return run


def two_updates(execution, optimizer, params=None, *, is_compiled=True):
    params = init_params(MODEL, jax.random.key(0)) if params is None else params
    state = jax.jit(lambda p: put_away(optimizer.init(p), WHOLE))(params)
    program = update(execution, optimizer)
    program = jax.jit(program) if is_compiled else program
    params, _, state = program(params, state, values_like(params, 1))
    return program(params, state, values_like(params, 2))


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in ("muon", "muonh")]


@pytest.mark.parametrize("name", ["adamw", *SLOW])
def test_an_update_in_parts_is_that_of_the_whole(name):
    optimizer = optimizer_named(name)
    whole, parts = (two_updates(one, optimizer) for one in (WHOLE, PARTS))
    assert_close(parts, whole, "matmul")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(parts[2]) if leaf.ndim} == {
        "pinned_host"
    }


@pytest.mark.slow
def test_an_update_in_parts_is_bitwise_that_of_the_whole():
    """Operation by operation: compiled loops contract a * b + c to one rounding or to two."""
    optimizer = optimizer_named("adamw")
    params = init_params(MODEL, jax.random.key(0))
    with jax.disable_jit():
        results = [two_updates(one, optimizer, params, is_compiled=False) for one in (WHOLE, PARTS)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_refused_update_in_parts_returns_the_old_state():
    """Also where only the last part, the norm after the layers, is not finite."""
    optimizer, params = optimizer_named("adamw"), init_params(MODEL, jax.random.key(0))
    state = jax.jit(lambda p: put_away(optimizer.init(p), WHOLE))(params)
    grads = values_like(params, 1)
    grads["moe_blocks_1"]["moe"]["router"]["weight"] *= jnp.asarray(1e30)  # its square is infinite
    kept = jax.jit(update(PARTS, optimizer))(params, state, grads)[2]
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_an_optimizer_that_may_mix_layers_is_refused():
    with pytest.raises(ValueError, match="does not promise to treat each layer by itself"):
        make_train_step(MODEL, optax.lamb(1e-3), execution=PARTS)


def test_fewer_than_one_part_is_refused():
    with pytest.raises(ValueError, match="offload.parts=0 must be at least 1"):
        OffloadConfig(parts=0)


def test_an_update_that_the_execution_does_not_ask_for_is_refused():
    with pytest.raises(ValueError, match="update=whole has the whole optimizer state on the dev"):
        make_train_step(MODEL, optimizer_named("adamw"), execution=PARTS, update=WholeUpdate())
