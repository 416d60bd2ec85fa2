# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares ring_attention with dense attention, and its schedule with masks, formulas and programs.

To add a case of values and gradients: a row in CASES.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe.planning.hlo import collectives
from pallas_kernels import flash_attention, ring_attention, sequence_order
from pallas_kernels.ring import checks
from pallas_kernels.ring_attention import reference
from pallas_kernels.ring_attention.schedule import make_schedule
from tests.support.ring_schedules import ring_bytes, ring_permutes, ring_work
from tests.support.sequence_orders import inverse_order
from tests.support.tolerances import assert_close

SEQ = P(None, "seq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ring and its attention; hashable."""

    ranks: int = 4
    layout: str = "zigzag"
    b: int = 2
    s: int = 48
    n: int = 4
    m: int = 2
    h: int = 8
    hv: int = 8
    options: tuple = ()
    is_packed: bool = False
    has_positions: bool = False
    check_vma: bool = True
    dtype: str = "float32"
    implementation: str = "reference"
    function: str = "ring"


BOTH = ("directions", "both")

CASES = {
    "one_rank": Case(ranks=1),
    "two_ranks": Case(ranks=2, m=1),
    "three_ranks": Case(ranks=3, is_packed=True),
    "four_ranks": Case(m=4),
    "eight_ranks": Case(ranks=8, n=8, m=1, implementation="xla"),
    "unchecked": Case(n=8, m=4, check_vma=False),
    "both_ways": Case(options=(BOTH,)),
    "both_ways_three_ranks": Case(
        ranks=3, layout="document_zigzag", is_packed=True, options=(BOTH,)
    ),
    "documents": Case(layout="document_zigzag", is_packed=True),
    "documents_eight_ranks": Case(ranks=8, layout="document_zigzag", is_packed=True),
    "documents_xla": Case(layout="document_zigzag", is_packed=True, implementation="xla"),
    "documents_window": Case(
        layout="document_zigzag", is_packed=True, has_positions=True, options=(("window", 7),)
    ),
    "one_document": Case(layout="document_zigzag", ranks=2, hv=12),
    "contiguous": Case(layout="contiguous"),
    "contiguous_both_ways": Case(layout="contiguous", is_packed=True, options=(BOTH,)),
    "contiguous_window": Case(layout="contiguous", options=(("window", 14),)),
    "contiguous_window_of_one": Case(layout="contiguous", options=(("window", 1),)),
    "zigzag_window": Case(options=(("window", 14),), implementation="xla"),
    "softcap_and_scale": Case(ranks=2, options=(("softcap", 2.0), ("scale", 0.5))),
    "full": Case(ranks=3, options=(("causal", False),)),
    "positions": Case(has_positions=True, layout="contiguous", options=(BOTH,)),
    "bfloat16": Case(dtype="bfloat16", is_packed=True),
}


def _ids(case):
    """Return segments: four documents per row, some shorter than the number of pieces; else one."""
    if not case.is_packed:
        return None
    cuts = np.array([[5, 23, 40], [1, 2, 29]]) * case.s // 48
    return (np.arange(case.s)[None, :, None] >= cuts[:, None]).sum(-1).astype(np.int32)


def _order(case):
    """Return the order [B S]; with positions given, tokens are in any order."""
    if case.has_positions and case.layout == "contiguous":
        order = np.random.default_rng(0).permutation(case.s).astype(np.int32)
    else:
        order = sequence_order(case.s, case.ranks, case.layout, _ids(case))
    return np.broadcast_to(order, (case.b, case.s))


def _inputs(case):
    keys = jax.random.split(jax.random.key(7), 4)
    shapes = ((case.n, case.h), (case.m, case.h), (case.m, case.hv), (case.n, case.hv))
    return tuple(
        jax.random.normal(key, (case.b, case.s, *shape)).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _lay_out(x, order):
    return jnp.take_along_axis(x, jnp.asarray(order)[:, :, None, None], axis=1)


def _mesh(ranks):
    return jax.make_mesh((ranks,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:ranks])


def _sharded(case):
    """Return (q, k, v, tokens) -> out on arrays that are laid out."""

    def attend(q, k, v, tokens):
        options = dict(case.options, axis_name="seq", layout=case.layout, **tokens)
        if case.function == "reference":
            return reference.ring_attention(q, k, v, **options)
        return ring_attention(q, k, v, **options, implementation=case.implementation)

    return jax.shard_map(
        attend, mesh=_mesh(case.ranks), in_specs=SEQ, out_specs=SEQ, check_vma=case.check_vma
    )


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(case, q, k, v, d_out, tokens):
    out, pull = jax.vjp(lambda q, k, v: _sharded(case)(q, k, v, tokens), q, k, v)
    return out, *pull(d_out)


def _tokens(case):
    """Return positions and segments, laid out."""
    order, ids, tokens = _order(case), _ids(case), {}
    if ids is not None:
        tokens["segment_ids"] = jnp.asarray(np.take_along_axis(ids, order, axis=1))
    if case.has_positions:
        tokens["positions"] = jnp.asarray(order)
    return tokens


def _ring(case, *inputs):
    """Return value and gradients in the order of the sequence."""
    order = _order(case)
    found = _value_and_gradients(case, *(_lay_out(x, order) for x in inputs), _tokens(case))
    return tuple(_lay_out(x, inverse_order(order)) for x in found)


@functools.partial(jax.jit, static_argnums=0)
def _dense(options, q, k, v, d_out, ids):
    def attend(q, k, v):
        segments = {"q_segment_ids": ids, "kv_segment_ids": ids}
        return flash_attention(q, k, v, **dict(options), **segments, implementation="reference")[0]

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


def _oracle(case, *inputs):
    """Return the float32 reference on one device."""
    ids = jnp.zeros((case.b, case.s), jnp.int32) if _ids(case) is None else jnp.asarray(_ids(case))
    options = tuple(option for option in case.options if option != BOTH)
    return _dense(options, *(x.astype(jnp.float32) for x in inputs), ids)


# Every layout, mask and direction; the others are pairs of them, and more ranks.
FAST = (
    "four_ranks",
    "three_ranks",
    "both_ways",
    "documents",
    "contiguous_both_ways",
    "contiguous_window",
    "zigzag_window",
    "positions",
)


def _check_parity(name):
    case = CASES[name]
    inputs = _inputs(case)
    found = _ring(case, *inputs)
    assert all(x.dtype == case.dtype for x in found)
    assert_close(found, _oracle(case, *inputs), "attention", case.dtype)


@pytest.mark.parametrize("name", FAST)
def test_values_and_gradients_are_those_of_dense_attention(name):
    _check_parity(name)


@pytest.mark.slow
@pytest.mark.rows(6)
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_values_and_gradients_of_more(name):
    _check_parity(name)


@pytest.mark.parametrize("name", ["documents", "contiguous_window"])
def test_the_reference_is_dense_attention_too(name):
    case = dataclasses.replace(CASES[name], function="reference", ranks=2, check_vma=False)
    inputs = _inputs(case)
    assert_close(_ring(case, *inputs), _oracle(case, *inputs), "attention")


def test_odd_lengths_by_padding():
    """37 tokens, padded to 48 with a segment of their own."""
    case = Case(is_packed=True, layout="document_zigzag")
    long = _inputs(case)
    ids = np.where(np.arange(48) < 37, _ids(case), -1).astype(np.int32)
    order = sequence_order(48, 4, "document_zigzag", ids)
    tokens = {"segment_ids": jnp.asarray(np.take_along_axis(ids, order, axis=1))}
    found = _value_and_gradients(case, *(_lay_out(x, order) for x in long), tokens)
    found = [_lay_out(x, inverse_order(order))[:, :37] for x in found]
    short = [x[:, :37] for x in long]
    assert_close(found, list(_dense((), *short, jnp.asarray(ids[:, :37]))), "attention")


# Programs of the cases above.
@pytest.mark.parametrize("name", ["four_ranks", "both_ways", "positions"])
def test_later_tokens_change_nothing(name):
    case, at = CASES[name], 21
    q, k, v, d_out = _inputs(case)
    other = [x.at[:, at:].add(1.0) for x in (q, k, v)]
    one, two = _ring(case, q, k, v, d_out)[0], _ring(case, *other, d_out)[0]
    np.testing.assert_array_equal(one[:, :at], two[:, :at])
    assert (one[:, at:] != two[:, at:]).all(-1).any()


@pytest.mark.parametrize("name", ["documents", "three_ranks", "contiguous_both_ways"])
def test_documents_change_nothing_but_themselves(name):
    case = CASES[name]
    inputs, is_other = _inputs(case), _ids(case) == 2
    changed = [jnp.where(is_other[:, :, None, None], x + 1.0, x) for x in inputs]
    for one, two in zip(_ring(case, *inputs), _ring(case, *changed), strict=True):
        np.testing.assert_array_equal(one[~is_other], two[~is_other])
        assert (one[is_other] != two[is_other]).any()


# ---- the schedule against masks


@given(
    ranks=st.integers(1, 8),
    form=st.sampled_from(["halves", "earlier", "near", "all"]),
    cuts=st.lists(st.integers(0, 48), max_size=4),
    by_document=st.booleans(),
)
@settings(max_examples=60)
def test_every_visible_score_is_computed_once(ranks, form, cuts, by_document):
    length = 2 * ranks * 3
    ids = np.searchsorted(np.sort(cuts), np.arange(length), side="right").astype(np.int32)
    layout = "contiguous" if form in ("earlier", "near") else "zigzag"
    layout = "document_zigzag" if form == "halves" and by_document else layout
    window, width = (8 if form == "near" else None), length // ranks
    reach = min(ranks - 1, -(-7 // width)) if form == "near" else None
    order = sequence_order(length, ranks, layout, ids)
    token = np.arange(length)
    sees = (token[:, None] >= token) & (ids[:, None] == ids)
    sees &= token[:, None] - token < (window or length)
    wanted = sees.sum(1)[order.reshape(ranks, -1)].sum(1)
    for directions in ("one",) if form == "near" else ("one", "both"):
        schedule = make_schedule(ranks, form, directions=directions, reach=reach)
        for route in range(len(schedule.routes)):
            one = dataclasses.replace(schedule, routes=schedule.routes[route:][:1])
            np.testing.assert_array_equal(ring_work(one, order, ids, window=window).sum(1), wanted)


@pytest.mark.parametrize("ranks", [4, 8])
def test_work_is_equal_at_every_step(ranks):
    """One document: equal at every step. Packed documents: within 1% in total."""
    schedule = make_schedule(ranks, "halves")
    work = ring_work(schedule, sequence_order(256, ranks, "zigzag"))
    assert (work == work[:1]).all()
    lengths = np.random.default_rng(1).lognormal(np.log(200), 1.0, 60).astype(int) + 1
    ids = np.repeat(np.arange(60, dtype=np.int32), lengths)[:4096]
    work = ring_work(schedule, sequence_order(4096, ranks, "document_zigzag", ids), ids).sum(1)
    assert work.max() / work.mean() - 1 < 0.01
    uneven = ring_work(
        make_schedule(ranks, "earlier"), sequence_order(256, ranks, "contiguous")
    ).sum(1)
    assert uneven.max() / uneven.mean() > 1.7


@pytest.mark.parametrize(("form", "share"), [("halves", 0.75), ("earlier", 0.5), ("all", 1.0)])
def test_bytes_of_the_schedule_are_the_formula(form, share):
    sizes = (6, 4, 24)  # tokens, heads, width
    for ranks, directions in itertools.product((1, 2, 3, 4, 8, 16), ("one", "both")):
        schedule = make_schedule(ranks, form, directions=directions)
        whole = share * (ranks - 1) * ranks * math.prod(sizes)
        assert ring_bytes(schedule, *sizes, 2) == whole * 2, (ranks, directions)
        assert ring_bytes(schedule, *sizes, 2, backward=True) == whole * (2 + 4)


# ---- what is lowered against the schedule

SHARES = {"zigzag": 0.75, "document_zigzag": 0.75, "contiguous": 0.5}


def _sent(found):
    """Return bytes and number of permutes, and bytes of gathered ids on all wires."""
    permutes = [one for one in found if one.kind == "collective-permute"]
    gathers = [one for one in found if one.kind == "all-gather"]
    assert len(permutes) + len(gathers) == len(found)
    moved = sum(one.wire_bytes * len(one.groups) for one in permutes)
    return moved, len(permutes), sum(one.wire_bytes for one in gathers)


_FULL = (("causal", False),)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (4, "zigzag", ()),
        (4, "zigzag", (BOTH,)),
        (4, "document_zigzag", ()),
        (4, "contiguous", ()),
        (4, "zigzag", _FULL),
        pytest.param(8, "document_zigzag", (), marks=pytest.mark.slow),
        pytest.param(8, "zigzag", (BOTH,), marks=pytest.mark.slow),
        pytest.param(8, "contiguous", (), marks=pytest.mark.slow),
        pytest.param(8, "zigzag", _FULL, marks=pytest.mark.slow),
    ],
)
def test_lowered_bytes_are_the_formula(ranks, layout, options):
    is_packed = layout == "document_zigzag"
    case = Case(
        ranks=ranks, layout=layout, options=options, is_packed=is_packed, dtype="bfloat16", hv=16
    )
    q, k, v, d_out = _inputs(case)
    forward = jax.jit(_sharded(case)).lower(q, k, v, _tokens(case))
    both = _value_and_gradients.lower(case, q, k, v, d_out, _tokens(case))
    first, all_of_it = (_sent(collectives(x.as_text("hlo"))) for x in (forward, both))

    share = SHARES[layout] if options != _FULL else 1.0
    whole = (ranks - 1) * ranks * (case.b * case.s // ranks) * case.m * (case.h + case.hv)
    ids = (ranks - 1) * (case.b * case.s // ranks) * 4 if is_packed else 0
    assert first[0] == share * whole * 2
    assert all_of_it[0] == share * whole * (2 + 2 + 4)
    form = "all" if share == 1.0 else "halves" if share == 0.75 else "earlier"
    schedule = make_schedule(ranks, form, directions="both" if BOTH in options else "one")
    assert first[1] == ring_permutes(schedule)
    assert all_of_it[1] == ring_permutes(schedule) + ring_permutes(schedule, backward=True)
    # Segment ids are gathered once, for both passes; positions never travel here.
    assert first[2] == all_of_it[2] == ids


def test_numbers_of_permutes():
    """Low and high pieces at every hop; gradients also send home complete sums."""
    for ranks in (4, 8):
        schedule = make_schedule(ranks, "halves")
        assert ring_permutes(schedule) == 2 * (ranks - 1)
        assert ring_permutes(schedule, backward=True) == 5 * (ranks - 1) - 1
        assert ring_permutes(make_schedule(ranks, "all")) == ranks - 1
        assert ring_permutes(make_schedule(ranks, "all"), backward=True) == 2 * (ranks - 1)


# ---- what is refused


def _refused(
    match, *, ranks=4, width=12, dtypes=("float32",) * 3, heads=(4, 2), check=None, **options
):
    shapes = ((1, width, heads[0], 8), (1, width, heads[1], 8), (1, width, heads[1], 8))
    local = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def attend(x):
        del x
        return ring_attention(*local, axis_name="seq", **options)

    with pytest.raises(ValueError, match=match):
        run = jax.shard_map(attend, mesh=_mesh(ranks), in_specs=P("seq"), out_specs=SEQ)
        jax.eval_shape(run, jnp.zeros(ranks))


def test_bad_input_is_refused():
    _refused(r"length \(52\) must be divisible by 8: pad to 56, or .*contiguous", width=13)
    _refused(
        r"floating dtype, not float32, bfloat16 and .*\.astype",
        dtypes=("float32", "bfloat16", "float32"),
    )
    _refused(r"remote_dma' needs TPUs.* cpu.*'ppermute', which runs", transport="remote_dma")
    _refused(r"4 heads of q must be a multiple of the 3 heads of k", heads=(4, 3))
    _refused(r"k has 1 on a rank: choose directions='one'", heads=(4, 1), directions="both")
    _refused(r"other way round is longer", layout="contiguous", window=3, directions="both")
    _refused(r"depend on the documents .* give positions", layout="document_zigzag", window=3)
    _refused(r"window=0 must be at least 1", window=0)
    _refused(r"softcap=0.0 must be above 0", softcap=0.0)
    same = jnp.arange(12)
    _refused(
        r"no permutation of the 48 tokens .* position 0 is there 4 times.*sequence_order",
        positions=same,
    )
    _refused(
        r"no permutation of the 12 .*position 3 is there 2 times",
        ranks=1,
        positions=same.at[4].set(3),
    )


def test_bad_shapes_are_refused():
    """Calls the checks directly, because the type checks of tests would raise first."""
    q = jnp.zeros((1, 12, 4, 8))
    with pytest.raises(ValueError, match=r"positions \(5,\) must be \(12,\)"):
        checks.check_tokens("ring", q, jnp.arange(5), None, 4)
    with pytest.raises(ValueError, match=r"segment_ids \(1, 5\) must be \(1, 12\)"):
        checks.check_tokens("ring", q, None, jnp.zeros((1, 5), jnp.int32), 4)
    with pytest.raises(
        ValueError, match=r"same tokens of this rank .* not q \(1, 12, 4, 8\), k \(1, 6"
    ):
        checks.check_arrays("ring", q, q[:, :6], q[:, :6])
    with pytest.raises(ValueError, match=r"must have the same width"):
        checks.check_arrays("ring", q, q[..., :4], q)
    with pytest.raises(ValueError, match=r"same floating dtype, not int32"):
        checks.check_arrays("ring", *[q.astype(jnp.int32)] * 3)
    with pytest.raises(ValueError, match=r"takes q \[B S N H\]"):
        checks.check_arrays("ring", q[0], q, q)
