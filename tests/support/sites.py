# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A transport in memory, a clock that tests move, and sites in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from jaxmoe.contrib.slow_links.sites.coordinator import MemoryClosings
from jaxmoe.contrib.slow_links.sites.frames import Kind
from jaxmoe.contrib.slow_links.sites.rules import RoundRules
from jaxmoe.contrib.slow_links.sites.transport import Closing, Collected, MessageSizes

SIZES = MessageSizes(update=1 << 16, state=1 << 16)


def rules(founders: int = 4, **changes: Any) -> RoundRules:
    """Return rules with a quorum of three, a grace of 10 s and a timeout of 100 s."""
    given = {"quorum": 3, "grace": 10.0, "timeout": 100.0, "poll": 1.0, **changes}
    return RoundRules(founders=founders, **given)


class Board:
    """What all sites of a test share.

    `hidden` has (reader, member) pairs: the reader cannot read updates of the member.
    """

    def __init__(self) -> None:
        self.posts: dict[tuple[int, Kind], dict[int, bytes]] = {}
        self.closings = MemoryClosings()
        self.hidden: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def post(self, member: int, number: int, kind: Kind, payload: bytes = b"") -> None:
        """Post a message of any member."""
        with self._lock:
            self.posts.setdefault((number, kind), {}).setdefault(member, payload)

    def seen_by(self, member: int, number: int, kind: Kind) -> dict[int, bytes]:
        """Return the messages that a member can read."""
        with self._lock:
            found = dict(self.posts.get((number, kind), {}))
        hidden = self.hidden if kind == Kind.UPDATE else set()
        return {other: found[other] for other in found if (member, other) not in hidden}


class BoardTransport:
    """The smallest transport: a dictionary."""

    def __init__(self, board: Board, member: int):
        self._board, self._member = board, member
        self.forgotten = -1

    def post(self, number: int, kind: Kind, payload: bytes) -> None:
        self._board.post(self._member, number, kind, payload)

    def collect(self, number: int, kind: Kind) -> Collected:
        newest = self._board.closings.newest()
        return Collected(
            payloads=self._board.seen_by(self._member, number, kind),
            closing=self._board.closings.find(number, kind),
            newest=newest,
        )

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        return self._board.closings.decide(number, kind, closing)

    def forget(self, number: int) -> None:
        self.forgotten = number

    def close(self) -> None:
        pass


class SteppedClock:
    """A clock that moves only while it sleeps, and does what is due meanwhile."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        due = [act for at, act in self._due if at <= self._now]
        self._due = [(at, act) for at, act in self._due if at > self._now]
        for act in due:
            act()

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something at a time."""
        self._due.append((seconds, act))


def in_threads(works: Iterable[Callable[[], Any]], timeout: float = 30.0) -> list[Any]:
    """Run functions at the same time; return what each returned or raised."""
    works = list(works)
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a site waits for ever"
    return results
