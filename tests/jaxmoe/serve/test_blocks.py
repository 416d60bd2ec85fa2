# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The pool of pages beside a shadow model that stores what every page holds."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxmoe.serve.blocks import BlockPool, num_pages, page_names, root_name
from jaxmoe.serve.ledger import PageLedger

SIZE = 2
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Table:
    def __init__(self, owner, tokens, pages, written):
        self.owner, self.tokens, self.pages, self.written = owner, tokens, pages, written
        self.named = written // SIZE

    def chain(self, count):
        """The identity of the first `count` pages: who computed them, and their tokens."""
        return (self.owner, tuple(self.tokens[: count * SIZE]))

    def names(self):
        name, names = root_name(*self.owner), []
        for number in range(len(self.tokens) // SIZE):
            (name,) = page_names(name, self.tokens[number * SIZE : (number + 1) * SIZE], SIZE)
            names.append(name)
        return names


class PoolMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 7), group=st.sampled_from([1, 1, 2, 3]))
    def begin(self, size, group):
        self.pool, self.group = BlockPool(size, SIZE, group), group
        self.tables = []
        self.content = {}  # page: tokens
        self.chains = {}  # chain: its page
        self.free = {"blank": list(range(size)), "cached": []}

    def expect_taken(self, pages):
        for page in pages:
            order = self.free["blank"] or self.free["cached"]
            if self.group == 1:
                assert page == order[0], "I7: the least recently used page is evicted"
            else:  # of groups the order is another
                order = next(free for free in self.free.values() if page in free)
            order.remove(page)
            self.chains = {chain: p for chain, p in self.chains.items() if p != page}
            self.content[page] = []

    def take(self, count):
        before = copy.deepcopy(vars(self.pool))
        taken = self.pool.take(count)
        if taken is None:
            assert count > len(self.free["blank"]) + len(self.free["cached"])
            assert vars(self.pool) == before, "I6: a failed allocation changes nothing"
        else:
            self.expect_taken(taken)
        return taken

    @rule(tokens=tokens_of, owner=st.sampled_from([("", ""), ("a", ""), ("", "a")]))
    def start(self, tokens, owner):
        table = Table(owner, tokens, [], 0)
        hits = self.pool.find(table.names())
        known = 0
        while (known + 1) * SIZE <= len(tokens) and table.chain(known + 1) in self.chains:
            known += 1
        assert hits == tuple(self.chains[table.chain(i + 1)] for i in range(known)), "I5"
        ledger = PageLedger(self.pool)
        ledger.share(hits)
        ledger.take(num_pages(len(tokens), SIZE) - known)
        self.pool.share(hits)
        for page in hits:
            if page in self.free["cached"]:
                self.free["cached"].remove(page)
        taken = self.take(num_pages(len(tokens), SIZE) - known)
        assert (taken is not None) == (ledger.free >= 0)
        if taken is None:
            self.give(list(hits))
            return
        assert ledger.free == self.pool.num_free
        self.tables.append(Table(owner, tokens, [*hits, *taken], known * SIZE))

    def give(self, pages):
        held = [page for table in self.tables for page in table.pages]
        freed = sum(self.pool.references(page) == 1 for page in pages)
        before = self.pool.num_free
        self.pool.give(pages)
        assert self.pool.num_free == before + freed
        for page in reversed(pages):
            if page not in held:
                kind = "cached" if page in self.chains.values() else "blank"
                self.free[kind].append(page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 4))
    def write(self, data, count):
        table = data.draw(st.sampled_from(self.tables))
        names = table.names()
        for _ in range(min(count, len(table.tokens) - table.written)):
            page = table.pages[table.written // SIZE]
            assert self.pool.is_writable(page), "I3: shared and named pages are not written"
            self.content[page].append(table.tokens[table.written])
            table.written += 1
            if table.written % SIZE == 0:
                number = table.written // SIZE
                self.pool.name(page, names[number - 1])
                self.chains.setdefault(table.chain(number), page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data, token):
        table = data.draw(st.sampled_from(self.tables))
        if len(table.tokens) % SIZE == 0:
            taken = self.take(1)
            if taken is None:
                return
            table.pages += taken
        table.tokens = [*table.tokens, token]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table = data.draw(st.sampled_from(self.tables))
        before = copy.deepcopy(vars(self.pool))
        forked = self.pool.fork(table.pages[: num_pages(table.written, SIZE)], table.written)
        if forked is None:
            assert vars(self.pool) == before and table.written % SIZE
            return
        pages, copies = forked
        self.expect_taken(target for _, target in copies)
        for source, target in copies:
            self.content[target] = list(self.content[source])
        self.tables.append(Table(table.owner, table.tokens[: table.written], pages, table.written))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.give(table.pages)

    @rule()
    def forget(self):
        self.pool.forget()
        self.chains = {}
        self.free["blank"] += self.free["cached"]
        self.free["cached"] = []

    @invariant()
    def holds(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(table.pages for table in self.tables)
        for (_, tokens), page in self.chains.items():
            assert tuple(self.content[page]) == tokens[-SIZE:], "I2: a named page holds its chain"
        for table in self.tables:
            held = [token for page in table.pages for token in self.content[page]]
            assert held[: table.written] == table.tokens[: table.written]
        assert self.pool.num_cached == len(self.free["cached"])

    def teardown(self):
        if hasattr(self, "pool"):
            for table in list(self.tables):
                self.tables.remove(table)
                self.give(table.pages)
            assert self.pool.num_free == self.pool.size, "I4: after all have ended all are free"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_adapter_and_salt_cannot_be_mistaken_for_each_other():
    names = {root_name("ab", "c"), root_name("a", "bc"), root_name("abc"), root_name("", "abc")}
    assert len(names) == 4


def test_a_name_depends_on_every_token_before_it():
    root = root_name()
    (first, third), (other, fourth) = (
        page_names(root, [1, 2, 3, 4, 5], 2),
        page_names(root, [2, 1, 3, 4], 2),
    )
    assert third != fourth != page_names(root, [3, 4], 2)[0]
    assert page_names(first, [3, 4], 2) == [third] and page_names(other, [3, 4], 2) == [fourth]


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    pool = BlockPool(3, 1)
    pages = pool.take(3)
    for number, page in enumerate(pages):
        pool.name(page, bytes([number]))
    pool.give(pages)
    assert pool.take(2) == [pages[2], pages[1]]
    assert pool.find([b"\0", b"\1"]) == (pages[0],)


def test_a_page_without_a_name_is_taken_before_a_cached_one():
    pool = BlockPool(2, 1)
    first, second = pool.take(2)
    pool.name(first, b"kept")
    pool.give([first])
    pool.give([second])
    assert pool.take(1) == [second] and pool.find([b"kept"]) == (first,)


def test_a_second_page_with_the_same_contents_stays_private():
    pool = BlockPool(2, 1)
    first, second = pool.take(2)
    pool.name(first, b"n")
    pool.name(second, b"n")
    assert pool.find([b"n"]) == (first,) and pool.is_writable(second)


@pytest.mark.parametrize("size", [(0, 16), (4, 0)])
def test_a_pool_without_pages_is_refused(size):
    with pytest.raises(ValueError, match="must both be positive"):
        BlockPool(*size)


@pytest.mark.parametrize("misuse", ["give", "name"])
def test_a_free_page_is_neither_given_back_nor_named(misuse):
    pool = BlockPool(1, 1)
    with pytest.raises(AssertionError, match="page 0"):
        pool.give([0]) if misuse == "give" else pool.name(0, b"n")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._references.__setitem__(0, 2), "2 references, in 1 tables"),
        (lambda pool: pool._blank.__setitem__(0, None), "blank, cached, used"),
        (lambda pool: pool._names.__setitem__(0, b"x"), "its name belongs to another page"),
        (lambda pool: pool._page_of.__setitem__(b"x", 1), "a name belongs to no page"),
    ],
)
def test_the_check_finds_a_broken_pool(break_it, message):
    pool = BlockPool(2, 1)
    table = pool.take(1)
    pool.check([table])
    break_it(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([table])


def test_a_page_is_written_by_one_table_and_before_it_has_a_name():
    pool = BlockPool(3, SIZE)
    own, shared, named = pool.take(3)
    pool.share([shared])
    pool.name(named, *page_names(root_name(), [0, 1], 2))
    assert [pool.is_writable(page) for page in (own, shared, named)] == [True, False, False]
