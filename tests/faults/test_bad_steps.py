# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A bad step (NaN, infinity, overflow, a spike, a NaN loss) changes nothing."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.models.transformer import initial_router_state
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import guard
from jaxmoe.training import step as step_module
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from tests.support.faults import FAULTS, fault_key, faulty_step
from tests.support.models import TINY
from tests.support.one_step import batch, params_of

BATCH = batch()
OPTIMIZER = AdamWConfig(learning_rate=0.01).build(
    parameter_table(TINY), LinearConfig(warmup_steps=5).build(1000)
)
RATIO = 30.0  # the default of a run
LATER = guard.WINDOW + 4


def _state(fault: str = "none", at: int = 0) -> TrainState:
    params = jax.tree.map(jnp.array, params_of(TINY))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=OPTIMIZER.init(params),
        router_state=initial_router_state(TINY),
        rng=fault_key(fault, at),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        recent_norms=guard.no_norms(),
    )


def _faulty(clip):
    step = make_train_step(TINY, OPTIMIZER, clip=clip, max_norm_ratio=RATIO)
    return faulty_step(step, _state(), BATCH)


@pytest.fixture(scope="module")
def steps():
    """The faulty step by its clip."""
    return {clip: _faulty(clip) for clip in (1.0, None)}


def check_bad_step(step, fault: str, at: int) -> None:
    """The state stays bitwise, one step is counted, and the next one trains."""
    state = _state(fault, at)
    for _ in range(at):
        state, metrics = step(state, BATCH)
        assert not metrics.is_skipped
    kept = (state.params, state.opt_state, state.router_state, state.recent_norms)
    before = jax.tree.map(np.array, kept)
    state, metrics = step(state, BATCH)
    assert metrics.is_skipped
    assert bool(np.isfinite(metrics.loss)) == (fault != "loss")
    assert bool(np.isfinite(metrics.grad_norm)) == (fault in ("loss", "spike"))
    kept = (state.params, state.opt_state, state.router_state, state.recent_norms)
    jax.tree.map(np.testing.assert_array_equal, kept, before)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (at + 1, 1, 1)
    state, metrics = step(state, BATCH)
    assert not metrics.is_skipped and metrics.skipped_in_a_row == 0
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (1, 0)
    changed = jax.tree.map(lambda old, new: (old != np.asarray(new)).any(), before[0], state.params)
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, LATER])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_bad_step_leaves_state_bitwise(steps, fault, clip, at):
    check_bad_step(steps[clip], fault, at)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nan", "inf"])
def test_a_guard_that_multiplies_by_zero_is_found(monkeypatch, fault):
    """The check can fail: 0 times NaN is NaN."""

    def mix(is_good, new, old):
        return jax.tree.map(lambda n, o: o + is_good.astype(o.dtype) * (n - o), new, old)

    monkeypatch.setattr(step_module, "select", mix)
    step = _faulty(None)
    with pytest.raises(AssertionError):
        check_bad_step(step, fault, 3)


def _limits(norms, ratio=10.0):
    recent, limits = guard.no_norms(), []
    for norm in norms:
        limits.append(float(guard.norm_limit(recent, ratio)))
        norm = jnp.float32(norm)
        recent = guard.remember(recent, norm, jnp.isfinite(norm) & (norm <= limits[-1]))
    return limits


@pytest.mark.parametrize("count", range(3, guard.WINDOW + 1))
def test_the_limit_is_a_multiple_of_the_median_the_lower_of_two(count):
    norms = np.zeros(guard.WINDOW, np.float32)
    norms[-count:] = np.random.default_rng(count).permutation(count) + 1.0
    limit = float(guard.norm_limit(jnp.asarray(norms), 10.0))
    assert limit == 10.0 * sorted(norms[-count:])[(count - 1) // 2]


def test_the_bound_is_of_the_last_accepted_steps():
    assert _limits([1, 2, 4, 1000, 4]) == [math.inf, math.inf, math.inf, 20.0, 20.0]
    assert _limits([1, 2, 4, math.nan, math.inf, 1]) == [math.inf] * 3 + [20.0] * 3
    many = _limits([1.0] * 20 + [3.0] * 40)
    assert many[19] == 10.0 and many[-1] == 30.0, "it follows"
    assert _limits([0, 0, 5, 0, 5, 5, 0, 9])[-3:] == [math.inf, 50.0, 50.0], "0 is no norm"
    assert _limits([1, 1, 1, 1000], ratio=None) == [math.inf] * 4
    with pytest.raises(ValueError, match="max_norm_ratio=10.0 needs state.recent_norms, which is"):
        guard.norm_limit(None, 10.0)
    for ratio in (1.0, -3.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"max_norm_ratio={ratio} must be above 1"):
            guard.check_ratio(ratio)


@pytest.mark.slow
def test_a_token_that_a_run_meets_for_the_first_time_is_no_bad_step():
    """Its row is short, so that its gradient is long: HyperP draws embeddings of 1e-4."""
    rare = 31
    params = jax.tree.map(jnp.array, params_of(TINY))
    weight = params["embedding"]["weight"]
    params["embedding"]["weight"] = weight.at[rare].multiply(1e-4)
    usual = dataclasses.replace(BATCH, tokens=jnp.where(BATCH.tokens == rare, 0, BATCH.tokens))
    first = dataclasses.replace(usual, tokens=usual.tokens.at[0, 3].set(rare))
    step = make_train_step(TINY, OPTIMIZER, max_norm_ratio=RATIO)
    state = dataclasses.replace(_state(), params=params)
    for _ in range(guard.FEWEST):
        state, before = step(state, usual)
    old_row = np.asarray(state.params["embedding"]["weight"][rare])
    state, metrics = step(state, first)
    assert metrics.grad_norm > 3 * RATIO * before.grad_norm, "or the batch shows nothing"
    assert metrics.judged_norm < 2 * before.judged_norm and metrics.loss < 2 * before.loss
    assert not metrics.is_skipped
    assert (np.asarray(state.params["embedding"]["weight"][rare]) != old_row).all()


def test_the_norm_of_the_guard_is_that_of_all_but_embeddings():
    grads = {"embedding": {"weight": jnp.full((2,), 1e6)}, "head": {"weight": jnp.array([3.0, 4])}}
    paths = {"embedding/weight"}
    norm = jnp.float32(1.5e6)
    assert guard.norm_of_judged(grads, norm, paths) == 5.0
    assert guard.norm_of_judged({"embedding": grads["embedding"]}, norm, paths) == norm
    assert guard.norm_of_judged(grads, norm, set()) == norm
