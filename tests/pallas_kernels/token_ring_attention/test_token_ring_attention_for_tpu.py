# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests token-ring attention compiled for described TPUs: transfers, and their overlap."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.planning.hlo import collectives
from pallas_kernels import token_ring_attention
from pallas_kernels.token_ring_attention.schedule import TokenRingSchedule
from tests.support.ring_schedules import Sizes, backward_traffic, forward_traffic
from tests.support.tpus import described_tpus

RANKS, WIDTH, HEADS, H = 4, 1024, 4, 128
SEQ = PartitionSpec(None, "seq")


@pytest.fixture
def mesh(monkeypatch):
    """Return a mesh of four ranks."""
    devices = described_tpus(monkeypatch, "v5e:2x2")
    return Mesh(np.array(devices), ("seq",), (AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.large
def test_queries_overlap_with_arithmetic(mesh):
    """A hop of the queries overlaps with a block, in both passes.

    No pass reuses what has travelled in the other, though both are in one program.
    """
    attend = functools.partial(token_ring_attention, axis_name="seq", implementation="xla")
    ring = jax.shard_map(attend, mesh=mesh, in_specs=SEQ, out_specs=SEQ)

    def value_and_gradients(q, k, v, d_out):
        out, pull = jax.vjp(ring, q, k, v)
        return out, *pull(d_out)

    x = jax.ShapeDtypeStruct(
        (1, RANKS * WIDTH, HEADS, H), jnp.bfloat16, sharding=NamedSharding(mesh, SEQ)
    )
    text = jax.jit(value_and_gradients).lower(x, x, x, x).compile().as_text()

    schedule = TokenRingSchedule(ranks=RANKS, visits="halves", form="direct")
    sizes = Sizes(1, WIDTH, HEADS, H, H, itemsize=2)
    there, back = forward_traffic(schedule, sizes), backward_traffic(schedule, sizes)
    found = collectives(text)
    assert {one.kind for one in found} == {"collective-permute"}
    assert len(found) == there.permutes + back.permutes
    assert sum(one.wire_bytes * len(one.groups) for one in found) == there.bytes + back.bytes

    lines = text[text.index("\nENTRY ") :].splitlines()
    hops, beside = {"bf16": 0, "u16": 0}, {"bf16": 0, "u16": 0}
    # The queries alone, and (Q, lse, dO, delta): as many rows of both with their float32.
    rows = {WIDTH // 2: "bf16", WIDTH + 2 * WIDTH // H: "u16"}
    for start, line in enumerate(lines):
        shape = r"\s+%?(\S+) = \((bf16|u16)\[1,(\d+),.* collective-permute-start\("
        if not (name := re.match(shape, line)) or rows.get(int(name[3])) != name[2]:
            continue
        pattern = rf" collective-permute-done\(.*%?{re.escape(name[1])}\)"
        (done,) = (at for at, other in enumerate(lines) if re.search(pattern, other))
        hops[name[2]] += 1
        # The blocks of a step are a loop; those of the first one stand there one by one.
        between = lines[start:done]
        fusions = sum(" fusion(" in other for other in between)
        beside[name[2]] += fusions > 10 or any(" while(" in other for other in between)
    assert beside == hops == {"bf16": 2 * (RANKS - 1), "u16": 2 * (RANKS - 1)}
