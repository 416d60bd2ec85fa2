# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each retention policy has its defining property, and changes nothing that is computed."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmoe.contrib.serving_lab.simulation import Simulation
from jaxmoe.serve import BATCHING
from jaxmoe.serve.blocks import BlockPool, HostCopies
from jaxmoe.serve.policies.retention import RETENTION, SwapGroupsConfig
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
    simulation = Simulation(given, facts, config, COST, retention=retention, keeps_sequences=True)
    return given, simulation.run()


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
    kept = SwapGroupsConfig()
    simulation = Simulation(given, TIGHT, config, COST, retention=kept, keeps_plans=True).run()
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


@pytest.mark.parametrize("group", [2, 8])
def test_groups_are_there_again_after_every_page_was_used(group):
    pool = BlockPool(32, 4, group=group)

    def serve(order, count):
        pages = taken(pool, count)
        for number, page in enumerate(pages):
            pool.name(page, bytes([order, number]))
        return pages

    tables = [serve(order, 16) for order in range(2)]
    assert pool.take(1) is None
    for table in tables:
        pool.give(table)
    pool.check([])
    for order in range(2, 12):
        pages = serve(order, 16)
        assert Swap(id=0, pages=tuple(pages), num_tokens=64).num_runs <= 16 // group
        # The other half of the pool keeps its chain: groups are evicted in the order of use.
        kept = [bytes([order - 1, number]) for number in range(16)]
        assert len(pool.find(kept)) == 16
        pool.check([pages])
        pool.give(pages)
        pool.check([])


def test_a_group_of_blank_pages_goes_before_one_whose_names_are_kept():
    pool = BlockPool(8, 4, group=4)
    first, second = taken(pool, 4), taken(pool, 4)
    for page in first:
        pool.name(page, bytes([page]))
    pool.give(second)
    pool.give(first)
    assert taken(pool, 2) == [4, 5]
    # The group that was begun goes on, and the pages of the other one keep their names.
    assert taken(pool, 2, 5) == [6, 7] and pool.find([b"\0", b"\1", b"\2"]) == (0, 1, 2)
    pool.share([1])
    assert taken(pool, 3, 7) == [3, 2, 0]  # a part of a group: the least recently used page
    pool.check([second, [1], [3, 2, 0]])


def test_the_groups_of_a_pool_that_forgets_are_blank():
    pool = BlockPool(9, 4, group=4)
    pages = taken(pool, 9)
    for page in pages:
        pool.name(page, bytes([page]))
    pool.give(pages)
    pool.demote([bytes([page]) for page in range(4)])
    assert taken(pool, 4) == [0, 1, 2, 3]
    pool.give([0, 1, 2, 3])
    pool.forget()
    pool.check([])
    assert taken(pool, 8)[:4] == [0, 1, 2, 3] and taken(pool, 1) == [8]


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
