# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What every transport does alike: a table, to which a new transport is a row."""

import contextlib
import functools
import random

import pytest

from jaxmoe.contrib.slow_links.sites.coordinator import Coordinator
from jaxmoe.contrib.slow_links.sites.directory import DirectoryTransport
from jaxmoe.contrib.slow_links.sites.errors import LeftOutError
from jaxmoe.contrib.slow_links.sites.frames import Kind
from jaxmoe.contrib.slow_links.sites.rounds import Rounds
from jaxmoe.contrib.slow_links.sites.tcp import TcpTransport
from jaxmoe.contrib.slow_links.sites.transport import Closing
from tests.support.sites import SIZES, Board, BoardTransport, in_threads, rules

KEY = b"secret"


@contextlib.contextmanager
def memory(folder):
    board = Board()
    yield lambda member: BoardTransport(board, member)


@contextlib.contextmanager
def directory(folder):
    yield lambda member: DirectoryTransport(folder / "shared", member, SIZES, KEY)


@contextlib.contextmanager
def tcp(folder):
    with Coordinator("127.0.0.1:0", SIZES, key=KEY) as coordinator, contextlib.ExitStack() as stack:

        def connected(member):
            transport = TcpTransport(coordinator.address, member, SIZES, KEY, patience=5)
            stack.callback(transport.close)
            return transport

        yield connected


TRANSPORTS = {"memory": memory, "directory": directory, "tcp": tcp}


@pytest.fixture(params=TRANSPORTS)
def transport_of(request, tmp_path):
    with TRANSPORTS[request.param](tmp_path) as made:
        yield made


def test_what_is_posted_is_collected_by_all(transport_of):
    one, two = transport_of(1), transport_of(2)
    payload = random.Random(0).randbytes(SIZES.update)
    one.post(0, Kind.UPDATE, payload)
    two.post(0, Kind.UPDATE, b"")
    for transport in (one, two, transport_of(3)):
        for _ in range(2):
            found = transport.collect(0, Kind.UPDATE)
            assert found.payloads == {1: payload, 2: b""} and found.closing is None
        assert transport.collect(1, Kind.UPDATE).payloads == {}
        assert transport.collect(0, Kind.FINGERPRINT).payloads == {}


def test_the_first_message_stands(transport_of):
    transport_of(1).post(0, Kind.UPDATE, b"first")
    transport_of(1).post(0, Kind.UPDATE, b"second")
    assert transport_of(2).collect(0, Kind.UPDATE).payloads == {1: b"first"}


def test_the_first_closing_stands(transport_of):
    one, two = transport_of(1), transport_of(2)
    first = Closing(members=(0, 1), majority=(1,), joined=(3,))
    assert one.decide(0, Kind.FINGERPRINT, first) == first
    assert two.decide(0, Kind.FINGERPRINT, Closing(members=(1, 2))) == first
    assert two.collect(0, Kind.FINGERPRINT).closing == first
    assert two.collect(0, Kind.UPDATE).closing is None
    assert two.collect(9, Kind.JOIN).newest == 0


def test_a_round_that_ended_before_is_not_closed_any_more(transport_of):
    one = transport_of(1)
    one.decide(5, Kind.FINGERPRINT, Closing(members=(0, 1)))
    with pytest.raises(LeftOutError):
        one.decide(4, Kind.UPDATE, Closing(members=(1,)))
    assert one.collect(4, Kind.UPDATE).closing is None
    assert one.collect(4, Kind.UPDATE).newest == 5


def test_sites_that_close_a_round_together_get_one_list(transport_of):
    for number in range(20):
        proposals = [Closing(members=(member,)) for member in range(4)]
        made = [transport_of(member) for member in range(4)]
        decided = in_threads(
            functools.partial(made[member].decide, number, Kind.UPDATE, proposals[member])
            for member in range(4)
        )
        assert len(set(decided)) == 1 and decided[0] in proposals


@pytest.mark.parametrize("transport_of", ["directory", "tcp"], indirect=True)
def test_forgotten_messages_are_gone(transport_of):
    """The board of tests keeps everything, which tests look at."""
    one = transport_of(1)
    for number in range(3):
        one.post(number, Kind.UPDATE, b"%d" % number)
        one.decide(number, Kind.FINGERPRINT, Closing(members=(1,)))
        one.forget(number)
    found = [transport_of(2).collect(number, Kind.UPDATE).payloads for number in range(3)]
    assert found == [{}, {}, {1: b"2"}]


def _run(site, members):
    """Runs until three rounds had these members; returns the last one."""
    state, seen = site.start(), 0
    while seen < 3:
        found = site.exchange(b"%d.%d" % (site.number, site.member))
        state = repr(sorted(found.payloads.items())).encode()[: SIZES.fingerprint]
        agreement = site.agree(state)
        assert agreement.is_same
        if agreement.sends_state:
            site.post_state(state)
        seen += found.members == members
    return found


def test_sites_exchange_and_join_over_every_transport(transport_of):
    limits = rules(founders=3, quorum=2, grace=5.0, poll=0.003, timeout=20.0)
    sites = [Rounds(member, transport_of(member), limits) for member in range(4)]
    ends = in_threads(functools.partial(_run, site, (0, 1, 2, 3)) for site in sites)
    wanted = {member: b"%d.%d" % (ends[0].number, member) for member in range(4)}
    assert [end.payloads for end in ends] == [wanted] * 4
