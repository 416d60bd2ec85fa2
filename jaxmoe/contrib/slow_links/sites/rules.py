# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rules and records of rounds: limits, the clock, which members count."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from jaxmoe.contrib.slow_links.sites.errors import FrameError
from jaxmoe.contrib.slow_links.sites.frames import decode_numbers


@runtime_checkable
class Clock(Protocol):
    """Time, which tests replace."""

    def now(self) -> float:
        """Return seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait.

        Args:
            seconds: Time to wait.
        """
        ...


class SystemClock:
    """The monotonic clock of this host."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait.

        Args:
            seconds: Time to wait.
        """
        time.sleep(seconds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """Limits of a round."""

    founders: int
    """Number of sites that start the run; their members are 0 to founders - 1."""
    quorum: int
    """Fewest sites that must be there for a round to close, those that wait to join included."""
    grace: float
    """Seconds that a step waits for members after its first message."""
    timeout: float
    """Seconds to wait for a quorum, for admission and for a state."""
    poll: float
    """Seconds between looks at the board."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Updates of one round, the same on all members."""

    number: int
    members: tuple[int, ...]
    """Members whose update counts, in ascending order."""
    payloads: dict[int, bytes]
    """Update of each member, the own one included, in ascending order of members."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Outcome of the comparison of fingerprints at the end of a round."""

    number: int
    """Round that ended."""
    member: int
    """This site."""
    members: tuple[int, ...]
    """Members that posted a fingerprint."""
    majority: tuple[int, ...]
    """Members with the most frequent fingerprint."""
    joined: tuple[int, ...]
    """Sites that are admitted to the next round."""

    @property
    def is_same(self) -> bool:
        """Whether this site is of the majority; if not, `Rounds.fetch_state` is next."""
        return self.member in self.majority

    @property
    def sends_state(self) -> bool:
        """Whether this site is to call `Rounds.post_state`: the lowest of the majority is."""
        is_wanted = bool(self.joined) or self.members != self.majority
        return is_wanted and self.member == self.majority[0]


def majority(fingerprints: Mapping[int, bytes]) -> tuple[int, ...]:
    """Return the members with the most frequent fingerprint, in ascending order.

    Args:
        fingerprints: Fingerprint of each member. Of equally frequent ones, that of the lowest
            member counts.
    """
    groups = collections.defaultdict(list)
    for member in sorted(fingerprints):
        groups[fingerprints[member]].append(member)
    return tuple(max(groups.values(), key=lambda group: (len(group), -group[0])))


def confirmed_members(receipts: Mapping[int, bytes]) -> tuple[int, ...]:
    """Return the members whose updates all confirming members hold, in ascending order.

    A member that holds at most half as many updates as another is the one with the bad connection,
    and is left out itself.

    Args:
        receipts: List of the members whose update a member holds, by member.
    """
    holders: dict[int, set[int]] = {}
    for member, receipt in receipts.items():
        try:
            holders[member] = set(decode_numbers(receipt)[0])
        except FrameError:
            continue
    most = max((len(numbers) for numbers in holders.values()), default=0)
    holders = {member: numbers for member, numbers in holders.items() if 2 * len(numbers) > most}
    return tuple(sorted(set(holders).intersection(*holders.values())))


def list_members(members: Iterable[int]) -> str:
    """Return members as text for a message: `0, 2`."""
    return ", ".join(map(str, sorted(members)))
