# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each retention policy has its defining property, and changes nothing that is computed."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmoe.serve import BATCHING
from jaxmoe.serve.blocks import BlockPool, HostCopies
from jaxmoe.serve.policies.retention import RETENTION, SwapGroupsConfig
from jaxmoe.serve.simulation import Simulation
from jaxmoe.serve.step import Swap
from tests.support.simulated import COST, FACTS, arrivals

TIGHT = dataclasses.replace(FACTS, num_pages=48, max_length=640)


def taken(pool, count, after=None):
    pages = pool.take(count, after)
    assert pages is not None
    return pages


def swapping(retention, facts=TIGHT):
    given = arrivals(rate=4000.0, answer_median=100.0, requests=10)
    config = BATCHING["split_fuse"]()
    return given, Simulation(given, facts, config, COST, retention=retention).run()


@pytest.mark.parametrize("name", RETENTION)
def test_every_request_is_answered_and_all_pages_are_free_again(name):
    given, simulation = swapping(RETENTION[name]())
    (instance,) = simulation.fleet.instances
    assert simulation.num_preempted > 0 and (simulation.num_copies > 0) == (name == "swap_groups")
    instance.check_pages()
    assert instance.pool.num_free == 48
    for one in given:
        written = simulation.sequences[one.request.id].tokens
        assert tuple(written) == one.request.prompt + one.answer


@pytest.mark.parametrize("batching", ["split_fuse", "prefill_first"])
def test_no_request_is_admitted_before_an_earlier_one_that_is_swapped(batching):
    given = arrivals(rate=4000.0, answer_median=100.0, requests=24)
    config, away = BATCHING[batching](), set()
    simulation = Simulation(given, TIGHT, config, COST, retention=SwapGroupsConfig()).run()
    for _, plan in simulation.plans:
        away |= {one.id for one in plan.evict if one.kind == "swap"}
        away -= set(plan.restore)
        assert all(one < min(away, default=one + 1) for one in plan.admit)
    assert simulation.num_copies > 0 and not away


def test_swap_groups_need_fewer_copies_and_fewer_bytes():
    _, grouped = swapping(SwapGroupsConfig())
    _, single = swapping(SwapGroupsConfig(group=1, host=0))
    _, whole = swapping(SwapGroupsConfig(host=0))
    assert grouped.num_preempted == single.num_preempted == whole.num_preempted
    assert grouped.num_copies < single.num_copies
    assert whole.num_copies < single.num_copies and whole.bytes_swapped == single.bytes_swapped
    assert grouped.bytes_swapped < whole.bytes_swapped and grouped.now < single.now


def test_a_sequence_gets_pages_side_by_side_while_there_are_such():
    pool = BlockPool(32, 4, group=8)
    first, second = taken(pool, 3), taken(pool, 2)
    for _ in range(5):
        first += taken(pool, 1, first[-1])
        second += taken(pool, 1, second[-1])
    assert first == list(range(8)) and second == list(range(8, 15))
    assert Swap(id=0, pages=tuple(first + second), num_tokens=60).num_runs == 1
    pool.check([first, second])
    rest = taken(pool, 17)  # when no whole group is left, any page will do
    assert sorted(first + second + rest) == list(range(32)) and pool.take(1) is None


def test_only_the_increment_of_a_copy_that_is_kept_travels():
    host = HostCopies(6)
    chain = [bytes([i]) for i in range(5)]
    assert host.keep(chain[:3]) == (0, ())
    assert host.keep(chain) == (3, ())  # a later turn begins as the one before
    assert host.keep([bytes([9]), *chain[1:]]) == (0, ())  # another beginning: nothing is there
    # The end of a chain is dropped before its beginning, and another chain before both.
    assert host.keep([bytes([8]), bytes([7])]) == (0, (chain[0], chain[4]))
    assert HostCopies(0).keep(chain[:2]) == (0, (chain[1], chain[0]))
    swap = Swap(id=0, pages=(4, 5, 9, 10, 2), num_tokens=80, kept=3)
    assert swap.num_runs == 2


def test_what_is_demoted_is_evicted_first():
    pool = BlockPool(4, 1)
    pages = taken(pool, 4)
    for page in pages:
        pool.name(page, bytes([page]))
    pool.give(pages[:2])
    pool.give(pages[2:])
    pool.demote([bytes([pages[2]]), bytes([pages[3]])])
    assert pool.take(2) == [pages[3], pages[2]]  # the end of the chain before its beginning
    pool.check([[pages[2], pages[3]]])


def test_fields_are_checked():
    with pytest.raises(ValueError, match=r"retention.group=0 must be at least 1"):
        SwapGroupsConfig(group=0)
