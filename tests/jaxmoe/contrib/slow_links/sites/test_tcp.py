# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""TCP: hostile peers disturb no site, one coordinator closes rounds, a new one is followed."""

import contextlib
import dataclasses
import functools
import socket
import threading
import time

import pytest

from jaxmoe.contrib.slow_links.sites.coordinator import Coordinator, MemoryClosings, host_and_port
from jaxmoe.contrib.slow_links.sites.directory import DirectoryClosings
from jaxmoe.contrib.slow_links.sites.errors import LeftOutError, StoppedError, TransportError
from jaxmoe.contrib.slow_links.sites.frames import HEADER_BYTES, Frame, Kind, encode, encode_header
from jaxmoe.contrib.slow_links.sites.lease import CoordinatorLease
from jaxmoe.contrib.slow_links.sites.rounds import Rounds
from jaxmoe.contrib.slow_links.sites.tcp import TcpTransport
from jaxmoe.contrib.slow_links.sites.transport import Closing
from tests.support.sites import SIZES, in_threads, rules

KEY = b"secret"
HELLO = Frame(kind=Kind.HELLO, number=0, member=1)


@pytest.fixture
def coordinator():
    with Coordinator("127.0.0.1:0", SIZES, key=KEY, hello=1.0) as made:
        yield made


@contextlib.contextmanager
def _site(coordinator, member, patience=5.0, key=KEY):
    transport = TcpTransport(coordinator.address, member, SIZES, key, patience=patience)
    yield transport
    transport.close()


def _socket(coordinator):
    made = socket.create_connection(host_and_port(coordinator.address), 10)
    made.settimeout(10)
    return made


def _is_dropped(peer):
    """Whether the coordinator ends the connection, reading what it still answers."""
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(1 << 16):
            pass
    return True


def _run(site, last):
    state = site.start() or b""
    while site.number <= last:
        try:
            found = site.exchange(b"%d.%d" % (site.number, site.member))
            state = b"%d" % hash(tuple(sorted(found.payloads.items())))
            agreement = site.agree(state)
        except LeftOutError:
            site.join()
            continue
        assert agreement.is_same
        if agreement.sends_state:
            site.post_state(state)
    return found


HOSTILE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 4096,
    "no key": encode(HELLO),
    "another key": encode(HELLO, b"guess"),
    "a post before HELLO": encode(dataclasses.replace(HELLO, kind=Kind.UPDATE), KEY),
    "HELLO with a payload": encode(dataclasses.replace(HELLO, payload=b"x"), KEY),
    "a cut frame": encode(HELLO, KEY)[:50],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_peer_is_dropped_and_disturbs_no_site(what, coordinator):
    ended = threading.Event()

    def attack():
        dropped = 0
        while not ended.is_set():
            with _socket(coordinator) as peer:
                with contextlib.suppress(OSError):
                    peer.sendall(HOSTILE[what])
                    peer.shutdown(socket.SHUT_WR)
                dropped += _is_dropped(peer)
        return dropped

    def run():
        with contextlib.ExitStack() as stack:
            sites = [
                Rounds(
                    member,
                    stack.enter_context(_site(coordinator, member)),
                    rules(grace=5.0, poll=0.003, timeout=20.0),
                )
                for member in range(4)
            ]
            ends = in_threads(functools.partial(_run, site, 3) for site in sites)
        ended.set()
        return ends

    ends, dropped = in_threads([run, attack])
    assert [end.members for end in ends] == [(0, 1, 2, 3)] * 4 and dropped > 0


def test_a_peer_with_the_key_that_breaks_the_rules_is_dropped(coordinator):
    right = Frame(kind=Kind.UPDATE, number=0, member=1, epoch=coordinator.epoch)
    too_long = bytes(SIZES.update + 1)
    flipped = bytearray(encode(dataclasses.replace(right, payload=b"payload"), KEY))
    flipped[-1] ^= 1
    for data in (
        encode(dataclasses.replace(right, member=2), KEY),
        encode_header(dataclasses.replace(right, payload=too_long), KEY),
        encode(dataclasses.replace(right, kind=Kind.ANSWER), KEY),
        encode(dataclasses.replace(right, kind=Kind.CLOSING, payload=b"\x01xxx"), KEY),
        encode(dataclasses.replace(right, kind=Kind.COLLECT, payload=b"\x63\0\0\0\0"), KEY),
        encode(dataclasses.replace(right, epoch=right.epoch - 1), KEY),
        bytes(flipped),
    ):
        with _socket(coordinator) as peer:
            peer.sendall(encode(HELLO, KEY))
            assert len(peer.recv(1 << 16)) >= HEADER_BYTES
            peer.sendall(data)
            assert _is_dropped(peer)
    with _site(coordinator, 3) as transport:
        assert transport.collect(0, Kind.UPDATE).payloads == {}


def test_peers_that_send_nothing_are_dropped_and_leave_room(coordinator):
    """More than the coordinator listens to; the oldest goes first, all after a second."""
    peers = [_socket(coordinator) for _ in range(80)]
    with _site(coordinator, 1) as transport:
        transport.post(0, Kind.UPDATE, b"x")
        assert transport.collect(0, Kind.UPDATE).payloads == {1: b"x"}
    assert all(_is_dropped(peer) for peer in peers)
    for peer in peers:
        peer.close()


def test_a_slow_peer_is_dropped(coordinator):
    """It sends a byte, and no more."""
    with _socket(coordinator) as peer:
        peer.sendall(b"j")
        assert _is_dropped(peer)


def test_an_site_connects_again_after_a_long_pause():
    """Inner steps take longer than a connection may be idle."""
    with Coordinator("127.0.0.1:0", SIZES, key=KEY, idle=0.1) as coordinator:
        with _site(coordinator, 1) as transport:
            for number in range(2):
                transport.post(number, Kind.UPDATE, b"x")
                time.sleep(0.3)
            assert transport.collect(0, Kind.UPDATE).payloads == {1: b"x"}


def test_rounds_far_ahead_are_refused(coordinator):
    """So that no site fills the memory of the coordinator."""
    with _site(coordinator, 1) as transport:
        for number in range(3):
            transport.post(number, Kind.UPDATE, b"x")
        with pytest.raises(LeftOutError, match="round 3 is not open"):
            transport.post(3, Kind.UPDATE, b"x")
        transport.decide(2, Kind.FINGERPRINT, Closing(members=(1,)))
        transport.post(3, Kind.UPDATE, b"x")
        for number in (1, 4):
            with pytest.raises(LeftOutError, match=f"round {number} is not open; 2 was the last"):
                transport.post(number, Kind.UPDATE, b"x")


def test_an_site_without_the_key_gives_up(coordinator):
    with _site(coordinator, 1, patience=0.3, key=b"other") as transport:
        with pytest.raises(TransportError, match="did not answer for 0.3 s"):
            transport.post(0, Kind.UPDATE, b"x")


def test_other_hosts_need_a_key_and_addresses_their_form():
    with pytest.raises(ValueError, match="can be reached from other hosts: set"):
        Coordinator("0.0.0.0:0", SIZES)
    with pytest.raises(ValueError, match="address=node0 is not host:port"):
        Coordinator("node0", SIZES)


def test_a_second_coordinator_is_refused(tmp_path, coordinator):
    with pytest.raises(TransportError, match="cannot be listened on: Address already in use"):
        Coordinator(coordinator.address, SIZES, key=KEY)
    lease = CoordinatorLease(tmp_path / "lease")
    with pytest.raises(TransportError, match="is held by another coordinator"):
        CoordinatorLease(tmp_path / "lease")
    lease.release()
    later = CoordinatorLease(tmp_path / "lease")
    assert later.epoch > lease.epoch
    later.release()


def test_a_coordinator_without_its_lease_closes_nothing(tmp_path):
    path, closings = tmp_path / "lease", MemoryClosings()
    with Coordinator(
        "127.0.0.1:0", SIZES, key=KEY, lease=CoordinatorLease(path), closings=closings
    ) as old:
        with _site(old, 1, patience=0.3) as transport:
            transport.decide(0, Kind.UPDATE, Closing(members=(1,)))
            path.unlink()
            with Coordinator("127.0.0.1:0", SIZES, key=KEY, lease=CoordinatorLease(path)) as new:
                assert new.epoch > old.epoch
                with pytest.raises(TransportError, match="did not answer"):
                    transport.decide(1, Kind.UPDATE, Closing(members=(1,)))
    assert closings.find(1, Kind.UPDATE) is None


def test_two_coordinators_that_share_closings_never_both_close_a_round(tmp_path):
    lists = Closing(members=(0, 1, 2)), Closing(members=(1, 2, 3))
    with contextlib.ExitStack() as stack:
        sites = []
        for member in range(2):
            made = Coordinator(
                "127.0.0.1:0", SIZES, key=KEY, closings=DirectoryClosings(tmp_path, member, KEY)
            )
            sites.append(stack.enter_context(_site(stack.enter_context(made), member)))
        for number in range(100):
            start = threading.Barrier(2)

            def close(member, number=number, start=start):
                start.wait()
                return sites[member].decide(number, Kind.UPDATE, lists[member])

            decided = in_threads(functools.partial(close, member) for member in range(2))
            assert decided[0] == decided[1] and decided[0] in lists


def test_frames_of_an_older_coordinator_are_refused(coordinator):
    with _site(coordinator, 1, patience=0.5) as transport:
        transport.post(0, Kind.UPDATE, b"x")
        coordinator.close()
        with Coordinator(coordinator.address, SIZES, key=KEY) as older:
            older.epoch = coordinator.epoch - 1
            with pytest.raises(TransportError, match=f"epoch {older.epoch} is older than"):
                transport.collect(0, Kind.UPDATE)


@pytest.mark.parametrize("keeps_closings", [True, False])
def test_sites_go_on_with_a_coordinator_that_is_started_again(keeps_closings, tmp_path):
    def start(address):
        lease = CoordinatorLease(tmp_path / "lease")
        closings = DirectoryClosings(tmp_path, 0, KEY) if keeps_closings else None
        return Coordinator(address, SIZES, key=KEY, lease=lease, closings=closings)

    current = start("127.0.0.1:0")
    sites = [
        Rounds(
            member,
            TcpTransport(current.address, member, SIZES, KEY, patience=20),
            rules(grace=0.5, poll=0.003, timeout=20.0),
        )
        for member in range(4)
    ]

    def restart():
        nonlocal current
        for number in (2, 4):
            while sites[0].number < number:
                threading.Event().wait(0.002)
            current.close()
            current = start(current.address)

    ends = in_threads([*(functools.partial(_run, site, 12) for site in sites), restart])
    current.close()
    assert [(end.members, end.number) for end in ends[:4]] == [((0, 1, 2, 3), 12)] * 4
    for site in sites:
        site.close()


@pytest.mark.parametrize("is_silent", [True, False], ids=("silent", "gone"))
def test_an_site_that_is_to_stop_does_not_wait_for_a_coordinator(is_silent):
    """Not for its answer, and not until it is there again."""
    with socket.create_server(("127.0.0.1", 0)) as peer:
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        if not is_silent:
            peer.close()
        began = time.monotonic()

        def check():
            if time.monotonic() - began > 0.2:
                raise StoppedError("asked to stop")

        transport = TcpTransport(address, 0, SIZES, KEY, check=check)
        with pytest.raises(StoppedError):
            transport.collect(0, Kind.UPDATE)
        assert time.monotonic() - began < 5
