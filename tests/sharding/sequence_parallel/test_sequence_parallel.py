# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Forms of sequence parallelism equal attention on one device; their traffic and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.planning.hlo import collectives
from pallas_kernels.ring_attention.schedule import make_schedule
from pallas_kernels.sequence_layout import lay_out
from sharding import MeshConfig, make_mesh
from sharding.constrain import Placement
from sharding.fold import MoEMesh, refine
from sharding.rules import DATA_PARALLEL
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    AttentionRules,
    AttentionSizes,
    NoSequenceParallelConfig,
    RingConfig,
    TokenOrder,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
    attend,
    choose,
)
from sharding.sequence_parallel.traffic import busiest_link, sent_bytes
from tests.support.ring_schedules import ring_bytes, ring_permutes
from tests.support.sequence_orders import inverse_order
from tests.support.tolerances import assert_close

B, S, N, M, H, RANKS = 2, 32, 8, 4, 6, 4
PLACEMENT = Placement(DATA_PARALLEL)

FORMS = {
    "all_gather": AllGatherKVConfig(),
    "all_gather_contiguous": AllGatherKVConfig(layout="contiguous"),
    "ulysses": UlyssesConfig(),
    "ring": RingConfig(),
    "ring_by_document": RingConfig(layout="document_zigzag", directions="both"),
    "token_ring": TokenRingConfig(),
}
MASKS = {
    "causal": AttentionRules(),
    "window": AttentionRules(window=7, softcap=3.0),
    "both_sides": AttentionRules(is_causal=False, scale=0.2),
}
IN_SHORT = {("all_gather", "window"), ("ulysses", "causal"), ("ring_by_document", "causal")}
CASES = [
    pytest.param(form, mask, marks=() if (form, mask) in IN_SHORT else pytest.mark.slow)
    for form in FORMS
    for mask in MASKS
]


@functools.cache
def mesh():
    return make_mesh(MeshConfig(data=2, seq=RANKS), jax.devices()[:8])


def arrays():
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(rng.standard_normal((B, S, heads, H)), jnp.float32) for heads in (N, M, M, N)
    )
    segments = np.ones((B, S), np.int32)
    segments[0, 11:] = 2
    segments[1, 27:] = 0
    return (q, k, v), weight, segments


def run(config, rules, *, order=None, has_documents=True):
    """Return values and gradients of attention on permuted rows, in the original order."""
    given, weight, segments = arrays()

    def there(x):
        return x if order is None else lay_out(x, order)

    def back(x, axis=1):
        return x if order is None else lay_out(x, inverse_order(order), axis)

    def loss(given, weight, segments, places):
        out, seen = attend(
            *given,
            placement=PLACEMENT,
            config=config,
            positions=None,
            segment_ids=segments if has_documents else None,
            order=None if places is None else TokenOrder(places),
            rules=rules,
        )
        return jnp.sum(out * weight), (out, seen)

    places = None if order is None or order.ndim == 1 else jnp.asarray(order)
    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    laid = jax.tree.map(there, (given, weight, jnp.asarray(segments)))
    (_, (out, seen)), gradients = both(*laid, places)
    out, gradients = jax.device_get((out, gradients))
    seen = {name: np.asarray(x) for name, x in seen.items()}
    if order is not None and order.ndim == 2:
        seen = {name: np.moveaxis(back(np.moveaxis(x, 2, 1)), 1, 2) for name, x in seen.items()}
    else:
        seen = {name: back(x, 2) for name, x in seen.items()}
    return back(out), jax.tree.map(back, gradients), seen


@pytest.mark.parametrize(("form", "mask"), CASES)
def test_every_form_is_attention_on_one_device(form, mask):
    """Packed documents and padding; outputs, gradients, and watched logits."""
    config, rules = FORMS[form], dataclasses.replace(MASKS[mask], is_observed=True)
    segments = jnp.asarray(arrays()[2])
    order = config.token_order(S, RANKS, segments)
    wanted = run(NoSequenceParallelConfig(), rules)
    with jax.set_mesh(mesh()):
        found = run(config, rules, order=None if order is None else np.asarray(order))
    assert_close(found, wanted, "attention")


@pytest.mark.slow
@pytest.mark.parametrize("form", [RingConfig, TokenRingConfig])
def test_zigzag_by_document_with_a_window_and_without_documents(form):
    """Rows of one document: no ids and no places are given."""
    config, rules = form(layout="document_zigzag"), AttentionRules(window=7)
    wanted = run(NoSequenceParallelConfig(), rules, has_documents=False)
    with jax.set_mesh(mesh()):
        found = run(config, rules, order=config.token_order(S, RANKS), has_documents=False)
    assert_close(found, wanted, "attention")


def test_sharded_sequences_without_a_form_raise():
    text = "mesh.seq cuts sequences into 4 parts, and this form has whole ones"
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=text):
        run(NoSequenceParallelConfig(), AttentionRules())


SIZES = AttentionSizes(num_heads=8, num_kv_heads=4, head_dim=128, length=4096, ranks=4)

REFUSALS = {
    "heads": (
        UlyssesConfig(),
        {"ranks": 8},
        "execution.sequence_parallel 'ulysses' exchanges heads, and the 8 query and 4 key heads of"
        " a device (attention.num_heads=8, attention.num_kv_heads=4, mesh.tensor=1) must be"
        " divisible by mesh.seq=8: set mesh.seq to 1, 2, 4, or execution.sequence_parallel to ring"
        " or all_gather",
    ),
    "local heads": (
        UlyssesConfig(),
        {"tensor": 2},
        "execution.sequence_parallel 'ulysses' exchanges heads, and the 4 query and 2 key heads of"
        " a device (attention.num_heads=8, attention.num_kv_heads=4, mesh.tensor=2) must be"
        " divisible by mesh.seq=4: set mesh.seq to 1 or 2, or execution.sequence_parallel to ring"
        " or all_gather",
    ),
    "chunks": (
        UlyssesConfig(num_chunks=2),
        {},
        "the 1 key heads that a device has after the exchange (attention.num_kv_heads=4,"
        " mesh.tensor=1, mesh.seq=4) must be divisible by"
        " execution.sequence_parallel.num_chunks=2",
    ),
    "zigzag": (
        RingConfig(),
        {"length": 4100},
        "sequences of 4100 tokens must be divisible by 8 (zigzag over mesh.seq=4): pad to 4104, or"
        " set execution.sequence_parallel.layout to contiguous",
    ),
    "contiguous": (
        UlyssesConfig(),
        {"length": 4098},
        "sequences of 4098 tokens must be divisible by 4 (contiguous over mesh.seq=4): pad to 4100",
    ),
    "pieces": (
        UlyssesRingConfig(ulysses=8),
        {"ranks": 16},
        "mesh.seq=16, and the 8 query and 4 key heads of a device, must be divisible by"
        " execution.sequence_parallel.ulysses=8: set sequence_parallel.ulysses and fold.seq_inner"
        " to 2 or 4, or execution.sequence_parallel to ring",
    ),
    "none": (
        NoSequenceParallelConfig(),
        {},
        "mesh.seq cuts sequences into 4 parts, and this form has whole ones: set mesh.seq to 1, or"
        " choose another form, such as auto",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    config, changes, text = REFUSALS[name]
    with pytest.raises(ValueError) as error:
        config.check(dataclasses.replace(SIZES, **changes))
    assert str(error.value) == text
    config.check(dataclasses.replace(SIZES, ranks=1, **{"length": 4099}))


CHOICES = {
    "one device": ({"ranks": 1}, "torus", NoSequenceParallelConfig()),
    "heads divide": ({}, "torus", UlyssesConfig()),
    "too many devices": ({"ranks": 8}, "torus", RingConfig(directions="both")),
    "a switch": ({"ranks": 8}, "switch", RingConfig()),
    "odd key heads": ({"ranks": 8, "tensor": 4}, "torus", RingConfig()),
    "few devices, few keys": ({"ranks": 2, "num_heads": 64}, "switch", RingConfig()),
    "own keys, a switch": ({"ranks": 16, "num_kv_heads": 8}, "switch", TokenRingConfig()),
    "own keys, a torus": (
        {"ranks": 16, "num_kv_heads": 8},
        "torus",
        RingConfig(directions="both"),
    ),
    "a window": ({"ranks": 8, "window": 512}, "torus", RingConfig(layout="contiguous")),
    "both sides": (
        {"ranks": 8, "is_causal": False},
        "torus",
        RingConfig(layout="contiguous", directions="both"),
    ),
    "order": (
        {"ranks": 8, "keeps_order": True},
        "torus",
        RingConfig(layout="contiguous", directions="both"),
    ),
    "length": ({"ranks": 8, "length": 4104}, "switch", RingConfig(layout="contiguous")),
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto_chooses_by_heads_and_links(name):
    changes, links, wanted = CHOICES[name]
    sizes = dataclasses.replace(SIZES, **changes)
    choice = choose(sizes, links)
    assert choice.config == wanted
    assert choice.reason.startswith(f"{wanted.name}: ")
    choice.config.check(sizes)


def test_auto_gives_its_reason():
    sizes = dataclasses.replace(SIZES, ranks=8)
    assert choose(sizes, "torus").reason == (
        "ring: mesh.seq=8 does not divide the 8 query and 4 key heads of a device; per layer and"
        " sequence the busiest link (torus) carries all_gather 7.34 MB, ring 17.2 MB, token_ring"
        " 42 MB"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sent_bytes_equal_the_formulas(ranks):
    sizes = dataclasses.replace(SIZES, ranks=ranks, length=4800, sequences=3)
    tokens, width, others = 3 * 4800 / ranks, 128, ranks - 1
    keys, values = 2 * 4 * width, 2  # of a token; bytes
    wanted = {
        AllGatherKVConfig(): (others * tokens * keys * 2, others * tokens * keys * 2),
        UlyssesConfig(): (others / ranks * tokens * width * 2 * (2 * 8 + 2 * 4),) * 2,
        RingConfig(): (
            0.75 * others * tokens * keys * values,
            0.75 * others * tokens * keys * (values + 4),
        ),
        RingConfig(layout="contiguous"): (
            0.5 * others * tokens * keys * values,
            0.5 * others * tokens * keys * (values + 4),
        ),
        TokenRingConfig(): (
            0.75 * others * tokens * 8 * (2 * width * values + 4),
            0.75 * others * tokens * 8 * (2 * width * values + 8 + 4 * width),
        ),
    }
    for config, both in wanted.items():
        found = tuple(sent_bytes(config, sizes, is_backward=way) for way in (False, True))
        np.testing.assert_allclose(found, both, rtol=1e-12, err_msg=str(config))


def load_by_link(schedule, values, is_backward):
    """The plain count: every message of a rank's `values` keys and values, over every link that it
    takes on the shorter way; keys of 2 bytes, gradients of 4."""
    n = schedule.ranks
    load = np.zeros((2, n))
    for step in (step for route in schedule.routes for step in route.steps):
        sent = [(2, hop) for hop in step.keys]
        sent += [(4, hop) for hop in step.gradients] if is_backward else []
        for itemsize, hop in sent:
            for source, target in hop.pairs:
                ahead = (target - source) % n
                goes_back = ahead > n - ahead
                first, length = (target, n - ahead) if goes_back else (source, ahead)
                for link in range(first, first + length):
                    part = values / (schedule.pieces * len(schedule.routes))
                    load[int(goes_back), link % n] += itemsize * part
    return load


@pytest.mark.parametrize("directions", ["one", "both"])
@pytest.mark.parametrize("is_backward", [False, True])
def test_busiest_link_of_a_ring_equals_its_schedule(directions, is_backward):
    schedule = make_schedule(5, "halves", directions=directions)
    sizes = dataclasses.replace(SIZES, ranks=5, length=4000)
    config = RingConfig(directions=directions)
    wanted = load_by_link(schedule, 800 * 4 * 256, is_backward).max()
    assert busiest_link(config, sizes, "torus", is_backward=is_backward) == wanted


def test_busiest_link_of_exchange_and_gather():
    """Four ranks on a ring, each with something for all others: to both neighbours one link, to
    the opposite one two links, half each way round. A switch sees three messages leave a rank."""
    local = 1024 * 128 * 2 * (2 * 8 + 2 * 4)
    given = {"is_backward": False}
    assert busiest_link(UlyssesConfig(), SIZES, "torus", **given) == local / 4 * 2
    assert busiest_link(UlyssesConfig(), SIZES, "switch", **given) == local / 4 * 3
    shard = 2 * 1024 * 4 * 128 * 2
    assert busiest_link(AllGatherKVConfig(), SIZES, "torus", **given) == 1.5 * shard
    assert busiest_link(AllGatherKVConfig(), SIZES, "switch", **given) == 3 * shard


FOLD = MoEMesh(seq_inner=2)


def lowered(config, *, has_gradient, fold=None):
    """{kind: (executions, result bytes of one device)} of attention in bfloat16."""
    devices, axes = make_mesh(MeshConfig(data=2, seq=RANKS), jax.devices()[:8], fold=fold), "seq"
    placement = PLACEMENT
    if fold is not None:
        cut = refine(MeshConfig(data=2, seq=RANKS).by_axis, fold)
        placement, axes = Placement(DATA_PARALLEL.on_fold(cut)), cut.names("seq")
    spec = jax.sharding.PartitionSpec("data", axes, None, None)
    shapes = [
        jax.ShapeDtypeStruct(
            (B, S, heads, H),
            jnp.bfloat16,
            sharding=jax.sharding.NamedSharding(devices, spec),
        )
        for heads in (N, M, M)
    ]

    def loss(given):
        out, _ = attend(
            *given,
            placement=placement,
            config=config,
            positions=None,
            segment_ids=None,
            rules=AttentionRules(),
        )
        return jnp.sum(out.astype(jnp.float32)), out

    function = jax.value_and_grad(loss, has_aux=True) if has_gradient else loss
    with jax.set_mesh(devices):
        text = jax.jit(function).lower(shapes).as_text("hlo")
    found: dict[str, list[int]] = {}
    for one in collectives(text):
        # The batch's axes of one device are in the groups of the region, and move nothing.
        if one.kind == "collective-permute" or len(one.groups[0]) > 1:
            count = found.setdefault(one.kind, [0, 0])
            count[0] += 1
            count[1] += one.result_bytes
    return {kind: tuple(pair) for kind, pair in found.items() if kind != "all-reduce"}


def test_ulysses_has_four_all_to_alls_each_way():
    """Bytes of results are N / (N - 1) of the sent ones."""
    local = 1 * S // RANKS * H * 2 * (2 * N + 2 * M)
    assert lowered(UlyssesConfig(), has_gradient=False) == {"all-to-all": (4, local)}
    assert lowered(UlyssesConfig(), has_gradient=True) == {"all-to-all": (8, 2 * local)}


def test_all_gather_form_gathers_keys_and_scatters_gradients():
    """Positions of the keys are gathered too, for the mask."""
    gathered, positions = 2 * S * M * H * 2, 4 * S
    for layout in ("zigzag", "contiguous"):
        config = AllGatherKVConfig(layout=layout)
        forward = {"all-gather": (3, gathered + positions)}
        assert lowered(config, has_gradient=False) == forward
        found = lowered(config, has_gradient=True)
        assert found == forward | {"reduce-scatter": (2, gathered // RANKS)}


def test_usp_exchanges_inside_and_rings_outside():
    """Four exchanges among two, and a ring of two whose ranks hold twice the tokens of half of the
    heads: as many bytes as a ring of two among all heads."""
    config = UlyssesRingConfig()
    found = lowered(config, has_gradient=False, fold=FOLD)
    local = S // RANKS * H * 2 * (2 * N + 2 * M)
    ring = make_schedule(2, "halves")
    assert found["all-to-all"] == (4, local)
    assert found["collective-permute"][0] == ring_permutes(ring)
    assert set(found) == {"all-to-all", "collective-permute"}
    sizes = AttentionSizes(num_heads=N, num_kv_heads=M, head_dim=H, length=S, ranks=RANKS)
    assert (
        sent_bytes(config, sizes, is_backward=False)
        == local / 2 + ring_bytes(ring, S // RANKS, M, 2 * H, 2) / 2
    )


def test_usp_on_a_mesh_without_its_pieces_raises():
    text = "needs mesh.seq in two pieces, the faster of 2 (sequence_parallel.ulysses), and the mesh"
    with pytest.raises(ValueError) as error:
        lowered(UlyssesRingConfig(), has_gradient=False)
    assert text in str(error.value) and "has seq=4: set fold.seq_inner to 2" in str(error.value)


def test_both_directions_unload_the_busiest_link():
    def loads(is_causal):
        sizes = AttentionSizes(
            num_heads=4, num_kv_heads=4, head_dim=128, length=512, ranks=8, is_causal=is_causal
        )
        return [
            busiest_link(RingConfig(directions=way), sizes, "torus", is_backward=True)
            for way in ("one", "both")
        ]

    one, both = loads(is_causal=True)
    assert both < 0.65 * one
    one, both = loads(is_causal=False)
    assert both == one / 2
