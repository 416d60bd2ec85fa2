# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Slots of a schedule: an executor in plain Python reads the right array in every tick."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.pipeline import GPipeConfig, InterleavedConfig, forward_schedule, plan_slots
from sharding.pipeline.times import from_times


class Buffers:
    """One buffer on each stage; counts the arrays that are kept and still needed."""

    def __init__(self, stages, size):
        self.held = [[None] * size for _ in range(stages)]
        self.needed = [set() for _ in range(stages)]
        self.most = [0] * stages

    def store(self, stage, slot, label):
        assert label is not None
        assert self.held[stage][slot] not in self.needed[stage], "overwrites what is still needed"
        self.held[stage][slot] = label
        self.needed[stage].add(label)
        self.most[stage] = max(self.most[stage], len(self.needed[stage]))

    def read(self, stage, slot, *, is_last):
        label = self.held[stage][slot]
        if is_last:
            self.needed[stage].remove(label)
        return label


def by_hop(hops, arrays, tick, stage):
    """Hop and slot of what happens in a tick on a stage."""
    pairs = zip(hops, arrays, strict=True)
    return [(hop, array[tick, stage]) for hop, array in pairs if array[tick, stage] >= 0]


def execute(schedule, slots):
    """Execute a schedule from its slots alone, with (group, micro-batch) labels for arrays.

    Returns:
        Everything done as (kind, group, micro-batch), and the buffers X, G, H and R.
    """
    p, ends = schedule.stages, range(1, schedule.num_hops + 1)
    x = Buffers(p, slots.num_inputs)
    g = Buffers(p, slots.num_gradients)
    h = Buffers(p, slots.num_heads)
    r = Buffers(p, slots.num_deferred)
    done = []
    made = [None] * p  # gradients made in the tick before
    for t in range(len(schedule.ticks)):
        for s in range(p):
            for hop, slot in by_hop(schedule.hops, slots.g_arrives, t, s):
                g.store(s, slot, made[(s + hop) % p])
            for hop, slot in by_hop(ends, slots.enter_slot, t, s):
                x.store(s, slot, (hop - 1, int(slots.enters[hop - 1][t])))
        made, sent, heads = [None] * p, [None] * p, {}
        for s in range(p):
            if slots.f_input[t, s] >= 0:
                label = x.read(s, slots.f_input[t, s], is_last=not schedule.has_backward)
                assert label == (schedule.group(s, int(slots.f_chunk[t, s])), slots.f_micro[t, s])
                done.append(("F", *label))
                after = schedule.after(*label)
                if after == schedule.num_groups:
                    heads[after - label[0]] = label
                else:
                    sent[s] = (after, label[1])
        for hop, leaves in enumerate(slots.leaves, 1):
            assert leaves[t] == heads.get(hop, (None, -1))[1]
        for s in range(p):
            for hop, slot in by_hop(ends, slots.head_in, t, s):
                h.store(s, slot, heads[hop])
            if slots.b_input[t, s] >= 0:
                label = x.read(s, slots.b_input[t, s], is_last=True)
                assert label == (schedule.group(s, int(slots.b_chunk[t, s])), slots.b_micro[t, s])
                if slots.b_gradient[t, s] >= 0:
                    assert slots.head_out[t, s] == -1
                    gradient = g.read(s, slots.b_gradient[t, s], is_last=True)
                elif slots.head_out[t, s] >= 0:
                    gradient = h.read(s, slots.head_out[t, s], is_last=True)
                else:
                    (gradient,) = heads.values()
                assert gradient == label, "the gradient of another output"
                done.append(("B", *label))
                if (before := schedule.before(*label)) >= 0:
                    made[s] = (before, label[1])
                if slots.w_in[t, s] >= 0:
                    r.store(s, slots.w_in[t, s], label)
            if slots.w_out[t, s] >= 0:
                label = r.read(s, slots.w_out[t, s], is_last=True)
                assert label[0] == schedule.group(s, int(slots.w_chunk[t, s]))
                done.append(("W", *label))
        for s in range(p):
            for hop, slot in by_hop(schedule.hops, slots.arrives, t, s):
                x.store(s, slot, sent[(s - hop) % p])
    return done, (x, g, h, r)


def assert_slots_execute(schedule):
    """Every work is done once on the right arrays, in as few slots as arrays are needed at once."""
    slots = plan_slots(schedule)
    done, buffers = execute(schedule, slots)
    assert sorted(done) == sorted(schedule.when)
    sizes = (slots.num_inputs, slots.num_gradients, slots.num_heads, slots.num_deferred)
    assert sizes == tuple(max(buffer.most) for buffer in buffers)
    assert tuple(buffers[0].most) == schedule.kept()
    assert slots.num_inputs == max(schedule.kept())
    assert not any(buffer.needed[s] for buffer in buffers for s in range(schedule.stages))
    tick_of = schedule.when
    for names, key in (("enters", "F"), ("returns", "B")):
        wanted = np.full((schedule.num_hops, len(schedule.ticks)), -1)
        for micro in range(schedule.micro_batches):
            first = schedule.path(micro)[0]
            if (key, first, micro) in tick_of:
                wanted[first, tick_of[key, first, micro]] = micro
        np.testing.assert_array_equal(getattr(slots, names), wanted)
    return slots


@st.composite
def tables(draw):
    """Name, stages, chunks and micro-batches of a table of the library."""
    name = draw(st.sampled_from(["interleaved", "deferred", "gpipe", "forward"]))
    stages = draw(st.integers(1, 8))
    chunks = 1 if name == "gpipe" else draw(st.integers(1, 4))
    if name in ("interleaved", "deferred") and chunks > 1:
        return name, stages, chunks, stages * draw(st.integers(1, 64 // stages))
    return name, stages, chunks, draw(st.integers(1, 64))


def build(name, stages, chunks, micro_batches):
    """A table of the library."""
    if name == "forward":
        return forward_schedule(stages, chunks, micro_batches)
    when = "deferred" if name == "deferred" else "at_once"
    interleaved = InterleavedConfig(chunks=chunks, weight_gradients=when)
    config = GPipeConfig() if name == "gpipe" else interleaved
    return config.schedule(stages, micro_batches)


def random_table(stages, chunks, micro_batches, seed, *, has_deferred):
    """A table in which each stage does any work that it can, or waits."""
    rng = random.Random(seed)
    last = stages * chunks - 1
    ready = {("F", 0, micro) for micro in range(micro_batches)}
    times, tick = {}, 0
    while ready:
        after = set()
        for kind in "FBW" if has_deferred else "FB":
            for stage in range(stages):
                own = sorted(
                    work for work in ready if work[0] == kind and work[1] % stages == stage
                )
                if not own or rng.random() < 0.3:
                    continue
                _, group, micro = work = rng.choice(own)
                ready.remove(work)
                times[kind, stage, group // stages, micro] = tick
                if kind == "W":
                    continue
                if kind == "B":
                    if has_deferred:
                        ready.add(("W", group, micro))  # may be in the same tick
                    after |= {("B", group - 1, micro)} if group else set()
                elif group < last:
                    after.add(("F", group + 1, micro))
                else:
                    ready.add(("B", last, micro))  # may be in the same tick
        ready |= after
        tick += 1
    return from_times("random", stages, chunks, micro_batches, times)


@settings(max_examples=50)
@given(tables())
def test_every_table_reads_the_right_slots_and_the_fewest(table):
    name, stages, chunks, micro_batches = table
    slots = assert_slots_execute(build(*table))
    assert slots.num_heads == (micro_batches if name == "gpipe" else 0)
    assert slots.num_gradients == (name != "forward" and stages * chunks > 1)


@settings(max_examples=40)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(0, 10**6), st.booleans()
)
def test_irregular_tables_read_the_right_slots_and_the_fewest(
    stages, chunks, micro_batches, seed, has_deferred
):
    table = random_table(stages, chunks, micro_batches, seed, has_deferred=has_deferred)
    assert_slots_execute(table)


def test_arrays_are_int32_by_tick_and_stage():
    schedule = GPipeConfig().schedule(2, 3)
    slots = plan_slots(schedule)
    ticks = len(schedule.ticks)
    assert slots.f_chunk.dtype == slots.enters[0].dtype == np.int32
    assert slots.f_chunk.shape == slots.enter_slot[0].shape == (ticks, 2)
    for (field,) in (slots.enters, slots.leaves, slots.returns):
        assert field.shape == (ticks,)


def test_slots_of_two_stages():
    """Literal rows of a small step: arrivals at the end of F, gradients a tick after B."""
    slots = plan_slots(InterleavedConfig().schedule(2, 3))
    assert slots.f_micro.T.tolist() == [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
    assert slots.b_micro.T.tolist() == [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
    assert slots.f_input.T.tolist() == [[0, 1, 2, -1, -1], [-1, 0, 0, 0, -1]]
    assert slots.b_input.T.tolist() == [[-1, -1, 0, 1, 2], [-1, 0, 0, 0, -1]]
    assert slots.arrives[0].T.tolist() == [[-1] * 5, [0, 0, 0, -1, -1]]
    assert slots.g_arrives[0].T.tolist() == [[-1, -1, 0, 0, 0], [-1] * 5]
    assert slots.b_gradient.T.tolist() == [[-1, -1, 0, 0, 0], [-1] * 5]
    assert slots.enter_slot[0].T.tolist() == [[0, 1, 2, -1, -1], [-1] * 5]
    assert slots.enters[0].tolist() == [0, 1, 2, -1, -1]
    assert slots.leaves[0].tolist() == [-1, 0, 1, 2, -1]
    assert slots.returns[0].tolist() == [-1, -1, 0, 1, 2]
    for unused in (*slots.head_in, slots.head_out):
        assert (unused == -1).all()
