# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Assigners: every token once, capacities, bounds of micro-batches and makespan, brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.levels import BucketsConfig, LevelCost, MilpConfig, Room, ZonesConfig
from jaxmoe.contrib.levels.milp import LevelProgram, bucket_ends
from jaxmoe.contrib.levels.plan import plan_of

ASSIGNERS = {"buckets": BucketsConfig(), "milp": MilpConfig(), "zones": ZonesConfig()}


@st.composite
def problems(draw):
    """Numbers of a problem; see `made`."""
    levels, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    most = tokens * 2 ** (levels - 1)
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=24))
    steps = draw(st.lists(st.floats(0, 1), min_size=levels - 1, max_size=levels - 1))
    pair, other = draw(st.floats(1e-4, 1e-1)), draw(st.floats(1e-3, 1.0))
    return lengths, tokens, draw(st.integers(1, 3)), steps, pair, other, draw(st.integers(0, 3))


def made(problem):
    """Lengths of documents, sizes of a micro-batch, and a cost."""
    lengths, tokens, rows, steps, pair, other, near = problem
    degrees = tuple(2**i for i in range(len(steps) + 1))
    rings = (0.0, *itertools.accumulate(steps))
    cost = LevelCost(pair=pair, other=other, rings=rings, near_level=min(near, len(steps)))
    return lengths, Room(tokens=tokens, degrees=degrees, rows=rows), cost


@pytest.mark.parametrize("name", ASSIGNERS)
@settings(max_examples=25, deadline=None)
@given(problem=problems())
def test_every_document_once_within_capacity_and_buffer(name, problem):
    lengths, room, cost = made(problem)
    plan = ASSIGNERS[name].assign(lengths, room, cost)
    micro_batches = plan.micro_batches(room)
    seen = sorted(i for _, groups in micro_batches for group in groups for i in group)
    assert seen == list(range(len(lengths)))
    for level, groups in micro_batches:
        assert len(groups) == room.rows * room.ranks // room.degrees[level]
        assert any(groups)
        for group in groups:
            assert sum(lengths[i] for i in group) <= room.degrees[level] * room.tokens
    accumulation = max(1, math.ceil(sum(lengths) / (room.rows * room.length)))
    assert len(micro_batches) <= room.buffer(accumulation)
    wanted = sum(
        cost.other
        + max(
            cost.rings[level],
            max(
                cost.pair * sum(lengths[i] * (lengths[i] + 1) / 2 for i in group) / 2**level
                for group in groups
            ),
        )
        for level, groups in micro_batches
    )
    assert plan.seconds(lengths, room, cost) == pytest.approx(wanted)
    assert sum(plan.shares(lengths, room)) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(problem=problems())
def test_milp_is_never_worse_than_buckets(problem):
    lengths, room, cost = made(problem)
    seconds = {
        name: assigner.assign(lengths, room, cost).seconds(lengths, room, cost)
        for name, assigner in ASSIGNERS.items()
    }
    assert seconds["milp"] <= seconds["buckets"]
    assert seconds["milp"] <= seconds["zones"]


def test_buckets_take_the_lowest_level_that_holds_a_document():
    room = Room(tokens=10, degrees=(1, 2, 4, 8))
    assert [room.lowest(n) for n in (1, 10, 11, 20, 21, 40, 41, 80)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="a document of 81 tokens is longer than a row of 80"):
        room.lowest(81)


def test_zones_move_a_document_where_attention_hides_messages():
    room = Room(tokens=10, degrees=(1, 2, 4))
    cost = LevelCost(pair=1.0, other=1.0, rings=(0.0, 10.0, 25.0), near_level=1)
    # 4 tokens save 10 / 2 < 10 on a host; 6 save 21 / 2 >= 10, and then 21 / 4 < 15 across hosts;
    # 11 save 66 / 4 >= 15.
    for length, level in ((4, 0), (6, 1), (10, 1), (11, 2)):
        plan = ZonesConfig().assign([length], room, cost)
        assert set(plan.groups) == {level}, length


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_milp_is_the_optimum_of_its_program_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    room = Room(tokens=16, degrees=(1, 2, 4))
    rings = (0.0, float(rng.uniform(0, 0.1)), float(rng.uniform(0.1, 1)))
    cost = LevelCost(pair=1e-3, other=float(rng.uniform(0.01, 1)), rings=rings, near_level=1)
    lengths = rng.lognormal(2.5, 0.9, size=8).astype(int).clip(1, room.length).tolist()
    program = LevelProgram.of(lengths, room, cost, 16)
    counts = program.solve(10_000)
    assert counts is not None
    allowed = [range(room.lowest(length), 3) for length in lengths]
    values, packed = [], []
    for levels in itertools.product(*allowed):
        counted = np.zeros((len(program.members), 3), int)
        for bucket, members in enumerate(program.members):
            np.add.at(counted[bucket], [levels[i] for i in members], 1)
        values.append(program.seconds(counted))
        packed.append(plan_of(levels, lengths, room, cost).seconds(lengths, room, cost))
    assert program.seconds(counts) == pytest.approx(min(values))
    found = MilpConfig().assign(lengths, room, cost).seconds(lengths, room, cost)
    assert min(values) <= found + 1e-9  # the program is a lower bound of what can be packed
    assert found <= 1.05 * min(packed)


@pytest.mark.parametrize("name", ASSIGNERS)
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7))
def test_groups_of_equal_degree_take_at_most_four_thirds_of_the_optimum(name, lengths):
    """One level, room for all: the slowest group against every way to share out the documents."""
    room, number = Room(tokens=300, degrees=(1,), rows=3), 3
    cost = LevelCost(pair=1.0, other=0.0, rings=(0.0,))
    plan = ASSIGNERS[name].assign(lengths, room, cost)
    work = [length * (length + 1) / 2 for length in lengths]
    optimum = min(
        max(sum(w for w, p in zip(work, places, strict=True) if p == g) for g in range(number))
        for places in itertools.product(range(number), repeat=len(work))
    )
    bound = max(sum(work) / number, *work)
    assert bound <= optimum <= plan.seconds(lengths, room, cost) <= (4 / 3) * optimum + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_buckets_of_length_round_up_least(lengths, buckets):
    ordered = np.sort(np.array(lengths))
    ends = bucket_ends(ordered, buckets)
    assert ends[-1] == len(ordered) and len(ends) <= buckets

    def padding(ends):
        cut = zip([0, *ends], ends, strict=False)
        return sum(int((ordered[b - 1] - ordered[a:b]).sum()) for a, b in cut)

    inner = range(1, len(ordered))
    best = min(
        padding([*some, len(ordered)])
        for number in range(min(buckets, len(ordered)))
        for some in itertools.combinations(inner, number)
    )
    assert padding(ends) == best
