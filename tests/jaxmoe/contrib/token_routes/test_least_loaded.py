# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The least-loaded dispatcher on eight devices: which device computes what, and exactness.

That value and every gradient equal a loop over experts, on every layout of expert axes and for four
routings, is in tests/sharding/expert_parallel/test_expert_parallel.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from jaxmoe.contrib.token_routes.least_loaded import LeastLoadedConfig, group_of_each_row
from jaxmoe.contrib.token_routes.least_loaded_plan import LoanPlan, make_plan
from sharding.assignments import Assignments
from sharding.expert_parallel import AllToAllConfig
from sharding.expert_parallel.dispatched import Outgoing
from tests.sharding.expert_parallel.test_expert_parallel import (
    D,
    E,
    F,
    K,
    T,
    mesh_of,
    on_mesh,
    tensors,
    wanted,
    with_gradients,
)
from tests.support.tolerances import assert_close

EAGER = LeastLoadedConfig(threshold=1.0, min_rows=1)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def test_hand_drawn():
    """Two devices of two experts; expert 1 has rows 0 to 4, of which device 1 computes the last 3.

    device      0         1
    groups    0 1 2     3 4 5
    experts   0 1 -     2 3 1
    """
    plan = LoanPlan(
        rows=ints([2, 0], [2, 3], [0, 1], [0, 0]),
        borrowed=ints([4], [1]),
        lent=ints(1, 4, 4, 4),
        num_lent=jnp.int32(1),
    )
    experts, ranks = ints(0, 1, 1, 4, 1, 2, 1, 1), ints(1, 0, 1, 0, 2, 0, 3, 4)
    assert group_of_each_row(experts, ranks, plan).tolist() == [0, 1, 1, 6, 5, 3, 5, 5]


def test_rows_stay_on_their_device_if_possible():
    """Three devices with four rows each for expert 1 of three, of which each computes four."""
    plan = make_plan(ints(0, 12, 0), num_devices=3, slots=1, min_rows=1)
    assert plan.rows[1].tolist() == [4, 4, 4]
    groups = group_of_each_row(jnp.full((12,), 1, jnp.int32), jnp.arange(12, dtype=jnp.int32), plan)
    assert groups.tolist() == [1] * 4 + [2] * 4 + [5] * 4  # a slot, its own expert, a slot


def rows_computed(config, expert_ids):
    """[8]: on each of eight devices, for experts [A] of the slots of all devices together."""
    mesh, axes = mesh_of("expert8")
    spread = PartitionSpec("expert")

    def local(expert_ids):
        slots = expert_ids.shape[0]
        assignments = Assignments(
            token_ids=jnp.arange(slots, dtype=jnp.int32),
            expert_ids=expert_ids,
            gates=jnp.ones((slots,)),
            top_k=1,
        )
        x, weights = jnp.zeros((slots, 1)), jnp.zeros((E // 8, 1))
        sent = config.dispatch(Outgoing(x, assignments, weights, E, axes))
        return sent.group_sizes.sum()[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=spread, out_specs=spread)
    return np.asarray(jax.jit(run)(expert_ids))


def test_busiest_device_with_a_hot_expert_keeps_the_bound():
    """80% of 1,000 rows are for expert 2 of eight; the others share what remains."""
    others = np.arange(200) % (E - 1)
    experts = np.concatenate([np.full(800, 2), others + (others >= 2)]).astype(np.int32)
    np.random.default_rng(0).shuffle(experts)
    plain = rows_computed(AllToAllConfig(transport="equal"), experts)
    assert plain.tolist() == np.bincount(experts, minlength=E).tolist()
    assert plain.max() == 800
    assert rows_computed(EAGER, experts).tolist() == [125] * 8
    few = dataclasses.replace(EAGER, min_rows=100)
    assert 125 < rows_computed(few, experts).max() <= 125 + 6 * 99


def test_below_the_threshold_nothing_is_lent():
    """A busiest device of 1.25 times the mean, and of 1.3 times."""
    even = np.repeat(np.arange(E), 20)
    for extra, is_lent in ((5, False), (6, True)):
        experts = even.copy()
        experts[-extra:] = 0  # device 0 has 20 + extra of 8 * 20
        experts = np.random.default_rng(extra).permutation(experts).astype(np.int32)
        loads = np.bincount(experts, minlength=E)
        assert loads.max() == 20 + extra
        rows = rows_computed(LeastLoadedConfig(min_rows=1), experts)
        assert rows.tolist() == ([20] * 8 if is_lent else loads.tolist())


def test_weights_travel_only_for_lent_experts():
    """So that where none is lent, none do: forward and backward have one sum of each of the two
    arrays, each within a `while`."""

    def sums(jaxpr, is_inside=False):
        for equation in jaxpr.eqns:
            if equation.primitive.name.startswith("psum"):
                yield equation.outvars[0].aval.shape, is_inside
            for inner in jaxprs_in_params(equation.params):
                yield from sums(inner, is_inside or equation.primitive.name == "while")

    x, weights, cotangent = tensors()
    run = with_gradients(on_mesh("expert8", EAGER), cotangent)
    ids = jnp.zeros((T, K), jnp.int32)
    found = list(sums(jax.make_jaxpr(run)(x, jnp.ones((T, K)), weights, ids).jaxpr))
    assert sorted(found) == sorted([((D, 2, F), True), ((F, D), True)] * 2)


@functools.cache
def compiled(borrowed, order):
    config = dataclasses.replace(EAGER, borrowed=borrowed)
    return with_gradients(on_mesh("expert4", config, order=order), tensors()[2])


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 8.0),
    st.floats(0.0, 1.0),
    st.sampled_from([(1, None), (4, tuple(range(T // 4 * K))[::-1])]),
)
@settings(max_examples=10)
def test_any_routing_gives_what_a_loop_over_experts_gives(seed, skew, emptiness, settings):
    """From even to nearly all on K experts, from full to empty; token-major and not."""
    random = np.random.default_rng(seed)
    liking = skew * np.arange(E) + random.gumbel(size=(T, E))
    expert_ids = np.argsort(-liking, 1)[:, :K].astype(np.int32)
    expert_ids[random.random((T, K)) < emptiness] = E
    gates = np.where(expert_ids < E, random.uniform(0.5, 1.5, (T, K)), 0).astype(np.float32)
    x, weights, _ = tensors()
    (y, dropped), gradients = compiled(*settings)(x, gates, weights, expert_ids)
    (y_wanted, _), gradients_wanted = wanted()(x, gates, weights, expert_ids)
    assert_close((y, gradients), (y_wanted, gradients_wanted), "matmul")
    assert not dropped.any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("borrowed", 0, "borrowed=0 must be at least 1: without borrowed experts choose"),
        ("threshold", 0.9, "threshold=0.9 must be a number of at least 1, which is the mean"),
        ("capacity_factor", float("nan"), "capacity_factor=nan must be a number of at least 1"),
        ("min_rows", 0, "min_rows=0 must be at least 1: any are worth it"),
    ],
)
def test_refusals(field, value, message):
    with pytest.raises(ValueError, match=f"execution.dispatcher.{message}"):
        LeastLoadedConfig(**{field: value})
