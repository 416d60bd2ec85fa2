# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares token_ring_attention with dense attention, and its schedule with formulas and programs.

To add a case: a row in CASES, or in LONG_CASES if the others cover it already.
"""

import dataclasses
import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe.planning.hlo import collectives
from pallas_kernels import flash_attention, sequence_order, token_ring_attention
from pallas_kernels.ring.online_softmax import SoftmaxState, merge
from pallas_kernels.sequence_layout import lay_out
from pallas_kernels.token_ring_attention import reference
from pallas_kernels.token_ring_attention.messages import pack, unpack
from pallas_kernels.token_ring_attention.schedule import (
    HIGH,
    LOW,
    TokenRingSchedule,
)
from tests.support.ring_schedules import (
    Sizes,
    backward_traffic,
    forward_traffic,
    message_bytes,
    visible_scores,
)
from tests.support.sequence_orders import inverse_order
from tests.support.tolerances import assert_close

BY_POSITION = P(None, "seq")
VISITS = {("zigzag", True): "halves", ("contiguous", True): "later", ("zigzag", False): "every"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and options; hashable."""

    ranks: int
    b: int = 1
    s: int = 48
    n: int = 2
    m: int = 1
    h: int = 8
    hv: int = 8
    layout: str = "zigzag"
    documents: tuple = ()
    """Lengths of the documents of every sequence."""
    has_positions: bool = False
    """Whether positions follow no layout."""
    options: tuple = ()
    dtype: str = "float32"
    check_vma: bool = True

    @property
    def mask(self):
        """Options of dense attention."""
        options = dict(self.options)
        return {name: options[name] for name in options if name not in ("form", "implementation")}

    def segment_ids(self):
        rows = [np.repeat(np.arange(len(row)), row) for row in self.documents]
        return np.asarray(rows, np.int32) if rows else None

    def order(self):
        segment_ids = self.segment_ids() if self.layout == "document_zigzag" else None
        return sequence_order(self.s, self.ranks, self.layout, segment_ids)

    def positions(self):
        """Positions of the tokens in the order of the sequence, if given."""
        if self.has_positions:
            return np.random.default_rng(3).permutation(self.s).astype(np.int32)
        if self.layout == "document_zigzag" and "window" in self.mask:
            return np.tile(np.arange(self.s, dtype=np.int32), (self.b, 1))
        return None


PACKED = ((9, 22, 17),)
CO_TRAVELLING = ("form", "co_travelling")
FULL = ("causal", False)

CASES = {
    "one_rank": Case(ranks=1),
    "two_ranks": Case(ranks=2, options=(("implementation", "xla"),)),
    "odd_ranks": Case(ranks=3, check_vma=False),
    "four_ranks": Case(ranks=4, m=2),
    "eight_heads_to_one": Case(ranks=2, n=8),
    "values_of_their_width": Case(ranks=3, hv=4),
    "contiguous": Case(ranks=3, layout="contiguous"),
    "full": Case(ranks=3, options=(FULL,), check_vma=False),
    "co_travelling": Case(ranks=3, options=(CO_TRAVELLING,)),
    "co_travelling_contiguous": Case(ranks=2, layout="contiguous", options=(CO_TRAVELLING,)),
    "packed": Case(ranks=2, documents=PACKED),
    "packed_by_document": Case(ranks=3, b=2, documents=(*PACKED, (48,)), layout="document_zigzag"),
    "window": Case(ranks=2, options=(("window", 11), ("softcap", 3.0), ("scale", 0.5))),
    "positions": Case(ranks=2, has_positions=True),
    "bfloat16": Case(ranks=2, dtype="bfloat16"),
}

LONG_CASES = {
    "eight_ranks": Case(ranks=8),
    "eight_ranks_full": Case(ranks=8, options=(FULL,)),
    "eight_ranks_contiguous": Case(ranks=8, layout="contiguous", options=(CO_TRAVELLING,)),
    "one_rank_full": Case(ranks=1, options=(FULL, CO_TRAVELLING)),
    "co_travelling_full": Case(ranks=4, options=(FULL, CO_TRAVELLING), check_vma=False),
    "co_travelling_packed": Case(ranks=4, documents=PACKED, options=(CO_TRAVELLING,)),
    "co_travelling_bfloat16": Case(ranks=4, dtype="bfloat16", options=(CO_TRAVELLING,)),
    "packed_contiguous": Case(ranks=3, documents=PACKED, layout="contiguous"),
    "packed_full": Case(ranks=3, documents=PACKED, options=(FULL,)),
    "packed_positions": Case(ranks=3, documents=PACKED, has_positions=True, check_vma=False),
    "packed_window": Case(
        ranks=4, documents=PACKED, layout="document_zigzag", options=(("window", 5),)
    ),
    "packed_bfloat16": Case(ranks=3, documents=PACKED, layout="document_zigzag", dtype="bfloat16"),
    "window_full": Case(ranks=3, options=(FULL, ("window", 7))),
    "window_contiguous": Case(ranks=4, layout="contiguous", options=(("window", 7),)),
    "window_co_travelling": Case(ranks=3, options=(("window", 7), CO_TRAVELLING)),
    "two_sequences": Case(ranks=4, b=2, n=4, m=4, options=(("implementation", "xla"),)),
    "xla_eight_ranks": Case(ranks=8, n=8, m=2, options=(("implementation", "xla"),)),
    "xla_packed": Case(
        ranks=4, documents=PACKED, layout="document_zigzag", options=(("implementation", "xla"),)
    ),
    "positions_eight_ranks": Case(ranks=8, has_positions=True, options=(CO_TRAVELLING,)),
}


def _inputs(case):
    """Return q, k, v and the gradient of out, in the order of the sequence."""
    shapes = ((case.n, case.h), (case.m, case.h), (case.m, case.hv), (case.n, case.hv))
    keys = jax.random.split(jax.random.key(5), 4)
    return tuple(
        jax.random.normal(key, (case.b, case.s, *shape)).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _mesh(ranks):
    return jax.make_mesh(
        (ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks]
    )


def _tokens(case):
    tokens = {"positions": case.positions(), "segment_ids": case.segment_ids()}
    return {name: jnp.asarray(x) for name, x in tokens.items() if x is not None}


def _laid_out(case, attend=token_ring_attention):
    """Return attend(q, k, v, **tokens) on whole sequences that are laid out."""
    options = dict(case.options) if attend is token_ring_attention else case.mask
    if attend is token_ring_attention:
        options = {"implementation": "reference"} | options

    def run(q, k, v, **tokens):
        specs = {name: P("seq") if x.ndim == 1 else P(None, "seq") for name, x in tokens.items()}

        def local(q, k, v, tokens):
            return attend(q, k, v, axis_name="seq", layout=case.layout, **tokens, **options)

        return jax.shard_map(
            local,
            mesh=_mesh(case.ranks),
            in_specs=(BY_POSITION, BY_POSITION, BY_POSITION, specs),
            out_specs=BY_POSITION,
            check_vma=case.check_vma,
        )(q, k, v, tokens)

    return run


@functools.cache
def _spread(case, attend=token_ring_attention):
    """Return attend(q, k, v, **tokens) on whole sequences in their own order."""
    order, run = case.order(), _laid_out(case, attend)

    def in_order(q, k, v, **tokens):
        heads = [lay_out(x, order) for x in (q, k, v)]
        tokens = {name: lay_out(x, order, axis=x.ndim - 1) for name, x in tokens.items()}
        return lay_out(run(*heads, **tokens), inverse_order(order))

    return in_order


@functools.cache
def _dense(case):
    def run(q, k, v, positions=None, segment_ids=None):
        mask = dict.fromkeys(("q_positions", "kv_positions"), positions)
        mask |= dict.fromkeys(("q_segment_ids", "kv_segment_ids"), segment_ids)
        return flash_attention(q, k, v, **mask, **case.mask, implementation="reference")[0]

    return run


# Most of the time goes into compiling small programs.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def _value_and_gradients(attend, q, k, v, d_out, tokens):
    out, pull = jax.vjp(functools.partial(attend, **tokens), q, k, v)
    return dict(zip(("out", "d_q", "d_k", "d_v"), (out, *pull(d_out)), strict=True))


def _check_parity(case):
    inputs, tokens = _inputs(case), _tokens(case)
    actual = _value_and_gradients(_spread(case), *inputs, tokens)
    exact = [x.astype(jnp.float32) for x in inputs]
    expected = _value_and_gradients(_dense(case), *exact, tokens)
    assert {x.dtype for x in actual.values()} == {jnp.dtype(case.dtype)}
    assert_close(actual, expected, "attention", case.dtype)


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", CASES)
def test_parity(name):
    _check_parity(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_CASES)
def test_parity_of_more(name):
    _check_parity(LONG_CASES[name])


THREE = Case(ranks=3, documents=((30, 18),))


@pytest.mark.parametrize(
    "options", [(), pytest.param((CO_TRAVELLING,), marks=pytest.mark.slow)], ids=str
)
def test_later_tokens_change_no_earlier_output_bitwise(options):
    """No token before the changed one, or of another document, changes bitwise."""
    case = dataclasses.replace(THREE, options=options)
    attend, tokens = _spread(case), _tokens(case)
    q, k, v, d_out = _inputs(case)
    before = _value_and_gradients(attend, q, k, v, d_out, tokens)
    changed = [x.at[:, 20].multiply(-3.0) for x in (q, k, v, d_out)]
    after = _value_and_gradients(attend, *changed, tokens)
    same = {
        name: np.all(np.asarray(before[name] == after[name]), axis=(0, 2, 3)) for name in before
    }
    assert same["out"][:20].all() and not same["out"][20:30].any()
    assert all(rows[30:].all() for rows in same.values())


def test_gradients_flow_to_earlier_tokens_only():
    """Gradients flow from later to earlier tokens only."""
    case = CASES["four_ranks"]
    q, k, v, _ = _inputs(case)
    d_out = jnp.zeros((case.b, case.s, case.n, case.hv)).at[:, 20].set(1.0)
    found = _value_and_gradients(_spread(case), q, k, v, d_out, {})
    for name in ("d_k", "d_v"):
        assert np.any(found[name][:, :21], axis=(0, 2, 3)).all(), name
        assert not np.any(found[name][:, 21:]), name
    assert np.flatnonzero(np.any(found["d_q"], axis=(0, 2, 3))).tolist() == [20]


def test_padding_makes_any_length_divide():
    """43 tokens on 3 ranks: padding is a document of its own, and other outputs do not change."""
    case = Case(ranks=3, documents=((20, 23, 5),))
    real = slice(0, 43)
    q, k, v, d_out = _inputs(case)
    d_out = d_out.at[:, 43:].set(0.0)
    # The documents are an argument of the program.
    actual = _value_and_gradients(_spread(THREE), q, k, v, d_out, _tokens(case))
    short = Case(ranks=1, s=43, documents=((20, 23),))
    cut = [x[:, real] for x in (q, k, v, d_out)]
    expected = _value_and_gradients(_dense(short), *cut, _tokens(short))
    assert_close({name: x[:, real] for name, x in actual.items()}, expected, "attention")


@pytest.mark.parametrize(
    "name", ["packed_by_document", pytest.param("window", marks=pytest.mark.slow)]
)
def test_the_oracle_is_dense_attention(name):
    case = CASES[name]
    inputs, tokens = _inputs(case), _tokens(case)
    actual = _value_and_gradients(_spread(case, reference.token_ring_attention), *inputs, tokens)
    assert_close(actual, _value_and_gradients(_dense(case), *inputs, tokens), "attention")


def test_partial_results_merge_in_any_order():
    """Four ranks' keys, in five of 24 orders, in each of which another part is first or last."""
    q, k, v, _ = _inputs(Case(ranks=4))
    parts = [np.sort(part) for part in np.split(sequence_order(48, 4, "zigzag"), 4)]

    @jax.jit
    def states(q, k, v):
        return [
            SoftmaxState(
                *flash_attention(q, k[:, part], v[:, part], kv_positions=jnp.asarray(part))
            )
            for part in parts
        ]

    found, join = states(q, k, v), jax.jit(merge)
    whole = SoftmaxState(*flash_attention(q, k, v, implementation="reference"))
    for a, b, c, d in list(itertools.permutations(found))[::5]:
        assert_close(join(join(join(a, b), c), d), whole, "attention")
        assert_close(join(join(a, b), join(c, d)), whole, "attention")


# The schedule.


def _schedules(ranks):
    for visits, form in itertools.product(
        ("halves", "later", "every"), ("direct", "co_travelling")
    ):
        yield TokenRingSchedule(ranks=ranks, visits=visits, form=form)


def _simulate(schedule, piece):
    """Return whose keys every rank's queries have seen at the end."""
    ranks = range(schedule.ranks)
    held = {rank: rank for rank in ranks}
    home = {rank: set() for rank in ranks}
    running = {rank: set() for rank in ranks}
    for step in ranks:
        hop, ways = schedule.hop(step, piece), schedule.homeward(step, piece)
        for pairs in (hop, ways):
            for side in zip(*pairs, strict=True):
                assert len(set(side)) == len(side)
        works = {rank for rank in ranks if schedule.holds(rank, step, piece)}
        assert all(held[rank] == schedule.owner(rank, step) for rank in works)
        if schedule.form == "co_travelling" and schedule.ranks > 1:
            running = {target: running[rank] | ({rank} & works) for rank, target in ways}
        elif step == 0:
            home = {rank: {rank} for rank in works}
        else:
            assert {rank for rank, _ in ways} == works
            for rank, owner in ways:
                assert owner == held[rank]
                home[owner] |= {rank}
        held = {target: held[rank] for rank, target in hop}
    return running if schedule.form == "co_travelling" and schedule.ranks > 1 else home


def test_queries_reach_their_keys_and_results_come_home():
    """Queries are where they are needed, and results come home."""
    for ranks, schedule in ((r, one) for r in (1, 2, 3, 4, 5, 8) for one in _schedules(r)):
        for piece in schedule.pieces:
            seen = _simulate(schedule, piece)
            sees_all = schedule.visits == "every" or (schedule.visits == "halves" and piece == HIGH)
            for rank in range(ranks):
                assert seen[rank] == set(range(ranks if sees_all else rank + 1))


def test_pairs_of_four_ranks():
    """Low halves stop at rank 0, results go straight back."""
    schedule = TokenRingSchedule(ranks=4, visits="halves", form="direct")
    ring = ((0, 3), (1, 0), (2, 1), (3, 2))
    assert [schedule.hop(step, HIGH) for step in range(4)] == [ring, ring, ring, ()]
    assert [schedule.hop(step, LOW) for step in range(4)] == [ring[1:], ring[1:3], ring[1:2], ()]
    assert [schedule.homeward(step, HIGH) for step in range(4)] == [
        (),
        ((0, 1), (1, 2), (2, 3), (3, 0)),
        ((0, 2), (1, 3), (2, 0), (3, 1)),
        ((0, 3), (1, 0), (2, 1), (3, 2)),
    ]
    assert [schedule.homeward(step, LOW) for step in range(4)] == [
        (),
        ((0, 1), (1, 2), (2, 3)),
        ((0, 2), (1, 3)),
        ((0, 3),),
    ]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_work_is_that_of_the_mask(layout):
    """Every visible score is computed once; in a zigzag, equally by all ranks."""
    for ranks in (1, 2, 3, 4, 8):
        _check_work(ranks, layout)


def _check_work(ranks, layout):
    length = 12
    held = np.split(sequence_order(length * ranks, ranks, layout), ranks)
    schedule = TokenRingSchedule(ranks=ranks, visits=VISITS[layout, True], form="direct")
    work = np.array(
        [
            [visible_scores(schedule, rank, step, length) for step in range(ranks)]
            for rank in range(ranks)
        ]
    )
    brute = np.array(
        [
            [
                np.sum(held[schedule.owner(rank, step)][:, None] >= held[rank][None, :])
                for step in range(ranks)
            ]
            for rank in range(ranks)
        ]
    )
    np.testing.assert_array_equal(work, brute)
    if layout == "zigzag":
        assert (work == work[0]).all()


def test_work_of_packed_documents():
    """Per-document zigzag is within 1% of equal work."""
    rng, ranks, length = np.random.default_rng(0), 8, 4096
    ids = np.repeat(np.arange(16), rng.multinomial(length - 1600, np.ones(16) / 16) + 100)
    ids = ids.astype(np.int32)
    parts = np.split(sequence_order(length, ranks, "document_zigzag", ids), ranks)
    starts = np.searchsorted(ids, ids)
    # The queries at hand see of this rank's keys those of their document up to themselves.
    work = np.array(
        [
            sum(
                np.sum(
                    np.searchsorted(np.sort(keys), queries, side="right")
                    - np.searchsorted(np.sort(keys), starts[queries])
                )
                for queries in parts
            )
            for keys in parts
        ]
    )
    assert work.sum() == sum(n * (n + 1) // 2 for n in np.bincount(ids))
    assert work.max() <= 1.01 * work.mean()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_bytes_are_the_formulas(itemsize):
    """Bytes equal the closed form of the paper's schedule."""
    for ranks in (2, 3, 4, 8):
        _check_bytes(ranks, itemsize)


def _check_bytes(ranks, itemsize):
    sizes = Sizes(batch=2, length=128, heads=4, width=64, value_width=32, itemsize=itemsize)
    per_hop = ranks * sizes.batch * sizes.length * sizes.heads
    whole = (ranks - 1) * per_hop
    forward = whole * (64 * itemsize + 32 * itemsize + 4)
    backward = whole * (64 * itemsize + 32 * itemsize + 8 + 4 * 64)
    joint = sizes._replace(value_width=64)
    for visits, part in (("every", 1), ("halves", 3 / 4), ("later", 1 / 2)):
        schedule = TokenRingSchedule(ranks=ranks, visits=visits, form="direct")
        assert forward_traffic(schedule, sizes).bytes == part * forward
        assert backward_traffic(schedule, sizes).bytes == part * backward
        times = 2 if visits == "halves" else 1
        assert forward_traffic(schedule, sizes).permutes == times * 2 * (ranks - 1)
        assert backward_traffic(schedule, sizes).permutes == times * 3 * (ranks - 1)
        assert backward_traffic(schedule, joint).permutes == times * 2 * (ranks - 1)
        # Results go all the way round, queries one rank less.
        schedule = TokenRingSchedule(ranks=ranks, visits=visits, form="co_travelling")
        queries, lap = part * whole, ranks * per_hop
        assert forward_traffic(schedule, sizes).bytes == queries * 64 * itemsize + lap * (
            4 * 32 + 4
        )
        assert backward_traffic(schedule, sizes).bytes == (
            queries * (64 * itemsize + 32 * itemsize + 8) + lap * 4 * 64
        )
    one = TokenRingSchedule(ranks=1, visits="halves", form="co_travelling")
    assert forward_traffic(one, sizes) == backward_traffic(one, sizes) == (0, 0)


def test_token_ring_against_ring():
    """With as many query heads as key heads: the bytes of K and V, and 2/(width b) more for lse."""
    sizes = Sizes(batch=1, length=4096, heads=8, width=128, value_width=128, itemsize=2)
    schedule = TokenRingSchedule(ranks=8, visits="every", form="direct")
    keys_and_values = 8 * 7 * 4096 * 8 * 2 * 128 * 2
    ratio = forward_traffic(schedule, sizes).bytes / keys_and_values
    assert ratio == 1 + 2 / (128 * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("length", "width"), [(8, 16), (5, 3)])
def test_messages_keep_every_bit(length, width, dtype):
    """Bits are kept, also where halves of a number would be NaN."""
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(2, length, 3, width)), dtype)
    bits = rng.integers(0, 2**32, size=(2, 3, length), dtype=np.uint32)
    bits[0, 0, :3] = 0x3F807F81, 0x7F810001, 0xFF800000
    message = jax.jit(pack)(x, jnp.asarray(bits.view(np.float32)))
    sizes = Sizes(2, length, 3, width, width, x.dtype.itemsize)
    assert message.nbytes == message_bytes(sizes, width, length, x.dtype.itemsize)
    back, again = jax.jit(lambda message: unpack(message, length, x.dtype))(message)
    assert back.dtype == x.dtype and again.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
    np.testing.assert_array_equal(np.asarray(again).view(np.uint32), bits)


# The program.


@functools.cache
def _programs(case):
    """Return the HLO of the forward pass, and of both."""
    attend = _laid_out(case)
    by_position = jax.NamedSharding(_mesh(case.ranks), BY_POSITION)
    shapes, tokens = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_position),
        (_inputs(case), _tokens(case)),
    )
    forward = jax.jit(lambda q, k, v, tokens: attend(q, k, v, **tokens))
    both = _value_and_gradients.lower(attend, *shapes, tokens)
    return forward.lower(*shapes[:3], tokens), both


def _traffic(text):
    """Return permutes and bytes of all ranks; nothing else travels."""
    found = collectives(text)
    assert {one.kind for one in found} <= {"collective-permute"}
    assert all(one.trip_count == 1 for one in found)
    return len(found), sum(one.result_bytes * len(one.groups) for one in found)


def _expected(case):
    form = dict(case.options).get("form", "direct")
    causal = dict(case.options).get("causal", True)
    visits = VISITS["zigzag" if "zigzag" in case.layout else case.layout, causal]
    schedule = TokenRingSchedule(ranks=case.ranks, visits=visits, form=form)
    sizes = Sizes(
        case.b,
        case.s // case.ranks,
        case.n,
        case.h,
        case.hv,
        itemsize=jnp.dtype(case.dtype).itemsize,
        token_arrays=len(_tokens(case)),
    )
    there, back = forward_traffic(schedule, sizes), backward_traffic(schedule, sizes)
    return tuple(there), (there.permutes + back.permutes, there.bytes + back.bytes)


TRAFFIC = {
    "four": Case(ranks=4, s=64),
    "eight": Case(ranks=8, s=128, n=4, m=2, dtype="bfloat16"),
    "four_co_travelling": Case(ranks=4, s=64, options=(CO_TRAVELLING,), dtype="bfloat16"),
    "three_widths": Case(ranks=3, hv=4, options=(FULL,), dtype="bfloat16"),
    "four_contiguous": Case(ranks=4, s=64, layout="contiguous"),
    "three_packed": Case(ranks=3, documents=PACKED, layout="document_zigzag"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "eight")) for name in TRAFFIC]
)
def test_traffic_of_the_program_is_the_formula(name):
    """Counts and bytes of the program before XLA."""
    programs = _programs(TRAFFIC[name])
    for program, traffic in zip(programs, _expected(TRAFFIC[name]), strict=True):
        assert _traffic(program.as_text("hlo")) == traffic


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_traffic_of_the_compiled_program_is_the_formula(ranks):
    """XLA merges no transfer of the backward pass with one of the forward pass."""
    case = Case(ranks=ranks, s=16 * ranks)
    for program, traffic in zip(_programs(case), _expected(case), strict=True):
        assert _traffic(program.compile().as_text()) == traffic


def test_the_formulas_of_four_ranks():
    """3/4 N (N-1) c heads (2 H b + 4) forward, and + 8 + 4 H backward."""
    (permutes, there), (all_permutes, both) = _expected(TRAFFIC["four"])
    assert (permutes, all_permutes) == (4 * 3, (4 + 4) * 3)
    tokens = 3 / 4 * 4 * 3 * 16 * 2
    assert there == tokens * (2 * 8 * 4 + 4)
    assert both - there == tokens * (2 * 8 * 4 + 8 + 4 * 8)


def test_every_step_waits_for_the_one_before():
    """What travels next passes a barrier with the last results, in both passes."""
    forward, both = (program.as_text("hlo") for program in _programs(TRAFFIC["four"]))
    assert len(re.findall(r" opt-barrier\(", forward)) == 4
    assert len(re.findall(r" opt-barrier\(", both)) == 8


def test_one_rank_sends_nothing():
    for program in _programs(Case(ranks=1, options=(CO_TRAVELLING,))):
        assert _traffic(program.as_text("hlo")) == (0, 0)


# What is refused.

SHAPES = {"q": (1, 6, 4, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 8)}


def _refused(shapes, options, dtypes=(), ranks=2):
    """Call without type checks, as users do."""
    arrays = {name: jnp.zeros(shape) for name, shape in (SHAPES | shapes).items()}
    arrays |= {name: arrays[name].astype(dtype) for name, dtype in dtypes}
    options = {
        name: jnp.zeros(x, jnp.int32) if isinstance(x, tuple) else x for name, x in options.items()
    }
    attend = functools.partial(inspect.unwrap(token_ring_attention), axis_name="seq", **options)
    jax.shard_map(
        lambda arrays: attend(**arrays), mesh=_mesh(ranks), in_specs=P(), out_specs=P(None, "seq")
    )(arrays)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (6, 4, 8)}, {}, r"token_ring_attention takes q \[B S N H\].* not q \(6, 4, 8\)"),
        ({"q": (1, 6, 3, 8)}, {}, r"3 heads of q must be a multiple of the 2 heads of k"),
        (
            {"q": (1, 8, 4, 8)},
            {},
            r"belong to the same tokens of this rank and must have the same length",
        ),
        (
            {name: (1, 5, 2, 8) for name in "qkv"},
            {},
            r"5 tokens on each of 2 ranks are no two equal pieces.* by 4: pad to 12",
        ),
        ({}, {"layout": "striped"}, r"layout='striped' must be one of 'contiguous', 'zigzag'"),
        ({}, {"form": "both"}, r"form='both' must be one of 'direct', 'co_travelling'"),
        (
            {},
            {"transport": "remote_dma"},
            r"_attention: transport='remote_dma' needs TPUs.* choose",
        ),
        ({}, {"window": 0}, r"window=0 must be at least 1"),
        ({}, {"softcap": 0.0}, r"softcap=0.0 must be above 0"),
        ({}, {"positions": (7,)}, r"attention: positions \(7,\) must be \(6,\).* or \(1, 6\)"),
        ({}, {"segment_ids": (1, 5)}, r"attention: segment_ids \(1, 5\) must be \(1, 6\)"),
        (
            {},
            {"window": 3, "layout": "document_zigzag", "segment_ids": (1, 6)},
            r"token_ring_attention: window=3 counts positions.*: give positions, laid out",
        ),
        ({}, {"implementation": "pallas_gpu"}, r"implementation='pallas_gpu'"),
    ],
)
def test_bad_arguments_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        _refused(shapes, options)


def test_bad_dtypes_are_refused():
    with pytest.raises(ValueError, match="same floating dtype, not float32, bfloat16 and float32"):
        _refused({}, {}, dtypes=(("k", "bfloat16"),))


def test_outside_of_shard_map():
    arrays = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match="'seq' must be a manual mesh axis.* inside a jax.shard_"):
        token_ring_attention(**arrays, axis_name="seq")
