# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans with sharded sequences: bytes of the links, traffic of a step, meshes."""

import dataclasses
from typing import get_args

import pytest

from jaxmoe.execution import Remat
from jaxmoe.planning.abstract_step import trace_step
from jaxmoe.planning.attention_links import (
    by_ratio,
    crossover,
    direction_bandwidth,
    links_of,
)
from jaxmoe.planning.compile_ahead import topology_mesh
from jaxmoe.planning.hardware import CHIPS, parse_topology
from jaxmoe.planning.hlo import collectives
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.mesh_axes import axes_of_groups
from jaxmoe.planning.search import enumerate_meshes, on_mesh, search
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.traffic import step_traffic
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    AttentionSizes,
    AutoSequenceParallelConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
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


FORMS = {
    "ring": (RingConfig(), 2),
    "token_ring": (TokenRingConfig(), 2),
    "ulysses": (UlyssesConfig(), 3),
    "all_gather": (AllGatherKVConfig(), 3),
}
"""Forms, and their passes where the results of attention are kept and the layer is not."""


def _attention(name, remat, **fields):
    plan = plan_of(WIDE, length=64, sequence_parallel=FORMS[name][0], remat=remat, **fields)
    (entry,) = (entry for entry in step_traffic(plan) if entry.reason == "attention")
    return plan, entry


@pytest.mark.parametrize("name", FORMS)
def test_results_of_attention_that_are_kept_are_not_sent_for_again(name):
    """A ring's messages are in the kernel; other forms exchange heads or gather keys beside it."""
    mesh = MeshConfig(data=2, seq=4)
    sent = {remat: _attention(name, remat, mesh=mesh)[1] for remat in get_args(Remat)}
    assert sent["offload"] == sent["full"] and sent["full"].bytes > sent["none"].bytes
    assert sent["full"].messages > sent["none"].messages
    same = "none" if FORMS[name][1] == 2 else "full"
    for remat in ("dots", "kernels", "attention"):
        assert sent[remat] == sent[same]


def test_of_both_the_exchange_is_sent_again():
    form = UlyssesRingConfig(ulysses=2)
    sizes = AttentionSizes(num_heads=8, num_kv_heads=4, head_dim=64, length=512, ranks=4)
    forward = list(form.messages(sizes, is_backward=False))
    again = list(form.repeated_messages(sizes))
    assert 0 < len(again) < len(forward) and again == forward[: len(again)]
    assert 0 < form.num_repeated(sizes) < form.num_messages(sizes, is_backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention", "kernels"])
@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_compiled_steps_send_what_is_planned(name, remat):
    """As many bytes along the axis of the positions. (Under full, the compiler of the CPU finds the
    keys that the backward pass of a ring sends among those that are sent again.)"""
    kind = {"ring": "collective-permute", "ulysses": "all-to-all"}[name]
    plan, planned = _attention(name, remat, mesh=MeshConfig(data=2, seq=4))
    mesh = topology_mesh(plan, parse_topology("cpu:8"))
    program = trace_step(plan, mesh).lower().compile()
    sent = 0.0
    for collective in collectives(program.as_text()):
        axes = axes_of_groups(collective.groups, dict(mesh.shape))
        if collective.kind != kind or axes != ("seq",):
            continue
        assert collective.trip_count is not None
        # Not every device is the source of a permute.
        share = len(collective.groups) / 8 if kind == "collective-permute" else 1.0
        sent += share * collective.trip_count * collective.wire_bytes
    assert sent == pytest.approx(planned.bytes, rel=0.02)


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
