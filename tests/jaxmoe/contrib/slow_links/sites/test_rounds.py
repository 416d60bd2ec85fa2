# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of rounds, on a board in memory and a clock that only tests move."""

import functools

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmoe.contrib.slow_links.sites.errors import LeftOutError, QuorumError, StoppedError
from jaxmoe.contrib.slow_links.sites.frames import Kind, encode_numbers
from jaxmoe.contrib.slow_links.sites.rounds import Rounds
from jaxmoe.contrib.slow_links.sites.rules import confirmed_members, majority
from jaxmoe.contrib.slow_links.sites.transport import Closing
from tests.support.sites import Board, BoardTransport, SteppedClock, in_threads, rules


class Scene:
    """Site 0 of four, which runs, and the others, which do what the clock says."""

    def __init__(self, **changes):
        self.board, self.clock = Board(), SteppedClock()
        self.transport = BoardTransport(self.board, 0)
        self.rounds = Rounds(0, self.transport, rules(**changes), self.clock)
        assert self.rounds.start() is None

    def post(self, seconds, members, kind, payload=b"", number=0):
        for member in members:
            given = payload if isinstance(payload, bytes) else payload[member]
            self.clock.at(seconds, functools.partial(self.board.post, member, number, kind, given))


ALL = encode_numbers((0, 1, 2, 3))


def test_a_round_ends_at_once_when_all_have_posted():
    scene = Scene()
    scene.post(1, (1, 2, 3), Kind.UPDATE, b"update")
    scene.post(2, (1, 2, 3), Kind.RECEIPT, ALL)
    scene.post(3, (1, 2, 3), Kind.FINGERPRINT, b"same")
    found = scene.rounds.exchange(b"mine")
    assert (found.number, found.members) == (0, (0, 1, 2, 3))
    assert found.payloads == {0: b"mine", 1: b"update", 2: b"update", 3: b"update"}
    agreement = scene.rounds.agree(b"same")
    assert agreement.is_same and not agreement.sends_state and agreement.majority == found.members
    assert scene.clock.now() == 3 and scene.rounds.number == 1
    assert scene.transport.forgotten == 0


def test_who_is_missing_after_the_grace_is_out_and_the_rest_go_on():
    scene = Scene()
    scene.post(4, (1, 2), Kind.UPDATE, b"update")
    scene.post(20, (1, 2), Kind.RECEIPT, encode_numbers((0, 1, 2)))
    scene.post(20, (1, 2), Kind.FINGERPRINT, b"same")
    found = scene.rounds.exchange(b"mine")
    assert found.members == (0, 1, 2) and set(found.payloads) == {0, 1, 2}
    assert scene.clock.now() == 20
    assert scene.board.closings.find(0, Kind.UPDATE) == Closing(members=(0, 1, 2))
    scene.rounds.agree(b"same")
    assert scene.rounds.members == (0, 1, 2)
    assert scene.clock.now() == 20, "sites that are out are not waited for again"


def test_without_a_quorum_no_round_closes():
    scene = Scene()
    scene.post(1, (1,), Kind.UPDATE)
    with pytest.raises(QuorumError, match=r"round 0 has 2 of at least 3 sites \(0, 1\) after"):
        scene.rounds.exchange(b"mine")
    assert scene.clock.now() == 100
    assert scene.board.closings.find(0, Kind.UPDATE) is None


def test_a_late_quorum_closes_the_round_at_once():
    scene = Scene()
    scene.post(50, (1, 2), Kind.UPDATE)
    scene.post(51, (1, 2), Kind.RECEIPT, encode_numbers((0, 1, 2)))
    assert scene.rounds.exchange(b"mine").members == (0, 1, 2)
    assert scene.board.closings.find(0, Kind.UPDATE) == Closing(members=(0, 1, 2))


def test_an_site_that_comes_too_late_is_left_out():
    scene = Scene()
    scene.board.closings.decide(0, Kind.UPDATE, Closing(members=(1, 2, 3)))
    with pytest.raises(LeftOutError, match="round 0 closed with sites 1, 2, 3, without 0"):
        scene.rounds.exchange(b"mine")


def test_an_site_that_missed_the_end_of_a_round_is_left_out():
    scene = Scene()
    scene.board.closings.decide(0, Kind.FINGERPRINT, Closing(members=(1, 2, 3), majority=(1, 2, 3)))
    with pytest.raises(LeftOutError, match="round 0 ended without site 0"):
        scene.rounds.exchange(b"mine")


def test_an_update_that_one_cannot_read_is_left_out_of_the_round():
    """Site 0 does not get the update of 3 and says so; the others have all."""
    scene = Scene()
    scene.board.hidden.add((0, 3))
    scene.post(0, (1, 2, 3), Kind.UPDATE, b"update")
    scene.post(1, (1, 2, 3), Kind.RECEIPT, ALL)
    whole = Closing(members=(0, 1, 2, 3))
    scene.clock.at(1, lambda: scene.board.closings.decide(0, Kind.UPDATE, whole))
    scene.clock.sleep(1)
    found = scene.rounds.exchange(b"mine")
    assert found.members == (0, 1, 2) == tuple(found.payloads)
    assert scene.clock.now() == 1 + 5, "half of the grace"


def test_an_site_that_dies_before_it_confirms_is_left_out():
    scene = Scene()
    scene.post(1, (1, 2, 3), Kind.UPDATE, b"update")
    scene.post(1, (1, 2), Kind.RECEIPT, ALL)
    assert scene.rounds.exchange(b"mine").members == (0, 1, 2)
    assert scene.clock.now() == 1 + 10


def test_no_site_confirms_what_it_does_not_hold():
    """The receipts decide alike for all: each member of the round holds all updates."""
    board = Board()
    board.hidden |= {(0, 1), (3, 1)}
    limits = rules(grace=0.6, poll=0.01, quorum=2)
    sites = [Rounds(m, BoardTransport(board, m), limits) for m in range(4)]

    def run(site):
        site.start()
        return site.exchange(b"%d" % site.member)

    found = in_threads(functools.partial(run, site) for site in sites)
    assert isinstance(found[1], LeftOutError)
    wanted = {m: b"%d" % m for m in (0, 2, 3)}
    assert [found[m].payloads for m in (0, 2, 3)] == [wanted] * 3


@pytest.mark.parametrize(
    ("held", "members"),
    [
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}, (0, 1, 2)),
        ({0: (0, 1, 2), 1: (0, 1, 2)}, (0, 1)),
        ({0: (0, 1), 1: (0, 1, 2), 2: (0, 1, 2)}, (0, 1)),
        # Site 3 reads only its own: it is the one with the bad connection.
        ({0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 1, 2, 3), 3: (3,)}, (0, 1, 2)),
    ],
)
def test_members_of_a_round_by_receipts(held, members):
    assert confirmed_members({m: encode_numbers(numbers) for m, numbers in held.items()}) == members


def test_a_damaged_receipt_is_none():
    assert confirmed_members({0: encode_numbers((0, 1)), 1: b"\0\0\0\x09"}) == (0,)


@pytest.mark.parametrize(
    ("prints", "members"),
    [("aaaa", (0, 1, 2, 3)), ("abaa", (0, 2, 3)), ("baab", (0, 3)), ("abbc", (1, 2))],
)
def test_the_majority_of_fingerprints(prints, members):
    assert majority({m: text.encode() for m, text in enumerate(prints)}) == members


def test_the_minority_fetches_the_state_of_the_majority():
    board = Board()
    limits = rules(grace=5.0, poll=0.005)
    sites = [Rounds(m, BoardTransport(board, m), limits) for m in range(4)]

    def run(site):
        state = b"wrong" if site.member == 0 else b"right"
        site.start()
        site.exchange(b"")
        agreement = site.agree(state)
        assert agreement.majority == (1, 2, 3) and agreement.is_same == (state == b"right")
        assert agreement.sends_state == (site.member == 1)
        if agreement.sends_state:
            site.post_state(state)
        return state if agreement.is_same else site.fetch_state()

    assert in_threads(functools.partial(run, site) for site in sites) == [b"right"] * 4


def test_another_site_posts_the_state_when_the_one_that_should_is_gone():
    """Site 0 is the second of the majority; 3 waits for the state, and 1 and 2 are dead."""
    scene = Scene()
    scene.board.post(1, 0, Kind.UPDATE)
    ended = Closing(members=(0, 2), majority=(2, 0), joined=(3,))
    scene.post(0, (1, 2, 3), Kind.UPDATE)
    scene.post(0, (1, 2, 3), Kind.RECEIPT, ALL)
    scene.clock.sleep(1)
    scene.rounds.exchange(b"mine")
    scene.board.closings.decide(0, Kind.FINGERPRINT, ended)
    scene.rounds.agree(b"same")
    asked = []
    with pytest.raises(QuorumError):
        scene.rounds.exchange(b"mine", lambda: asked.append(scene.clock.now()) or b"state")
    assert asked == [1 + 10], "once, after the grace"
    assert scene.board.seen_by(3, 0, Kind.STATE) == {0: b"state"}


def test_sites_that_wait_to_join_count_for_the_quorum():
    """Three of four were started again; the one that is left takes them in."""
    scene = Scene()
    scene.post(3, (1, 2), Kind.JOIN)
    assert scene.rounds.exchange(b"mine").members == (0,)
    agreement = scene.rounds.agree(b"same")
    assert agreement.joined == (1, 2) and agreement.sends_state
    assert scene.rounds.members == (0, 1, 2) and scene.clock.now() == 10, "one grace"


def test_a_joiner_is_admitted_at_the_next_round_with_its_state():
    board = Board()
    limits = rules(founders=3, quorum=2, grace=5.0, poll=0.005)
    sites = [Rounds(m, BoardTransport(board, m), limits) for m in range(4)]
    first = {}

    def run(site):
        state = site.start()
        first[site.member] = (site.number, site.members)
        state = state or b"0"
        while site.number < 60:
            found = site.exchange(b"%d" % site.member)
            state = b"%d" % (int(state) + sum(map(int, found.payloads.values())))
            agreement = site.agree(state)
            assert agreement.is_same and site.number == found.number + 1
            if agreement.sends_state:
                site.post_state(state)
        return state, found

    ends = in_threads(functools.partial(run, site) for site in sites)
    assert [number for number, _ in first.values()].count(0) == 3 and first[3][0] > 0
    assert first[3][1] == (0, 1, 2, 3)
    assert len({state for state, _ in ends}) == 1
    assert ends[0][1].members == (0, 1, 2, 3)


def test_a_joiner_that_is_not_admitted_gives_up_in_time():
    scene = Scene()
    scene.board.closings.decide(0, Kind.FINGERPRINT, Closing(members=(1, 2, 3), majority=(1, 2, 3)))
    late = Rounds(7, BoardTransport(scene.board, 7), rules(), scene.clock)
    with pytest.raises(QuorumError, match="site 7 was not admitted within 100 s"):
        late.start()
    assert scene.board.seen_by(0, 1, Kind.JOIN) == {7: b""}


def test_an_site_with_the_state_of_the_newest_round_goes_on_without_joining():
    """It ended after a round and resumes from a checkpoint of its end, or is too old to do so."""
    scene = Scene()
    ended = Closing(members=(0, 1, 2), majority=(0, 1), joined=(3,))
    scene.board.closings.decide(4, Kind.FINGERPRINT, ended)
    for member, goes_on in enumerate((True, True, False, False)):
        site = Rounds(member, BoardTransport(scene.board, member), rules(), SteppedClock())
        if goes_on:
            assert site.start(5) is None and site.members == (0, 1, 2, 3)
        else:
            with pytest.raises(QuorumError, match="was not admitted"):
                site.start(5)
    resumed = Rounds(2, BoardTransport(scene.board, 2), rules(), SteppedClock())
    assert resumed.start(9) is None, "all sites resume later than the board knows"
    assert (resumed.number, resumed.members) == (9, (0, 1, 2, 3))


def test_calls_out_of_turn_are_refused():
    scene = Scene()
    with pytest.raises(RuntimeError, match="exchange and agree take turns"):
        scene.rounds.agree(b"")
    with pytest.raises(RuntimeError, match="fetch_state comes after agree"):
        scene.rounds.fetch_state()
    with pytest.raises(RuntimeError, match="start comes before"):
        Rounds(1, scene.transport, rules()).exchange(b"")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.integers(1, 4), st.lists(st.integers(0, 30) | st.none(), min_size=3, max_size=3)
)
def test_when_a_round_closes(quorum, delays):
    """At the time of the last post, at the grace, or when the quorum is reached after it."""
    scene = Scene(quorum=quorum)
    for member, delay in enumerate(delays, 1):
        if delay is not None:
            scene.post(max(delay, 1), (member,), Kind.UPDATE)
    times = sorted([0, *(max(delay, 1) for delay in delays if delay is not None)])
    try:
        scene.rounds.exchange(b"")
    except QuorumError:
        pass  # there are no receipts
    closing = scene.board.closings.find(0, Kind.UPDATE)
    if len(times) < quorum:
        assert closing is None
        return
    closes = max(min(10, times[-1] if len(times) == 4 else 10), times[quorum - 1])
    posted = [m for m, d in enumerate([0, *delays]) if d is not None and d <= closes]
    assert closing == Closing(members=tuple(posted))


@pytest.mark.parametrize("waits", ["exchange", "agree", "join", "fetch_state"])
def test_an_site_that_is_to_stop_ends_each_wait(waits):
    """Within a look at the board, long before the timeout."""
    scene = Scene()
    asked = []

    def check():
        if asked:
            raise StoppedError("asked to stop")

    site = Rounds(0, scene.transport, rules(), scene.clock, check)
    site.start()
    if waits in ("agree", "fetch_state"):
        scene.post(0, (1, 2, 3), Kind.UPDATE, b"update")
        scene.post(0, (1, 2, 3), Kind.RECEIPT, ALL)
        site.exchange(b"mine")
    if waits == "fetch_state":
        scene.post(0, (1, 2, 3), Kind.FINGERPRINT, b"theirs")
        site.agree(b"mine")
    arguments = {"exchange": (b"mine",), "agree": (b"mine",)}.get(waits, ())
    began = scene.clock.now()
    scene.clock.at(began + 3, lambda: asked.append(True))
    with pytest.raises(StoppedError, match="asked to stop"):
        getattr(site, waits)(*arguments)
    assert scene.clock.now() <= began + 4
