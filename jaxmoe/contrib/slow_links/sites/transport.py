# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The `Transport` protocol: what carries messages between sites, and its records.

A transport is a board. A site posts a message under (round, kind), where all others find it; the
first post stands. For each step of a round the board also records *how it closed*, once: of several
proposals the first is recorded, and all are given that one. Nothing else has to be atomic, and no
call waits for other sites: `rounds.py` polls, and holds all rules on time and quorum.

To add a transport: the methods of `Transport`, a form of its address in `connect` of
`config.py`, and a row in the table of `tests/jaxmoe/contrib/slow_links/sites/test_transports.py`.
`tests/support/sites.py` has the smallest one.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from jaxmoe.contrib.slow_links.sites.errors import FrameError
from jaxmoe.contrib.slow_links.sites.frames import (
    NUMBERS_BYTES,
    Kind,
    decode_numbers,
    encode_numbers,
)

KEPT_ROUNDS = 64
"""Rounds before the newest whose closings are kept."""

CLOSING_BYTES = 1 + 3 * NUMBERS_BYTES
"""Largest size of an encoded closing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessageSizes:
    """Largest sizes of the messages of a run, in bytes."""

    update: int
    """Encoded outer gradient of one site; known from the parameter table."""
    state: int
    """Slow copy and outer state."""
    fingerprint: int = 64

    def bounds(self) -> dict[Kind, int]:
        """Return the largest payload of each kind that sites post."""
        return {
            Kind.UPDATE: self.update,
            Kind.FINGERPRINT: self.fingerprint,
            Kind.STATE: self.state,
            Kind.JOIN: 0,
            Kind.RECEIPT: NUMBERS_BYTES,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a step of a round closed; tuples of members are in ascending order."""

    members: tuple[int, ...]
    """Members whose message counts."""
    majority: tuple[int, ...] = ()
    """Members whose fingerprint is the most frequent one; only where fingerprints were compared."""
    joined: tuple[int, ...] = ()
    """Sites that are admitted to the next round and wait for the state."""

    @property
    def following(self) -> tuple[int, ...]:
        """Members of the next round."""
        return tuple(sorted({*self.members, *self.joined}))

    def encode(self, kind: Kind) -> bytes:
        """Return the payload of a CLOSING frame.

        Args:
            kind: Kind of the messages of the step.
        """
        lists = (self.members, self.majority, self.joined)
        return bytes([kind]) + b"".join(map(encode_numbers, lists))


def decode_closing(payload: bytes) -> tuple[Kind, Closing]:
    """Return the kind and the closing that `Closing.encode` was given.

    Raises:
        FrameError: They are not there.
    """
    if not payload or payload[0] not in (Kind.UPDATE, Kind.RECEIPT, Kind.FINGERPRINT):
        raise FrameError(f"closing of kind {payload[:1]!r}")
    members, remaining = decode_numbers(payload[1:])
    majority, remaining = decode_numbers(remaining)
    joined, remaining = decode_numbers(remaining)
    if remaining:
        raise FrameError(f"{len(remaining)} bytes follow the closing")
    return Kind(payload[0]), Closing(members=members, majority=majority, joined=joined)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a board has of one kind of one round."""

    payloads: dict[int, bytes]
    """Whole messages by member; more may follow."""
    closing: Closing | None = None
    """How the step closed; None while it is open."""
    newest: int | None = None
    """Newest round that has ended, whose fingerprints were compared; None if none has."""


@runtime_checkable
class Transport(Protocol):
    """A board that all sites of a run share."""

    def post(self, number: int, kind: Kind, payload: bytes) -> None:
        """Post a message of this site; a no-op if it has posted one of this kind before.

        Args:
            number: Round.
            kind: UPDATE, RECEIPT, FINGERPRINT, STATE or JOIN.
            payload: Message.

        Raises:
            TransportError: The board cannot be reached.
        """
        ...

    def collect(self, number: int, kind: Kind) -> Collected:
        """Return what is there now; messages that cannot be read whole are left out.

        Args:
            number: Round.
            kind: Kind of the messages.

        Raises:
            TransportError: The board cannot be reached.
        """
        ...

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record how a step closed, unless it is recorded already; return the record.

        Args:
            number: Round.
            kind: Kind of the messages of the step.
            closing: Proposal.

        Raises:
            LeftOutError: A newer round has ended and there is no record.
            TransportError: The board cannot be reached.
        """
        ...

    def forget(self, number: int) -> None:
        """Delete the messages of older rounds, which are not needed any more.

        Args:
            number: Oldest round that is kept.
        """
        ...

    def close(self) -> None:
        """Release connections; a second call is a no-op."""
        ...


@runtime_checkable
class Closings(Protocol):
    """Records how steps closed, each once."""

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record a closing unless there is one, as `Transport.decide` does."""
        ...

    def find(self, number: int, kind: Kind) -> Closing | None:
        """Return the record of a step, None while there is none."""
        ...

    def newest(self) -> int | None:
        """Return the newest round that has ended."""
        ...
