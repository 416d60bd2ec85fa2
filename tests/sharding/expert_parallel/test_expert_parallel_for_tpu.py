# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts on eight described TPUs: the ragged exchange compiles, and overlaps products."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.planning.hlo import collectives
from sharding.assignments import Assignments
from sharding.expert_parallel import AllToAllConfig, ExpertAxes, expert_parallel
from tests.support.collective_counts import counts
from tests.support.tpus import described_tpus

T, K, E, D, F = 1024, 4, 16, 256, 128
AXES = ExpertAxes(expert=("a", "b"), expert_tensor=("t",))
TOKENS = PartitionSpec(("a", "b", "t"))
WEIGHTS = PartitionSpec(("a", "b"), "t", None)


@pytest.fixture
def mesh(monkeypatch):
    """Return a mesh of 2 x 2 devices for experts, by 2 for their hidden units."""
    devices = described_tpus(monkeypatch, "v5e:2x4")
    return Mesh(np.array(devices).reshape(2, 2, 2), ("a", "b", "t"), (AxisType.Auto,) * 3)


def compiled(mesh, config):
    """The text of a value and its gradients; the experts are one plain product."""

    def experts(weights, rows, group_sizes, gates):
        hidden = jnp.einsum("rd,fd->rf", rows, weights[0], preferred_element_type=rows.dtype)
        hidden = hidden * gates[:, None].astype(hidden.dtype)
        return jnp.einsum("rf,fd->rd", hidden, weights[0], preferred_element_type=rows.dtype)

    def local(x, gates, weights, expert_ids):
        assignments = Assignments(
            token_ids=jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), K),
            expert_ids=expert_ids.reshape(-1),
            gates=gates.reshape(-1),
            top_k=K,
        )
        y, _ = expert_parallel(
            x, assignments, experts, weights, num_experts=E, config=config, axes=AXES
        )
        return y

    specs = (TOKENS, TOKENS, WEIGHTS, TOKENS)
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=TOKENS)

    def loss(*arguments):
        return jnp.sum(region(*arguments).astype(jnp.float32) ** 2)

    shapes = ((8 * T, D), (8 * T, K), (E, F, D), (8 * T, K))
    dtypes = (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32)
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*given).compile().as_text()


@pytest.fixture
def two_chunks(mesh):
    """The text of a program in two chunks."""
    return compiled(mesh, AllToAllConfig(num_chunks=2))


@pytest.mark.slow
def test_two_chunks_on_tpus(two_chunks):
    """The mesh chooses `ragged`: of a chunk four exchanges of rows and two of gates."""
    found = counts(collectives(two_chunks))
    assert found["ragged-all-to-all"] == 12
    assert "all-to-all" not in found


@pytest.mark.slow
def test_exchanges_of_one_chunk_hide_behind_the_product_of_the_other(two_chunks):
    """Forward and backward: there of the second chunk, back of the first."""
    entry = two_chunks[two_chunks.index("\nENTRY") :].splitlines()
    starts = {
        line: name[1]
        for line, text in enumerate(entry)
        if (name := re.match(r"\s+%(\S+) = .* ragged-all-to-all-start\(", text))
    }
    if not starts:
        pytest.skip("this libtpu runs each ragged all-to-all to its end (0.0.52 did not)")
    hidden = 0
    for start, name in starts.items():
        ends = (at for at, text in enumerate(entry) if f"all-to-all-done(%{name})" in text)
        hidden += any("convolution" in text for text in entry[start : next(ends)])
    assert hidden >= 4


@pytest.mark.slow
@pytest.mark.large
def test_equal_blocks_on_tpus(mesh):
    found = counts(collectives(compiled(mesh, AllToAllConfig(transport="equal"))))
    assert found["all-to-all"] == 6
    assert "ragged-all-to-all" not in found
