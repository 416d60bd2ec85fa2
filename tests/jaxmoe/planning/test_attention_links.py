# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans with sharded sequences: bytes of the links, traffic of a step, meshes."""

import dataclasses

import pytest

from jaxmoe.planning.attention_links import (
    by_ratio,
    crossover,
    direction_bandwidth,
    links_of,
)
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.search import enumerate_meshes, on_mesh, search
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.traffic import step_traffic
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    AttentionSizes,
    AutoSequenceParallelConfig,
    RingConfig,
    UlyssesConfig,
)
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

SIZES = AttentionSizes(num_heads=32, num_kv_heads=32, head_dim=128, length=32768, ranks=8)


@pytest.mark.parametrize(
    "chip, ranks, wanted", [("v5e", 4, 2), ("v5e", 8, 1), ("v5e", 16, 1), ("h100", 8, 2)]
)
def test_ratio_at_which_sending_keys_is_cheaper(chip, ranks, wanted):
    rows = by_ratio(dataclasses.replace(SIZES, ranks=ranks), links_of(CHIPS[chip]))
    assert [row.ratio for row in rows] == [1, 2, 4, 8, 16, 32]
    assert crossover(rows) == wanted
    for row in rows:  # one way round, fewer key heads are so many times cheaper
        assert row.ring == rows[0].ring / row.ratio
        assert row.token_ring == rows[0].token_ring
    assert rows[-1].both is None and rows[-2].both is not None


def test_link_bytes_of_eight_h100_by_hand():
    """Through a switch a rank's own link carries what it sends: in the mean three quarters of all
    hops, and on the busiest rank not quite all of them."""
    first = by_ratio(SIZES, "switch")[0]
    tokens, keys, queries = 4096, 2 * 32 * 128, 32
    mean = 0.75 * 7 * tokens * keys * (2 + 2 + 4)
    assert mean < first.ring < 4 / 3 * mean
    mean = 0.75 * 7 * tokens * queries * ((4 * 128 + 4) + (4 * 128 + 8 + 4 * 128))
    assert mean < first.token_ring < 4 / 3 * mean
    assert first.both == first.ring


def test_both_directions_of_a_torus_halve_the_load():
    first = by_ratio(SIZES, "torus")[0]
    assert first.both is not None and 0.5 * first.ring < first.both < 0.7 * first.ring
    assert (links_of(CHIPS["v5e"]), links_of(CHIPS["h100"])) == ("torus", "switch")
    assert (direction_bandwidth(CHIPS["v5e"]), direction_bandwidth(CHIPS["h100"])) == (45e9, 450e9)


@pytest.mark.parametrize("remat, passes", [("none", 2), ("full", 3)])
def test_traffic_of_an_exchange_by_hand(remat, passes):
    mesh = MeshConfig(data=2, seq=2, tensor=2)
    plan = plan_of(WIDE, mesh, length=64, sequence_parallel=UlyssesConfig(), remat=remat)
    (found,) = (one for one in step_traffic(plan) if one.reason == "attention")
    heads, kv_heads, tokens = 4, 2, 8 // 2 * 64 // 2
    one_pass = 0.5 * tokens * 64 * 4 * (2 * heads + 2 * kv_heads)
    assert found.bytes == passes * WIDE.num_layers * one_pass
    assert (found.axes, found.num_devices) == (("seq",), 2)
    assert found.messages == passes * WIDE.num_layers * 4


def test_a_ring_sends_float32_gradients():
    mesh = MeshConfig(data=2, seq=4)
    plan = plan_of(WIDE, mesh, length=64, sequence_parallel=RingConfig(), compute="bfloat16")
    (found,) = (one for one in step_traffic(plan) if one.reason == "attention")
    tokens, keys = 8 // 2 * 64 // 4, 2 * 4 * 64
    assert found.bytes == WIDE.num_layers * 0.75 * 3 * tokens * keys * (2 + 2 + 4)


def test_whole_sequences_send_nothing():
    plan = plan_of(WIDE, MeshConfig(data=8), sequence_parallel=AllGatherKVConfig())
    assert "attention" not in {one.reason for one in step_traffic(plan)}


def test_sharded_sequences_need_less_memory():
    def need(mesh):
        plan = plan_of(WIDE, mesh, batch_size=2, length=512, sequence_parallel=RingConfig())
        return estimate_memory(plan, "cpu")

    whole, cut = need(MeshConfig(data=2)), need(MeshConfig(data=2, seq=4))
    assert cut.saved < 0.5 * whole.saved and cut.masks == whole.masks / 4


def test_meshes_that_shard_sequences_are_searched():
    """One sequence on eight devices: nothing but its positions and heads can be shared."""
    form = AutoSequenceParallelConfig()
    plan = plan_of(WIDE, MeshConfig(), batch_size=1, length=512, sequence_parallel=form)
    meshes = list(enumerate_meshes(8, None))
    assert len(set(meshes)) == len(meshes) == 35  # 3 factors of 2 in 5 places
    found = search(plan, meshes, CHIPS["v5e"], keep=len(meshes))
    seen = {(one.mesh.seq, one.mesh.tensor) for one in found.fitting}
    assert seen == {(8, 1), (4, 2), (2, 4)}
    with pytest.raises(ValueError, match="'act_seq' of size 4 must be divisible by mesh.seq=8"):
        on_mesh(dataclasses.replace(plan, sequence_length=4), MeshConfig(seq=8))


def test_sizes_of_one_layer():
    plan = plan_of(WIDE, MeshConfig(data=2, seq=2, tensor=2), sequence_parallel=RingConfig())
    sizes = Sizes.of(plan).attention()
    assert (sizes.ranks, sizes.tensor, sizes.sequences) == (2, 2, 4)
    assert (sizes.local_heads, sizes.local_kv_heads, sizes.itemsize) == (4, 2, 4)
