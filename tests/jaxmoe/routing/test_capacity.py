# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Capacity against loops: what is kept, what is dropped, and that both are counted.

The layer with a capacity, on meshes and against a plain layer, is in test_mesh_invariance.py.
"""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.routing import CapacityConfig
from jaxmoe.routing.capacity import limit
from sharding.assignments import Assignments
from sharding.expert_parallel.permute import loads

LENGTH, EXPERTS, TOP_K = 6, 4, 2
POLICIES = ("gate", "position")


def drawn(seed, sequences=3) -> Assignments:
    """Distinct experts per token, skewed towards the first; every seventh token is padding."""
    rng = np.random.default_rng(seed)
    tokens = sequences * LENGTH
    keys = rng.gumbel(size=(tokens, EXPERTS)) - np.arange(EXPERTS)
    ids = np.argsort(-keys, axis=-1)[:, :TOP_K]
    gates = rng.choice(np.arange(1, 9) / 8, size=ids.shape)  # coarse: with ties
    is_padding = np.arange(tokens) % 7 == 6
    ids[is_padding], gates[is_padding] = EXPERTS, 0.0
    return Assignments(
        token_ids=jnp.asarray(np.repeat(np.arange(tokens), TOP_K), jnp.int32),
        expert_ids=jnp.asarray(ids.ravel(), jnp.int32),
        gates=jnp.asarray(gates.ravel(), jnp.float32),
        top_k=TOP_K,
    )


@jax.jit(static_argnames=("config", "length"))
def limited(assignments, config, length=LENGTH):
    return limit(assignments, config, sequence_length=length, num_experts=EXPERTS)


def plainly_kept(assignments, capacity, keep) -> np.ndarray:
    """[A] bool, slot by slot."""
    ids, gates = np.asarray(assignments.expert_ids), np.asarray(assignments.gates)
    kept = np.zeros(len(ids), bool)
    for start in range(0, len(ids), LENGTH * TOP_K):
        slots = range(start, start + LENGTH * TOP_K)
        for expert in range(EXPERTS):
            asking = [slot for slot in slots if ids[slot] == expert]
            if keep == "gate":
                asking.sort(key=lambda slot: -gates[slot])
            kept[asking[:capacity]] = True
    return kept


@pytest.mark.parametrize("keep", POLICIES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), factor=st.sampled_from([0.1, 0.5, 1.0, 1.25, 2.0]))
def test_against_loops(keep, seed, factor):
    before, config = drawn(seed), CapacityConfig(factor=factor, keep=keep)
    after = limited(before, config)
    capacity = config.rows(LENGTH, TOP_K, EXPERTS)
    kept = plainly_kept(before, capacity, keep)
    ids, gates = np.asarray(before.expert_ids), np.asarray(before.gates)
    assert after.expert_ids.tolist() == np.where(kept, ids, EXPERTS).tolist()
    assert after.gates.tolist() == np.where(kept, gates, 0.0).tolist()  # not renormalized
    assert after.token_ids.tolist() == before.token_ids.tolist() and after.top_k == TOP_K
    for part in range(3):
        slots = slice(part * LENGTH * TOP_K, (part + 1) * LENGTH * TOP_K)
        asked, got = (np.asarray(loads(a.expert_ids[slots], EXPERTS)) for a in (before, after))
        assert got.tolist() == np.minimum(asked, capacity).tolist()


def test_worked_example():
    """S = 3, K = 1, E = 2 and C = 1: both experts are asked, expert 0 by tokens 0 and 2."""
    given = Assignments(
        token_ids=jnp.arange(3, dtype=jnp.int32),
        expert_ids=jnp.asarray([0, 1, 0], jnp.int32),
        gates=jnp.asarray([0.25, 0.5, 0.75]),
        top_k=1,
    )

    def kept(keep):
        config = CapacityConfig(factor=0.5, keep=keep)
        assert config.rows(3, 1, 2) == 1
        return limit(given, config, sequence_length=3, num_experts=2).expert_ids.tolist()

    assert kept("gate") == [2, 1, 0]
    assert kept("position") == [0, 1, 2]


@pytest.mark.parametrize("keep", POLICIES)
def test_a_factor_of_e_over_k_drops_nothing(keep):
    before = drawn(0)
    after = limited(before, CapacityConfig(factor=EXPERTS / TOP_K, keep=keep))
    assert after.expert_ids.tolist() == before.expert_ids.tolist()
    assert after.gates.tolist() == before.gates.tolist()
    for experts in range(1, 40):
        for top_k in range(1, experts + 1):
            config = CapacityConfig(factor=experts / top_k)
            assert config.rows(LENGTH, top_k, experts) >= LENGTH


@pytest.mark.parametrize("keep", POLICIES)
def test_sequences_are_independent(keep):
    whole, config = drawn(1, sequences=4), CapacityConfig(factor=0.5, keep=keep)
    after = limited(whole, config)
    slots = 2 * LENGTH * TOP_K
    for part in (slice(0, slots), slice(slots, 2 * slots)):
        alone = limited(jax.tree.map(operator.itemgetter(part), whole), config)
        assert alone.expert_ids.tolist() == after.expert_ids[part].tolist()


@pytest.mark.parametrize("keep", POLICIES)
def test_only_kept_gates_have_a_gradient(keep):
    before, config = drawn(2), CapacityConfig(factor=0.5, keep=keep)

    def total(gates):
        given = Assignments(before.token_ids, before.expert_ids, gates, TOP_K)
        after = limited(given, config)
        return jnp.sum(after.gates), after

    gradient, after = jax.grad(total, has_aux=True)(before.gates)
    is_real, is_kept = (np.asarray(given.expert_ids) < EXPERTS for given in (before, after))
    assert 0 < is_kept.sum() < is_real.sum()
    assert gradient[is_real].tolist() == is_kept[is_real].astype(float).tolist()


def test_rows_are_rounded_up():
    def rows(factor, length=8, top_k=2, experts=8):
        return CapacityConfig(factor=factor).rows(length, top_k, experts)

    assert [rows(1.0), rows(1.25), rows(1.5), rows(1.51), rows(0.01)] == [2, 3, 3, 4, 1]
    assert rows(1.0, length=7) == 2


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_factors_are_refused(factor):
    text = f"capacity.factor={factor} must be finite and above 0"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        CapacityConfig(factor=factor)


def test_routers_that_set_their_own_load_are_refused():
    given = drawn(3)
    given = Assignments(given.token_ids, given.expert_ids, given.gates)
    text = "capacity needs token-major assignments: this router sets its own load"
    with pytest.raises(ValueError, match=f"^{text}$"):
        limit(given, CapacityConfig(), sequence_length=LENGTH, num_experts=EXPERTS)
