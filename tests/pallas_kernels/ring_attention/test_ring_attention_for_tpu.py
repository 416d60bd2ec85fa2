# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests ring attention compiled for described TPUs: transfers, and their overlap."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.planning.hlo import collectives
from pallas_kernels import ring_attention
from pallas_kernels.ring_attention.schedule import make_schedule
from tests.support.ring_schedules import ring_bytes, ring_permutes
from tests.support.tpus import described_tpus

RANKS, WIDTH, HEADS, H = 4, 512, 2, 128
SEQ = PartitionSpec(None, "seq")


@pytest.fixture
def mesh(monkeypatch):
    """Return a mesh of four ranks."""
    devices = described_tpus(monkeypatch, "v5e:2x2")
    return Mesh(np.array(devices), ("seq",), (AxisType.Auto,))


@pytest.mark.slow
def test_keys_are_sent_again_and_overlap_with_arithmetic(mesh):
    """Keys of all ranks are not kept between the passes, and transfers overlap with blocks.

    Only the gradients that come home last travel alone.
    """
    attend = functools.partial(ring_attention, axis_name="seq", implementation="xla")
    ring = jax.shard_map(attend, mesh=mesh, in_specs=SEQ, out_specs=SEQ)

    def value_and_gradients(q, k, v, d_out):
        out, pull = jax.vjp(ring, q, k, v)
        return out, *pull(d_out)

    q, k = (
        jax.ShapeDtypeStruct(
            (1, RANKS * WIDTH, heads, H), jnp.bfloat16, sharding=NamedSharding(mesh, SEQ)
        )
        for heads in (2 * HEADS, HEADS)
    )
    text = jax.jit(value_and_gradients).lower(q, k, k, q).compile().as_text()

    schedule = make_schedule(RANKS, "halves")
    sent = [ring_bytes(schedule, WIDTH, HEADS, 2 * H, 2, backward=b) for b in (False, True)]
    number = [ring_permutes(schedule, backward=b) for b in (False, True)]
    found = collectives(text)
    assert {one.kind for one in found} == {"collective-permute"}
    assert sum(one.wire_bytes * len(one.groups) for one in found) == sum(sent)
    assert len(found) == sum(number)

    lines = text[text.index("\nENTRY ") :].splitlines()
    exposed = 0
    for start, line in enumerate(lines):
        if name := re.match(r"\s+%?(\S+) = .* collective-permute-start\(", line):
            pattern = rf" collective-permute-done\(.*%?{re.escape(name[1])}\)"
            (done,) = (at for at, other in enumerate(lines) if re.search(pattern, other))
            between = lines[start:done]
            fusions = sum(" fusion(" in other for other in between)
            # The blocks of a step are a loop; those of the first one stand there one by one.
            exposed += fusions < 10 and not any(" while(" in other for other in between)
    assert exposed == len(schedule.routes[0].steps[-1].gradients)
