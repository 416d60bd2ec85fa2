# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Contract tests that every router of the registry passes.

A router without a row in ROUTER_CASES fails the first test. To add a router: a row in ROUTER_CASES
of `tests/support/routers.py`.

Tokens are 4 rows of 4, so that they can be spread over a mesh of (data, expert, seq) = (2, 2, 2).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.routing import ROUTERS
from sharding import axes as ax
from tests.support.routers import (
    CASES,
    EXPERTS,
    LENGTH,
    MODES,
    ROUTER_CASES,
    TOKENS,
    TRAINING_FAST,
    WIDTH,
    build,
    dense_of,
    drawn,
    given,
    initial,
    on_eight_devices,
    routed,
)
from tests.support.tolerances import assert_close

every_router = pytest.mark.parametrize("case", CASES)
in_every_mode = pytest.mark.parametrize(("case", "train"), MODES)
first_in_training = pytest.mark.parametrize(("case", "train"), TRAINING_FAST)


def test_case_table_equals_registry():
    assert set(ROUTER_CASES) == set(ROUTERS)
    for name, cases in ROUTER_CASES.items():
        assert {type(case.config) for case in cases} == {ROUTERS[name]}


@in_every_mode
def test_selection_and_statistics_are_consistent(case, train):
    for scale in (0.0, 1.0, 1e4):
        check_consistent(case, *routed(case, drawn(1, scale), train=train))


def check_consistent(case, output, dense, gates):
    selection, statistics = output.selection, output.statistics
    ids, tokens = np.asarray(selection.expert_ids), np.asarray(selection.token_ids)
    is_chosen = ids < EXPERTS
    assert ids.dtype == tokens.dtype == np.int32
    assert ((ids >= 0) & (ids <= EXPERTS)).all() and is_chosen.any()
    pairs = list(zip(tokens[is_chosen].tolist(), ids[is_chosen].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    if output.slots is None:
        assert ((tokens >= 0) & (tokens < TOKENS))[is_chosen].all()
    if selection.top_k is not None and output.slots is None:
        assert tokens.tolist() == np.repeat(np.arange(TOKENS), selection.top_k).tolist()
        assert selection.top_k == case.top_k
    assert selection.scores.dtype == output.logits.dtype == output.probs.dtype == jnp.float32
    assert np.isneginf(np.asarray(selection.scores)[~is_chosen]).all()
    assert not np.isnan(selection.scores).any() and (np.asarray(selection.scores) <= 20).all()
    assert_close(output.probs.sum(-1), np.ones(TOKENS), "elementwise")
    assert gates.dtype == jnp.float32 and np.isfinite(gates).all() and (gates >= 0).all()
    assert (gates[~is_chosen] == 0.0).all() and np.isfinite(dense).all()
    assert statistics.num_tokens == TOKENS
    counts = np.bincount(ids[is_chosen], minlength=EXPERTS)
    assert statistics.counts.tolist() == statistics.kept.tolist() == counts.tolist()
    probs, logits = (np.asarray(array, np.float64) for array in (output.probs, output.logits))
    assert_close(statistics.prob_sum, probs.sum(0), "matmul")
    z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    assert_close(statistics.z_sum, (z**2).sum(), "matmul")
    entropy = -(probs * np.log(np.maximum(probs, 1e-300))).sum()
    assert_close(statistics.entropy_sum, entropy, "matmul")


@first_in_training
def test_zero_and_one_token(case, train):
    for tokens in (0, 1):
        output, dense, gates = routed(case, drawn(1, tokens=tokens), train=train, length=None)
        assert dense.shape == (tokens, EXPERTS) and np.isfinite(gates).all()
        assert output.statistics.num_tokens == tokens
        assert output.statistics.counts.sum() <= max(tokens, 1) * EXPERTS
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output.statistics))


@first_in_training
def test_padding_has_no_effect(case, train):
    """Results equal those without padding, even if padding holds values whose squares overflow."""
    x = drawn(2)
    mask = np.tile(np.arange(LENGTH) != 1, TOKENS // LENGTH)
    output, dense, _ = routed(case, x, mask=mask, train=train)
    strange = jnp.where(mask[:, None], x, 1e30)
    other, other_dense, _ = routed(case, strange, mask=mask, train=train)
    compact, compact_dense, _ = routed(case, x, keep=mask, length=LENGTH - 1, train=train)
    assert (dense[~mask] == 0.0).all() and (np.asarray(dense)[mask] > 0.0).any()
    for result, statistics in ((dense, output), (other_dense, other)):
        assert_close(np.asarray(result)[mask], compact_dense, "matmul")
        assert_close(statistics.statistics, compact.statistics, "matmul")


@first_in_training
def test_ties_are_deterministic(case, train):
    """Equal tokens with equal scores take the lowest experts."""
    first, second = (routed(case, jnp.zeros((TOKENS, WIDTH)), train=train) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    if case.ties_to_first:
        chosen = np.asarray(first[0].selection.expert_ids).reshape(TOKENS, -1)
        used = chosen[chosen < EXPERTS].reshape(TOKENS, -1)
        assert used.tolist() == [list(range(used.shape[1]))] * TOKENS


@first_in_training
def test_permuting_tokens_permutes_the_result(case, train):
    """Permutations within each row; tokens keep the index that seeds their random numbers."""
    x, rows = drawn(3), np.arange(TOKENS).reshape(-1, LENGTH)
    order = np.random.default_rng(0).permuted(rows, axis=1).ravel()
    plain, dense, _ = routed(case, x, train=train)
    moved, moved_dense, _ = routed(case, x, keep=order, length=LENGTH, train=train)
    assert_close(moved_dense, np.asarray(dense)[order], "matmul")
    assert_close(moved.statistics, plain.statistics, "matmul")


def permute_experts(tree, order):
    """Permute every dimension of size E; no other dimension has that size."""

    def permute(leaf):
        for axis, size in enumerate(leaf.shape):
            if size == EXPERTS:
                leaf = jnp.take(leaf, order, axis=axis)
        return leaf

    return jax.tree.map(permute, tree)


@pytest.mark.parametrize("case", [case for case in CASES if not case.values[0].asymmetry])
def test_permuting_experts_permutes_the_result(case):
    order = np.random.default_rng(1).permutation(EXPERTS)
    params, state = initial(case)
    _, dense, _ = routed(case, drawn(4))
    moved = permute_experts((params, state), order)
    other, permuted, _ = routed(case, drawn(4), values=moved, experts=order)
    assert_close(permuted, np.asarray(dense)[:, order], "matmul")
    assert other.statistics.counts.sum() > 0


@pytest.mark.parametrize(
    ("case", "train"), [mode for mode in TRAINING_FAST if not mode.values[0].is_wide]
)
def test_statistics_of_two_halves_add_up(case, train):
    """Rows are routed separately, so two micro-batches equal one batch."""
    x, half = drawn(5), np.arange(TOKENS) < TOKENS // 2
    parts = [routed(case, x, keep=keep, train=train) for keep in (half, ~half)]
    whole, dense, _ = routed(case, x, train=train)
    assert_close(parts[0][0].statistics + parts[1][0].statistics, whole.statistics, "matmul")
    assert_close(jnp.concatenate([part[1] for part in parts]), dense, "matmul")


@pytest.mark.parametrize("name", ROUTER_CASES)
def test_bfloat16_inputs_are_cast_to_f32_first(name):
    case, narrow = ROUTER_CASES[name][0], drawn(6).astype(jnp.bfloat16)
    wide = routed(case, narrow.astype(jnp.float32), train=True)
    assert_close(routed(case, narrow, train=True), wide, "elementwise")


@every_router
def test_evaluation_is_causal_unless_declared_otherwise(case):
    """A change of a later token leaves earlier ones bitwise the same if `traits.is_causal`."""
    x = drawn(7)
    changed = x.at[LENGTH - 1].set(5.0 * x[LENGTH - 1][::-1] + 1.0)
    (_, dense, _), (_, other, _) = (routed(case, rows) for rows in (x, changed))
    earlier = slice(0, LENGTH - 1)
    is_equal = np.array_equal(np.asarray(dense)[earlier], np.asarray(other)[earlier])
    assert is_equal or not case.config.traits.is_causal
    if not case.is_wide:
        np.testing.assert_array_equal(dense[LENGTH:], other[LENGTH:])


@every_router
def test_a_pointwise_router_ignores_other_tokens_and_the_place(case):
    """Other tokens flipped, and the token elsewhere in the batch: its row stays bitwise the same.

    Where the trait is False one of both changes it, so that no router is refused without need.
    """
    x, kept, ids = drawn(7), np.arange(0, TOKENS, 3), np.arange(TOKENS)
    others = np.setdiff1d(ids, kept)
    flipped = x.at[others].set(5.0 * x[others][:, ::-1] + 1.0)
    inputs = given(x)
    moved = {**inputs.context, "index": (inputs.context["index"] * 5 + 3) % 64}

    def chosen(inputs):
        run = jax.jit(functools.partial(build(case).route, train=False, key=None))
        output = run(*initial(case), inputs)
        selection = output.selection
        dense = jnp.zeros((TOKENS, EXPERTS + 1)).at[selection.token_ids, selection.expert_ids]
        return np.asarray(dense.max(jnp.exp(selection.scores)))[kept, :EXPERTS], output.slots

    found = [
        chosen(dataclasses.replace(inputs, x=rows, context=context))
        for rows, context in ((x, inputs.context), (flipped, inputs.context), (flipped, moved))
    ]
    is_equal = all(np.array_equal(rows, found[0][0]) for rows, _ in found)
    is_equal &= found[0][1] is None
    assert is_equal == case.config.traits.is_pointwise


@every_router
def test_a_rowwise_router_ignores_other_rows_and_the_place_of_its_row(case):
    """Other rows flipped, and all rows numbered as elsewhere in the batch: one stays as it is."""
    x, row = drawn(7), slice(LENGTH, 2 * LENGTH)
    flipped = (5.0 * x[:, ::-1] + 1.0).at[row].set(x[row])
    inputs = given(x)
    moved = {**inputs.context, "index": inputs.context["index"] + 2 * LENGTH}
    run = jax.jit(functools.partial(build(case).route, train=False, key=None))
    found = [
        dense_of(run(*initial(case), dataclasses.replace(inputs, x=rows, context=context)))[row]
        for rows, context in ((x, inputs.context), (flipped, moved))
    ]
    assert np.allclose(*found, atol=1e-5) == case.config.traits.is_rowwise


@every_router
def test_missing_key_is_refused_if_the_router_draws_random_numbers(case):
    def shapes(params, state, inputs):
        route = functools.partial(build(case).route, train=True, key=None)
        return jax.eval_shape(route, params, state, inputs)

    if case.config.traits.needs_key:
        with pytest.raises(ValueError, match="give `key`"):
            shapes(*initial(case), given(drawn(8)))
    else:
        shapes(*initial(case), given(drawn(8)))


@functools.cache
def gradients(case):
    """Return the jitted gradient of a weighted sum of the gates in params, float state and x."""
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(TOKENS, EXPERTS)), jnp.float32)
    state = initial(case)[1]

    def loss(params, floats, x):
        whole = jax.tree.map(
            lambda old, new: old if new is None else new,
            state,
            floats,
            is_leaf=lambda leaf: leaf is None,
        )
        return jnp.sum(cotangent * routed(case, x, values=(params, whole), train=True)[1])

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


@every_router
def test_gradient_reaches_all_parameters_and_no_state(case):
    """The gates' gradient reaches every parameter that the method trains, and no state."""
    params, state = initial(case)
    floats = jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, state
    )
    for scale in (1.0, 1e4):
        of_params, of_state, of_x = gradients(case)(params, floats, drawn(9, scale))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((of_params, of_x)))
        assert all((leaf == 0.0).all() for leaf in jax.tree.leaves(of_state))
        reached = {name for name, leaf in of_params.items() if np.abs(leaf).max() > 0.0}
        if scale == 1.0:
            assert reached == set(params) - set(case.untrained)
            assert bool(reached) == (np.abs(of_x).max() > 0.0) or case.reads_only_x


@every_router
def test_declarations_and_initial_values_agree(case):
    router, (params, state) = build(case), initial(case)
    declared = {name: row.shape for name, row in router.declarations().items()}
    assert declared == {name: value.shape for name, value in params.items()}
    assert all(
        axis in ax.LOGICAL_AXES for row in router.declarations().values() for axis in row.axes
    )
    output, _, _ = routed(case, drawn(10), train=True)
    after = router.update(state, output.statistics, jnp.int32(0))
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), s) for s in (state, after)]
    assert shapes[0] == shapes[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


@first_in_training
def test_eight_devices_equal_one(case, train):
    """Rows over data and expert, positions over seq; the new state is replicated (shard_map checks
    the varying axes of its outputs)."""
    x, mask = drawn(11), np.arange(TOKENS) % 7 != 3
    output, dense, _ = routed(case, x, mask=mask, train=train)
    state = build(case).update(initial(case)[1], output.statistics, jnp.int32(0))
    spread_dense, statistics, spread_state = on_eight_devices(case, x, mask, train=train)
    assert_close(spread_dense, dense, "matmul")
    assert_close(statistics, output.statistics, "matmul")
    assert_close(spread_state, state, "matmul")
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, spread_state) == jax.tree.map(
        lambda leaf: PartitionSpec(), spread_state
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_configs_are_hashable_and_equal_by_value(name):
    config = ROUTERS[name]()
    assert hash(config) == hash(ROUTERS[name]()) and config == dataclasses.replace(config)
