# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sorting rows by expert, returning them, and combining them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.assignments import Assignments, combine
from sharding.expert_parallel import ExpertAxes, LocalConfig, expert_parallel
from sharding.expert_parallel.permute import loads, permute_rows, repeat_tokens, sort_by_expert
from tests.support.tolerances import assert_close


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def test_hand_drawn():
    """T = 4 tokens, K = 2, E = 3 experts; token 2 is padding.

    token        0     1     2     3
    slot         0 1   2 3   4 5   6 7
    expert_ids   1 0   2 1   3 3   0 1

    sorted       | expert 0 | expert 1 | expert 2 | none
    slot         |  1   6   | 0  3  7  |    2     | 4   5
    """
    result = sort_by_expert(ints(1, 0, 2, 1, 3, 3, 0, 1), 3)
    assert result.order.tolist() == [1, 6, 0, 3, 7, 2, 4, 5]
    assert result.inverse.tolist() == [2, 0, 5, 3, 6, 7, 1, 4]
    assert result.group_sizes.tolist() == [2, 3, 1]
    # Each row carries 10 * token + expert: sorted, the experts ascend and tokens stay in order.
    rows = jnp.asarray([[1], [0], [12], [11], [23], [23], [30], [31]], jnp.float32)
    there = permute_rows(rows, result.order, result.inverse)
    assert there[:, 0].tolist() == [0, 30, 1, 11, 31, 12, 23, 23]
    assert permute_rows(there, result.inverse, result.order).tolist() == rows.tolist()


def test_example_of_the_docstring():
    """The example of sharding/expert_parallel/permute.py."""
    result = sort_by_expert(ints(2, 0, 1, 3, 0, 2), 3)
    assert result.order.tolist() == [1, 4, 2, 0, 5, 3]
    assert result.inverse.tolist() == [3, 0, 2, 5, 1, 4]
    assert result.group_sizes.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("ids", "sizes"),
    [((3, 3, 3), [0, 0, 0]), ((2, 2, 2), [0, 0, 3]), ((0,), [1, 0, 0]), ((3,), [0, 0, 0])],
    ids=["all_empty", "all_to_one", "one_slot", "one_empty_slot"],
)
def test_sort_by_expert_of_edge_cases(ids, sizes):
    result = sort_by_expert(ints(*ids), 3)
    assert result.order.tolist() == list(range(len(ids)))  # equal ids stay in order
    assert result.inverse.tolist() == list(range(len(ids)))
    assert result.group_sizes.tolist() == sizes


NUM_EXPERTS = 5
LISTS = st.lists(st.integers(0, NUM_EXPERTS), min_size=12, max_size=12)


@given(LISTS)
def test_sort_by_expert_of_any_ids(values):
    ids = ints(*values)
    result = sort_by_expert(ids, NUM_EXPERTS)
    order, inverse = np.asarray(result.order), np.asarray(result.inverse)
    assert order[inverse].tolist() == inverse[order].tolist() == list(range(12))
    assert order.tolist() == np.argsort(values, kind="stable").tolist()
    wanted = [values.count(expert) for expert in range(NUM_EXPERTS)]
    assert result.group_sizes.tolist() == loads(ids, NUM_EXPERTS).tolist() == wanted


def test_gradients_of_permuted_rows_equal_jax(key):
    order = ints(1, 6, 0, 3, 7, 2, 4, 5)
    inverse = jnp.argsort(order).astype(jnp.int32)
    rows, weight = jax.random.normal(key, (2, 8, 3))

    def ours(rows):
        return jnp.sum(weight * permute_rows(rows, order, inverse) ** 2)

    def theirs(rows):
        return jnp.sum(weight * rows[order] ** 2)

    assert_close(jax.grad(ours)(rows), jax.grad(theirs)(rows), "elementwise")
    repeated, wanted = (
        lambda x: jnp.sum(weight * repeat_tokens(x, 2) ** 2),
        lambda x: jnp.sum(weight * jnp.repeat(x, 2, axis=0) ** 2),
    )
    assert_close(repeat_tokens(rows[:4], 2), jnp.repeat(rows[:4], 2, axis=0), "elementwise")
    assert_close(jax.grad(repeated)(rows[:4]), jax.grad(wanted)(rows[:4]), "elementwise")


def assignments_of(key, is_token_major):
    """T = 4 tokens, K = 2, E = 3; the two slots of token 2 and the last one are empty."""
    expert_ids, token_ids = ints(1, 0, 2, 1, 3, 3, 0, 3), ints(0, 0, 1, 1, 2, 2, 3, 3)
    gates = jnp.where(expert_ids < 3, jax.random.uniform(key, (8,)), 0.0)
    if is_token_major:
        return Assignments(token_ids=token_ids, expert_ids=expert_ids, gates=gates, top_k=2)
    shuffled = ints(3, 7, 0, 5, 2, 6, 1, 4)
    return Assignments(
        token_ids=token_ids[shuffled], expert_ids=expert_ids[shuffled], gates=gates[shuffled]
    )


@pytest.mark.parametrize("is_token_major", [True, False], ids=["token_major", "any_order"])
def test_combine_sums_rows_by_gate(key, is_token_major):
    assignments = assignments_of(key, is_token_major)
    rows = jax.random.normal(key, (8, 5))
    assert assignments.expert_ids.shape == (8,)
    wanted = np.zeros((4, 5), np.float32)
    for slot in range(8):
        token = int(assignments.token_ids[slot])
        wanted[token] += np.asarray(assignments.gates[slot] * rows[slot])
    assert_close(combine(rows, assignments, 4), wanted, "elementwise")
    assert not combine(rows, assignments, 4)[2].any()  # a token without assignment
    narrow = combine(rows.astype(jnp.bfloat16), assignments, 4)
    assert narrow.dtype == jnp.bfloat16
    assert_close(narrow, wanted, "elementwise", "bfloat16")


def test_both_orders_combine_to_the_same_gradients(key):
    rows = jax.random.normal(key, (8, 5))
    shuffled = ints(3, 7, 0, 5, 2, 6, 1, 4)
    weight = jax.random.normal(jax.random.fold_in(key, 1), (4, 5))

    def token_major(rows, gates):
        given = assignments_of(key, True)
        given = Assignments(given.token_ids, given.expert_ids, gates, given.top_k)
        return jnp.sum(weight * combine(rows, given, 4) ** 2)

    def any_order(rows, gates):
        given = assignments_of(key, False)
        given = Assignments(given.token_ids, given.expert_ids, gates[shuffled])
        return jnp.sum(weight * combine(rows[shuffled], given, 4) ** 2)

    gates = assignments_of(key, True).gates
    gradients = [jax.grad(f, argnums=(0, 1))(rows, gates) for f in (token_major, any_order)]
    assert_close(*gradients, "elementwise")


@pytest.mark.parametrize("is_token_major", [True, False], ids=["token_major", "any_order"])
def test_the_local_dispatcher_sends_each_row_to_its_expert(key, is_token_major):
    """Expert e multiplies by e + 1, so that the result shows which rows it computed."""
    assignments = assignments_of(key, is_token_major)
    x = jax.random.normal(key, (4, 5))

    def experts(weights, rows, group_sizes, gates):
        ends = jnp.cumsum(group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
        scale = weights.at[expert].get(mode="fill", fill_value=0)
        return rows * (scale * gates)[:, None]

    scales = jnp.asarray([1.0, 2.0, 3.0])
    given = (x, assignments, experts, scales)
    result, dropped = expert_parallel(
        *given, num_experts=3, config=LocalConfig(), axes=ExpertAxes()
    )
    assert dropped.tolist() == [0, 0, 0]
    wanted = np.zeros((4, 5), np.float32)
    for slot in range(8):
        token, expert = int(assignments.token_ids[slot]), int(assignments.expert_ids[slot])
        if expert < 3:
            wanted[token] += np.asarray(assignments.gates[slot] * (expert + 1) * x[token])
    assert_close(result, wanted, "elementwise")
