# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each transition of the SBP table: collective, bytes, value, gradient; `changes` by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.planning.hlo import collectives
from sharding import MeshConfig, make_mesh
from sharding.sbp import BROADCAST, PARTIAL, TRANSITIONS, ArrayLayout, changes, split
from tests.support.boxing import box, placement
from tests.support.collective_counts import counts
from tests.support.tpus import described_tpus

ROWS = [
    (split(0), split(1)),
    (split(1), split(0)),
    (split(0), BROADCAST),
    (split(1), PARTIAL),
    (BROADCAST, split(1)),
    (BROADCAST, PARTIAL),
    (PARTIAL, split(0)),
    (PARTIAL, BROADCAST),
]
GRADIENTS = {
    ("split", "split"): "all-to-all",
    ("broadcast", "split"): "all-gather",
    ("partial", "split"): "all-gather",
}
"""Collective of the gradient of a transition, where anything is sent."""
ON_CPU = {("partial", "split"): "all-reduce"}
"""Collective of a transition where XLA forms another one on the CPU."""
X = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
DEVICES = 4


@functools.cache
def mesh():
    return make_mesh(MeshConfig(data=2, tensor=DEVICES))


def spec(to) -> PartitionSpec:
    if to == PARTIAL:
        return PartitionSpec(None, None, unreduced={"tensor"})
    return PartitionSpec(*("tensor" if to == split(dim) else None for dim in range(2)))


def placed(to) -> jax.Array:
    """Return X in this state; partial as a sum of random terms."""
    if to != PARTIAL:
        return jax.device_put(X, NamedSharding(mesh(), spec(to)))
    terms = np.random.default_rng(1).normal(size=(DEVICES, *X.shape)).astype(np.float32)
    terms[-1] = X - terms[:-1].sum(0)
    terms = jax.device_put(terms, NamedSharding(mesh(), PartitionSpec("tensor")))
    ones = jax.device_put(
        np.ones(DEVICES, np.float32), NamedSharding(mesh(), PartitionSpec("tensor"))
    )
    return jnp.einsum("nij,n->ij", terms, ones, out_sharding=spec(PARTIAL))


def total(x: jax.Array) -> np.ndarray:
    """Return the whole array; for a partial one the sum of the devices' terms."""
    if placement(x, "tensor") != PARTIAL:
        return np.asarray(x)
    devices = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    return sum(devices[device] for device in mesh().devices.reshape(2, DEVICES)[1])


def row(before, after):
    return TRANSITIONS[before.kind, after.kind]


def test_rows_cover_all_transitions():
    assert {(before.kind, after.kind) for before, after in ROWS} == set(TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), ROWS, ids=str)
def test_transition_keeps_the_array_and_is_the_collective_of_the_formula(before, after):
    with jax.set_mesh(mesh()):
        x = placed(before)
        assert placement(x, "tensor") == before
        np.testing.assert_allclose(total(x), X, atol=2e-6)
        run = jax.jit(lambda x: box(x, "tensor", after)).lower(x).compile()
        result = run(x)
        assert placement(result, "tensor") == after
        np.testing.assert_allclose(total(result), X, atol=2e-6)
    found = collectives(run.as_text())
    transition = row(before, after)
    on_cpu = ON_CPU.get((before.kind, after.kind), transition.collective)
    assert [one.kind for one in found] == [on_cpu] * (on_cpu is not None)
    sent = sum(one.wire_bytes * DEVICES for one in found)
    expected = transition.bytes(X.nbytes, DEVICES)
    if on_cpu != transition.collective:  # an all-reduce in place of a reduce-scatter
        expected *= 2
    assert sent == expected
    assert all(len(group) == DEVICES for one in found for group in one.groups)


@pytest.mark.parametrize(("before", "after"), ROWS, ids=str)
def test_gradient_of_transition_is_the_collective_of_the_table(before, after):
    weights = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)

    def loss(x):
        moved = box(x, "tensor", after)
        return (box(moved, "tensor", BROADCAST) * weights).sum()

    def pullback(x, cotangent):
        return jax.vjp(lambda x: box(x, "tensor", after), x)[1](cotangent)

    with jax.set_mesh(mesh()):
        x = placed(before)
        gradient = jax.jit(jax.grad(loss))(x)
        np.testing.assert_array_equal(np.asarray(gradient), weights)
        wanted = BROADCAST if before == PARTIAL else before
        assert placement(gradient, "tensor") == wanted
        result = box(x, "tensor", after)
        if after == PARTIAL:  # what flows back to a sum is the same for every term
            like = PartitionSpec(None, None, reduced={"tensor"})
        else:
            like = spec(after)
        cotangent = jax.ShapeDtypeStruct(
            result.shape, result.dtype, sharding=NamedSharding(mesh(), like)
        )
        text = jax.jit(pullback).lower(x, cotangent).compile().as_text()
    expected = GRADIENTS.get((before.kind, after.kind))
    assert counts(collectives(text)) == ({expected: 1} if expected else {})


def test_transition_keeps_other_axes():
    with jax.set_mesh(mesh()):
        x = jax.device_put(X, NamedSharding(mesh(), PartitionSpec("data", "tensor")))
        both = box(box(x, "tensor", BROADCAST), "tensor", split(0))
        assert jax.typeof(both).sharding.spec == PartitionSpec(("data", "tensor"), None)
        assert placement(box(both, "tensor", PARTIAL), "data") == split(0)
        text = "mesh axes data, tensor split dimension 0 together, 'tensor' innermost: box that"
        with pytest.raises(ValueError, match=re.escape(text)):
            box(both, "data", BROADCAST)
        np.testing.assert_array_equal(np.asarray(both), X)


def test_transition_to_the_same_state_is_a_no_op():
    with jax.set_mesh(mesh()):
        x = placed(split(0))
        assert box(x, "tensor", split(0)) is x


REFUSED = {
    "S(2) of an array of 2 dimensions: the dimension must be from 0 to 1": ("tensor", split(2)),
    "dimension 1 of size 6 must be divisible by its 4 parts to be split over 'tensor': choose a"
    " multiple of 4, or another dimension": ("tensor", split(1)),
    "booleans cannot be partial on 'tensor', as they do not add up: convert them first": (
        "tensor",
        PARTIAL,
    ),
    "'tansor' is no Explicit axis of the current mesh (replica, stage, data, expert, seq, tensor):"
    " placements are read off types; make a mesh with sharding.make_mesh and set it with"
    " jax.set_mesh": ("tansor", BROADCAST),
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_transition_raises(text):
    axis, to = REFUSED[text]
    with (
        jax.set_mesh(mesh()),
        pytest.raises(ValueError, match=f"^{re.escape(text)}$"),
    ):
        box(jnp.zeros((8, 6), bool), axis, to)


def test_transition_without_a_mesh_raises():
    with pytest.raises(ValueError, match="no Explicit axis of the current mesh .there is no such"):
        box(jnp.zeros((8, 6)), "tensor", BROADCAST)


@pytest.mark.parametrize(
    "function", [jnp.tanh, lambda x: x + 1.0, lambda x: x @ x.T], ids=["tanh", "plus 1", "product"]
)
def test_nonlinear_function_of_partial_operand_raises(function):
    with jax.set_mesh(mesh()):
        x = placed(PARTIAL)
        with pytest.raises(Exception, match="unreduced"):
            jax.eval_shape(function, x)


def test_changes_between_layouts_move_the_bytes_of_their_collectives():
    """A gradient that is reduced over two axes, scattered over the first, and gathered again."""
    mesh_shape, size = {"data": 4, "replica": 2, "tensor": 2}, 1600
    used = ArrayLayout(((), ("tensor",)), partial=("data", "replica"))
    stored = ArrayLayout((("data", "replica"), ("tensor",)))
    found = [(c.axis, c.collective, c.bytes) for c in changes(used, stored, mesh_shape, size)]
    # 800 bytes on a device, of which 3/4 are sent; then 200, of which half are.
    assert found == [("data", "reduce-scatter", 600), ("replica", "reduce-scatter", 100)]
    back = changes(stored, ArrayLayout(((), ("tensor",))), mesh_shape, size)
    assert [(c.axis, c.collective, c.bytes) for c in back] == [
        ("replica", "all-gather", 100),
        ("data", "all-gather", 600),
    ]
    reduced = changes(used, ArrayLayout((("data",), ("tensor",))), mesh_shape, size)
    assert [(str(c.before), str(c.after), c.bytes) for c in reduced] == [
        ("P", "S(0)", 600),
        ("P", "B", 200),
    ]
    assert changes(stored, stored, mesh_shape, size) == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), ROWS, ids=str)
def test_transition_collectives_compiled_for_tpu(before, after, monkeypatch):
    devices = described_tpus(monkeypatch, "v5e:2x4")
    tpus = make_mesh(MeshConfig(data=2, tensor=4), devices)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(tpus, spec(before)))
    with jax.sharding.use_abstract_mesh(tpus.abstract_mesh):
        lowered = jax.jit(lambda x: box(x, "tensor", after)).lower(x)
    found = collectives(lowered.compile().as_text())
    transition = row(before, after)
    assert [one.kind for one in found] == [transition.collective] * (
        transition.collective is not None
    )
    assert sum(one.wire_bytes * 4 for one in found) == transition.bytes(1024 * 1024 * 4, 4)
