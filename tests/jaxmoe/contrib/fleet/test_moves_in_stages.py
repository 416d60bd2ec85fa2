# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Migration, hand-over and swap at every place of a page change no token and lose no request."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmoe.contrib.fleet.dispatch import Move
from jaxmoe.contrib.fleet.migration import Migration
from jaxmoe.serve import BATCHING, Facts, Instance, Plan, Request, Result, Sampling
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.plan import Eviction, PromptPiece
from jaxmoe.serve.requests import PromptScore
from tests.support.fleets import Rig, ScriptedConfig
from tests.support.page_executor import answer

FACTS = Facts(num_pages=14, page_size=4, max_running=4, max_length=40)
AHEAD = dataclasses.replace(FACTS, steps_ahead=1)
REQUESTS = [
    (0.0, Request(id=id_, prompt=tuple(range(id_, id_ + 6)), sampling=Sampling(max_tokens=17)))
    for id_ in range(2)
]
PLACES = range(2, 14)  # ticks: computed tokens are 6, 7, ..., 17 of pages of 4


def migrating(at: float = 3.0, **options) -> Rig:
    return Rig(FACTS, ScriptedConfig(moves={float(at): Move(0, 0, 1)}), **options)


def check_tokens(rig, requests=REQUESTS):
    assert rig.streams.tokens == {one.id: answer(one, 40) for _, one in requests}
    assert {end.reason for end in rig.streams.ends.values()} == {"length"}


@pytest.mark.parametrize("at", PLACES)
def test_a_move_waits_for_the_steps_that_are_under_way(at):
    """Where a step starts before the one before is known: then the sequence is in two of them."""
    rig = Rig(AHEAD, ScriptedConfig(moves={float(at): Move(0, 0, 1)})).serve(REQUESTS)
    check_tokens(rig)
    assert (rig.fleet.num_moves, rig.fleet.num_aborted) == (1, 0)
    assert rig.fleet.most_paused <= 1
    given = [(0.0, Request(id=0, prompt=tuple(range(at)), sampling=Sampling(max_tokens=9)))]
    rig = Rig(AHEAD, ScriptedConfig(decode=1)).serve(given)
    check_tokens(rig, given)
    assert {number for number, plan in rig.plans if plan.singles} == {1}


def test_a_move_waits_for_the_scores_and_states_of_a_prompt():
    """A piece of the prompt is under way, whose tokens are counted as computed."""
    source, target = Instance(AHEAD), Instance(AHEAD)
    sampling = Sampling(num_prompt_logprobs=0, pooling="mean")
    source.submit(Request(id=0, prompt=tuple(range(10)), sampling=sampling), 0.0)
    (step,) = source.start(Plan(admit=(0,), pieces=(PromptPiece(0, 4),)), 0.0)
    migration = Migration(Move(0, 0, 1), source, target, is_live=True)

    def advance():
        for _ in range(3):
            if migration.advance() is not None:
                migration.note_copy()

    advance()
    assert not migration.is_over and not source.view(0.0).running
    scores = [PromptScore(-1.0 - rank, rank) for rank in range(1, 5)]
    states = np.arange(8.0).reshape(4, 2)
    source.apply(step, {0: Result(-1, prompt=tuple(scores), states=states)}, 1.0)
    advance()
    assert migration.has_landed and target.queues.running[0].scores == scores
    assert target.queues.running[0].state_sum.tolist() == [12.0, 16.0]


@pytest.mark.parametrize("at", PLACES)
def test_migration_at_every_place_of_a_page_changes_no_token(at):
    rig, decoded = migrating(at), []

    def watch(rig):
        one = rig.fleet.instances[0].queues.sequences.get(0)
        if one is not None and rig.now >= at:
            decoded.append((one.state, one.computed))

    rig.serve(REQUESTS, watch)
    check_tokens(rig)
    source, target = rig.fleet.instances
    assert source.queues.moved_away == target.queues.submitted == 1
    # The source went on while full pages were copied, then it waited for at most one page.
    assert decoded[0][1] < decoded[-1][1] or decoded[0][1] % 4 == 0
    assert rig.fleet.most_paused <= 1
    assert [state for state, _ in decoded].count("moving") <= 1
    # Each page travels once.
    assert rig.fleet.pages_copied == [num_pages(decoded[-1][1], 4), 0]
    assert rig.workers[0].num_read == sum(rig.fleet.pages_copied)
    assert (rig.fleet.num_moves, rig.fleet.num_aborted) == (1, 0)


def end_of(kind, rig):
    """End the move of request 0 in one of the ways."""
    if kind == "abort":
        rig.fleet.abort(0)
    elif kind == "cancel":
        rig.streams.add(rig.fleet.cancel(0))
    elif kind == "target fails":
        rig.flying = [one for one in rig.flying if one[0] != 1]
        rig.workers[1].reset()
        rig.streams.add(rig.fleet.fail(1, "lost"))
    elif kind == "source fails":
        rig.flying = [one for one in rig.flying if one[0] != 0]
        rig.workers[0].reset()
        rig.streams.add(rig.fleet.fail(0, "lost"))


@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("kind", ["abort", "cancel", "target fails", "source fails"])
@pytest.mark.parametrize("stage", range(3))
def test_a_move_that_ends_at_any_stage_loses_nothing(kind, stage, is_in_flight):
    """Full pages are copied, the rest is copied, it has landed; within a copy or after it."""
    rig, states = migrating(8), []

    def end(rig):
        if rig.now == 9 + stage:
            states.append([len(one.queues.moving) for one in rig.fleet.instances])
            assert bool(rig.fleet._moves) == (stage < 2)
            end_of(kind, rig)

    rig.serve(REQUESTS, **{"before" if is_in_flight else "between": end})
    assert states == [[stage == 1, 0]]
    landed = stage == 2
    ends = {
        "abort": ("length", "length"),
        "cancel": ("cancelled", "length"),
        "target fails": ("error" if landed else "length", "length"),
        "source fails": ("length" if landed else "error", "error"),
    }
    assert {id_: end.reason for id_, end in rig.streams.ends.items()} == dict(enumerate(ends[kind]))
    assert rig.fleet.num_aborted == rig.fleet.num_moves - landed == 1 - landed
    assert rig.fleet.instances[0].queues.moved_away == landed
    for id_, tokens in rig.streams.tokens.items():
        whole = answer(REQUESTS[id_][1], 40)
        assert tokens == whole[: len(tokens)]
        assert tokens == whole or rig.streams.ends[id_].reason != "length"


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_a_sequence_that_is_evicted_while_it_moves_stays(at, kind):
    """Also without a move, a swap at every place changes no token."""
    rig = migrating(at - 1)
    plan, evicted = rig.fleet._policies[0], []

    def evicting(view):
        if view.now == at and any(one.id == 0 for one in view.running):
            evicted.append(0)
            return Plan(evict=(Eviction(0, kind),))
        return plan(view)

    rig.fleet._policies = (evicting, rig.fleet._policies[1])
    rig.serve(REQUESTS)
    check_tokens(rig)
    assert rig.fleet.instances[0].num_preempted == len(evicted)
    assert rig.fleet.num_aborted == (1 if evicted else 0)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hand_over_after_the_first_token_copies_each_page_once(length):
    request = Request(id=0, prompt=tuple(range(length)), sampling=Sampling(max_tokens=9))
    rig = Rig(FACTS, ScriptedConfig(decode=1)).serve([(0.0, request)])
    check_tokens(rig, [(0.0, request)])
    assert rig.fleet.pages_copied == [num_pages(length, 4), 0]
    singles = [number for number, plan in rig.plans if plan.singles]
    pieces = [number for number, plan in rig.plans if plan.pieces]
    assert set(singles) == {1} and set(pieces) <= {0}


def test_a_prompt_that_is_read_whole_is_handed_over_behind_its_last_piece():
    """Its pieces have results of their own, which are no first token."""
    sampling = Sampling(max_tokens=9, num_prompt_logprobs=0)
    request = Request(id=0, prompt=tuple(range(16)), sampling=sampling)
    batching = BATCHING["split_fuse"](budget=4)
    rig = Rig(FACTS, ScriptedConfig(decode=1), policy=batching).serve([(0.0, request)])
    check_tokens(rig, [(0.0, request)])
    assert [number for number, plan in rig.plans if plan.pieces] == [0] * 4


def test_hand_overs_wait_for_a_place_and_pages():
    facts = Facts(num_pages=8, page_size=4, max_running=2, max_length=32)
    given = [
        (
            float(id_ // 2),
            Request(id=id_, prompt=tuple(range(id_, id_ + 5)), sampling=Sampling(max_tokens=9)),
        )
        for id_ in range(6)
    ]
    rig = Rig(facts, ScriptedConfig(decode=1)).serve(given)
    check_tokens(rig, given)
    assert rig.fleet.num_moves == 6 and rig.fleet.num_aborted == 0


def test_pages_that_the_target_has_do_not_travel():
    before = Request(id=5, prompt=tuple(range(12)), sampling=Sampling(max_tokens=1))
    rig = migrating(9)
    rig.streams.add(rig.fleet.instances[1].submit(before, 0.0))
    request = Request(id=0, prompt=(*range(12), 5, 6), sampling=Sampling(max_tokens=12))
    rig.submit(request)
    while rig.is_busy or rig.flying:
        rig.tick()
    assert rig.streams.tokens[0] == answer(request, 40)
    assert rig.fleet.instances[0].queues.moved_away == 1
    # 3 of its pages hold the same 12 tokens at the target.
    computed = 14 + 9
    assert 0 < rig.fleet.pages_copied[0] <= num_pages(computed, 4) - 3


def test_a_target_without_room_ends_a_live_move():
    facts = Facts(num_pages=14, page_size=4, max_running=1, max_length=40)
    rig = Rig(facts, ScriptedConfig(moves={4.0: Move(0, 0, 1)}))
    busy = Request(id=1, prompt=(1, 2), sampling=Sampling(max_tokens=20))
    rig.streams.add(rig.fleet.instances[1].submit(busy, 0.0))
    request = REQUESTS[0][1]
    rig.submit(request)
    while rig.is_busy or rig.flying:
        rig.tick()
    assert rig.streams.tokens == {0: answer(request, 40), 1: answer(busy, 40)}
    assert rig.fleet.num_aborted == 1 and rig.fleet.instances[0].queues.moved_away == 0


@pytest.mark.parametrize("policy", ["split_fuse", "prefill_first"])
def test_a_prompt_that_is_half_computed_moves(policy):
    facts = Facts(num_pages=14, page_size=4, max_running=4, max_length=40)
    fields = {"budget": 3} if policy == "split_fuse" else {}
    rig = Rig(facts, ScriptedConfig(moves={2.0: Move(0, 0, 1)}), policy=BATCHING[policy](**fields))
    request = Request(id=0, prompt=tuple(range(20)), sampling=Sampling(max_tokens=5))
    rig.serve([(0.0, request)])
    check_tokens(rig, [(0.0, request)])
    assert rig.fleet.instances[0].queues.moved_away == 1


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_random_moves_ends_and_cancels_lose_nothing(seed, steps_ahead):
    rng = np.random.default_rng(seed)
    facts = Facts(num_pages=16, page_size=4, max_running=3, max_length=40, steps_ahead=steps_ahead)
    given = [
        (
            float(rng.integers(12)),
            Request(
                id=id_,
                prompt=tuple(rng.integers(3, size=rng.integers(1, 14)).tolist()),
                sampling=Sampling(max_tokens=int(rng.integers(1, 25))),
            ),
        )
        for id_ in range(14)
    ]
    rig = Rig(facts, ScriptedConfig(decode=1 if seed % 3 == 0 else None), 3)

    def disturb(rig):
        places = [
            (id_, number)
            for number, instance in enumerate(rig.fleet.instances)
            for id_, one in instance.queues.sequences.items()
            if one.state in ("waiting", "running")
        ]
        if places and rng.random() < 0.7:
            id_, source = places[rng.integers(len(places))]
            target = (source + int(rng.integers(1, 3))) % 3
            rig.fleet.move(Move(id_, source, target), is_live=bool(rng.random() < 0.7))
        if rig.fleet._moves and rng.random() < 0.2:
            rig.fleet.abort(next(iter(rig.fleet._moves)))
        if rng.random() < 0.03:
            rig.streams.add(rig.fleet.cancel(int(rng.integers(14))))

    rig.serve(given, between=disturb, before=lambda rig: disturb(rig) if seed % 2 else None)
    assert rig.fleet.num_moves > rig.fleet.num_aborted > 0
    assert rig.fleet.most_paused <= 1
    for _, request in given:
        whole, end = answer(request, 40), rig.streams.ends[request.id]
        found = rig.streams.tokens.get(request.id, [])
        assert found == whole or end.reason == "cancelled" and found == whole[: len(found)]
