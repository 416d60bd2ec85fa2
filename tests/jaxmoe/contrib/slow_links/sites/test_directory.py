# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Directories: damaged and planted files are ignored, and a round closes once."""

import functools
import os
import threading
import time

import pytest

from jaxmoe.contrib.slow_links.sites import directory
from jaxmoe.contrib.slow_links.sites.directory import DirectoryClosings, DirectoryTransport
from jaxmoe.contrib.slow_links.sites.errors import TransportError
from jaxmoe.contrib.slow_links.sites.frames import Frame, Kind, encode
from jaxmoe.contrib.slow_links.sites.transport import Closing
from tests.support.sites import SIZES, in_threads

KEY = b"secret"


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _frame(payload=b"x", key=KEY, **changes):
    given = {"kind": Kind.UPDATE, "number": 0, "member": 2, "payload": payload, **changes}
    return encode(Frame(**given), key)


PLANTED = {
    "a flipped bit": _flip,
    "a cut file": lambda path: os.truncate(path, 60),
    "an empty file": lambda path: os.truncate(path, 0),
    "more bytes": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another key": lambda path: path.write_bytes(_frame(key=b"other")),
    "no key": lambda path: path.write_bytes(_frame(key=None)),
    "another round": lambda path: path.write_bytes(_frame(number=1)),
    "another member": lambda path: path.write_bytes(_frame(member=1)),
    "another kind": lambda path: path.write_bytes(_frame(kind=Kind.STATE)),
    "a size above the bound": lambda path: path.write_bytes(_frame(bytes(SIZES.update + 1))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_message_that_is_no_frame_of_its_member_is_ignored(what, tmp_path, caplog):
    for member in (1, 2):
        DirectoryTransport(tmp_path, member, SIZES, KEY).post(0, Kind.UPDATE, b"payload")
    PLANTED[what](tmp_path / "rounds" / f"{0:010d}" / "update-2")
    transport = DirectoryTransport(tmp_path, 1, SIZES, KEY)
    for _ in range(3):
        assert transport.collect(0, Kind.UPDATE).payloads == {1: b"payload"}
    assert len([r for r in caplog.records if "update-2 is ignored" in r.message]) == 1


def test_a_closing_that_is_not_signed_ends_with_an_error(tmp_path):
    DirectoryClosings(tmp_path / "closings", 2, b"other").decide(
        0, Kind.UPDATE, Closing(members=(2,))
    )
    with pytest.raises(TransportError, match="is not signed with the key"):
        DirectoryTransport(tmp_path, 1, SIZES, KEY).collect(0, Kind.UPDATE)


def test_two_coordinators_never_both_close_a_round(tmp_path):
    """200 races of two writers that see different members."""
    lists = Closing(members=(0, 1, 2)), Closing(members=(1, 2, 3))
    wins = [0, 0]
    for number in range(200):
        start = threading.Barrier(2)

        def close(member, number=number, start=start):
            closings = DirectoryClosings(tmp_path, member)
            start.wait()
            return closings.decide(number, Kind.UPDATE, lists[member])

        decided = in_threads(functools.partial(close, member) for member in range(2))
        assert decided[0] == decided[1] == DirectoryClosings(tmp_path, 9).find(number, Kind.UPDATE)
        wins[lists.index(decided[0])] += 1
    assert sum(wins) == 200 and len(list(tmp_path.iterdir())) == 200


def test_old_rounds_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "KEPT_ROUNDS", 4)
    transport = DirectoryTransport(tmp_path, 0, SIZES)
    last = 9
    for number in range(last + 1):
        for kind in (Kind.UPDATE, Kind.FINGERPRINT):
            transport.post(number, kind, b"x")
            transport.decide(number, kind, Closing(members=(0,)))
        transport.forget(number)
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == [f"{last:010d}"]
    closings = sorted(path.name for path in (tmp_path / "closings").iterdir())
    assert closings[0] == f"{last - 4:010d}-fingerprint"
    assert len(closings) == 2 * (4 + 1)


def test_a_message_of_a_round_that_is_deleted_meanwhile_is_written(tmp_path):
    """Another site deletes rounds while this one writes."""
    ended = threading.Event()

    def delete():
        other = DirectoryTransport(tmp_path, 1, SIZES)
        while not ended.is_set():
            other.forget(1 << 30)
            time.sleep(0.02)

    def write():
        transport = DirectoryTransport(tmp_path, 0, SIZES)
        try:
            for number in range(50):
                transport.post(number, Kind.UPDATE, b"x")
        finally:
            ended.set()

    assert in_threads([delete, write]) == [None, None]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "rounds").write_text("a file")
    with pytest.raises(TransportError, match="rounds/0000000000/update-0 cannot be written"):
        DirectoryTransport(tmp_path, 0, SIZES).post(0, Kind.UPDATE, b"x")
