# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the rounds of a site: exchange updates, compare fingerprints, join.

    start                            as a founding member, or join
    exchange(update)                 -> the updates of all members, alike on all of them
    agree(fingerprint)               -> who has the state of the majority, who joined
    post_state, fetch_state          the state for those who differ or joined

Rules (after PCCL, arXiv 2505.14065):

- Membership changes between rounds only.
- A step closes when all members have posted, or `grace` seconds after its first message, and never
  while fewer sites than `quorum` are there: have posted, or wait to join. A member that is
  missing is out, and the others continue.
- An update counts if all members that confirm the round hold it. One that a member cannot read is
  left out of the round, and so is a member that does not confirm.
- The fingerprints after each round name the majority; the others fetch its state. A tie goes to the
  group with the lowest member.
- A site that was left out, or started later, announces itself, is admitted when a round ends,
  and receives the state with which the next round starts. The lowest member of the majority posts
  it; the others take its place one by one, each after another `grace`.

All decisions are recorded once by the transport, so that members with different views follow one.
With the default quorum, more than half of the sites, two separate groups never both close a
round.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from jaxmoe.contrib.slow_links.sites.errors import LeftOutError, QuorumError
from jaxmoe.contrib.slow_links.sites.frames import Kind, encode_numbers
from jaxmoe.contrib.slow_links.sites.rules import (
    Agreement,
    Clock,
    Round,
    RoundRules,
    SystemClock,
    confirmed_members,
    list_members,
    majority,
)
from jaxmoe.contrib.slow_links.sites.transport import Closing, Transport

logger = logging.getLogger(__name__)


class Rounds:
    """Rounds of one site; used by one thread.

    Args:
        member: Number of this site.
        transport: Board that all sites share.
        rules: Limits, the same on all sites.
        clock: Source of time.
        check: Called between looks at the transport; may raise `StoppedError`, which ends any wait.
    """

    def __init__(
        self,
        member: int,
        transport: Transport,
        rules: RoundRules,
        clock: Clock | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self._member = member
        self._transport = transport
        self._rules = rules
        self._clock: Clock = clock or SystemClock()
        self._check = check
        self._number = 0
        self._members: tuple[int, ...] = ()
        self._ended: Closing | None = None
        self._has_exchanged = False

    @property
    def member(self) -> int:
        """Number of this site."""
        return self._member

    @property
    def number(self) -> int:
        """Number of the next round to end."""
        return self._number

    @property
    def members(self) -> tuple[int, ...]:
        """Members of that round, while it is not decided who is out; empty before `start`."""
        return self._members

    def start(self, number: int = 0) -> bytes | None:
        """Begin with a round, as a member if this site is one, else by joining.

        Args:
            number: Round that the own state is at the start of: 0 in a new run, or that of the
                checkpoint from which the run resumes.

        Returns:
            State to begin with; None to keep the own one.

        Raises:
            TimeoutError: It was not admitted in time.
            TransportError: The transport failed.
        """
        newest = self._transport.collect(number, Kind.JOIN).newest
        founders = tuple(range(self._rules.founders))
        if newest is None or newest < number - 1:
            members = founders
        elif newest == number - 1:
            closing = self._transport.collect(newest, Kind.FINGERPRINT).closing
            # A site that has just been admitted does not have the state.
            is_in = closing is not None and self._member in {*closing.majority} - {*closing.joined}
            members = closing.following if closing is not None and is_in else ()
        else:
            members = ()
        if self._member not in members:
            return self.join()
        self._number = number
        self._members = members
        return None

    def exchange(self, update: bytes, state: Callable[[], bytes] | None = None) -> Round:
        """Post the update of this round and return the updates of all members.

        Args:
            update: Encoded outer gradient.
            state: Returns the state after the last round. Called when sites still wait for it
                after a grace, because the one that was to post it is gone.

        Raises:
            LeftOutError: The round closed without this site: `join` again.
            QuorumError: Too few members posted within the timeout.
            TransportError: The transport failed.
        """
        self._check_turn(exchanges=True)
        posting = None if state is None else self._deputy(state)
        closed = self._step(Kind.UPDATE, update, self._members, _present, posting)
        payloads = self._read(closed.members)
        members = tuple(sorted(payloads))
        receipt = self._step(Kind.RECEIPT, encode_numbers(members), closed.members, _confirm)
        self._members = receipt.members
        self._has_exchanged = True
        return Round(
            number=self._number,
            members=receipt.members,
            payloads={member: payloads[member] for member in receipt.members},
        )

    def agree(self, fingerprint: bytes) -> Agreement:
        """Compare the state after a round with that of the other members, and end the round.

        Args:
            fingerprint: Digest of the slow copy after the update of this round was applied.

        Raises:
            LeftOutError: The round closed without this site: `join` again.
            QuorumError: Too few members posted within the timeout.
            TransportError: The transport failed.
        """
        self._check_turn(exchanges=False)
        number = self._number
        closing = self._step(Kind.FINGERPRINT, fingerprint, self._members, self._compare)
        self._transport.forget(number)
        self._ended = closing
        self._members = closing.following
        self._number = number + 1
        self._has_exchanged = False
        if closing.members != closing.majority:
            logger.warning(
                "round %d: sites %s differ from the majority %s",
                number,
                list_members(set(closing.members) - set(closing.majority)),
                list_members(closing.majority),
            )
        return Agreement(
            number=number,
            member=self._member,
            members=closing.members,
            majority=closing.majority,
            joined=closing.joined,
        )

    def post_state(self, state: bytes) -> None:
        """Post the state after the last round, for sites that joined or differ.

        Args:
            state: Slow copy and outer state.

        Raises:
            TransportError: The transport failed.
        """
        self._transport.post(self._number - 1, Kind.STATE, state)

    def fetch_state(self) -> bytes:
        """Return the state of the majority after the last round.

        Raises:
            LeftOutError: The next round ended before it came: `join` again.
            QuorumError: It did not come within the timeout.
            TransportError: The transport failed.
        """
        if self._ended is None:
            raise RuntimeError("fetch_state comes after agree")
        until = self._clock.now() + self._rules.timeout
        state = self._fetch(self._number - 1, self._ended, until)
        if state is None:
            raise LeftOutError(f"round {self._number} ended before the state of the majority came")
        return state

    def join(self) -> bytes:
        """Ask to be admitted, wait for it, and return the state with which the next round starts.

        Raises:
            QuorumError: It was not admitted within the timeout.
            TransportError: The transport failed.
        """
        until = self._clock.now() + self._rules.timeout
        announced = None
        self._has_exchanged = False
        while self._clock.now() < until:
            newest = self._transport.collect(announced or 0, Kind.JOIN).newest
            if newest is not None and newest == announced:
                closing = self._transport.collect(newest, Kind.FINGERPRINT).closing
                if closing is not None and self._member in closing.joined:
                    state = self._fetch(newest, closing, until)
                    if state is not None:
                        self._number = newest + 1
                        self._members = closing.following
                        self._ended = closing
                        return state
                    continue
            number = 0 if newest is None else newest + 1
            if number != announced:
                with contextlib.suppress(LeftOutError):  # that round has ended meanwhile
                    self._transport.post(number, Kind.JOIN, b"")
                    announced = number
            self._pause()
        raise QuorumError(
            f"site {self._member} was not admitted within {self._rules.timeout:g} s: no round has"
            " ended; if all sites were restarted, give them a new directory or coordinator"
        )

    def close(self) -> None:
        """Release the transport."""
        self._transport.close()

    def _pause(self) -> None:
        """Wait until the next look, unless this site is to stop."""
        self._check()
        self._clock.sleep(self._rules.poll)

    def _check_turn(self, *, exchanges: bool) -> None:
        if not self._members:
            raise RuntimeError("start comes before the first exchange")
        if self._has_exchanged == exchanges:
            raise RuntimeError("exchange and agree take turns: each round has one of both")

    def _step(
        self,
        kind: Kind,
        payload: bytes,
        expected: tuple[int, ...],
        propose: Callable[[Mapping[int, bytes]], Closing],
        meanwhile: Callable[[Mapping[int, bytes]], None] | None = None,
    ) -> Closing:
        """Post a message and return how the step closed, with this site in it."""
        rules = self._rules
        number = self._number
        self._transport.post(number, kind, payload)
        began = self._clock.now()
        first = None
        while True:
            collected = self._transport.collect(number, kind)
            closing = collected.closing
            now = self._clock.now()
            present = {m: collected.payloads[m] for m in expected if m in collected.payloads}
            if closing is None and collected.newest is not None and collected.newest >= number:
                raise LeftOutError(f"round {number} ended without site {self._member}")
            if present and first is None:
                first = now
            is_late = first is not None and now - first >= rules.grace
            if closing is None and (len(present) == len(expected) or is_late):
                closing = self._decide(kind, propose(present), set(present), expected)
            if closing is not None:
                if self._member not in closing.members:
                    raise LeftOutError(
                        f"round {number} closed with sites {list_members(closing.members)}, without"
                        f" {self._member}"
                    )
                return closing
            if meanwhile is not None:
                meanwhile(present)
            if now - began >= rules.timeout:
                raise QuorumError(
                    f"round {number} has {len(present)} of at least {rules.quorum} sites"
                    f" ({list_members(present)}) after {rules.timeout:g} s"
                )
            self._pause()

    def _decide(
        self, kind: Kind, proposal: Closing, members_present: set[int], expected: tuple[int, ...]
    ) -> Closing | None:
        """Record a closing if enough sites are there; those that wait to join are."""
        number = self._number
        if len(members_present) < self._rules.quorum:
            members_present |= self._transport.collect(number, Kind.JOIN).payloads.keys()
        if not proposal.members or len(members_present) < self._rules.quorum:
            return None
        closing = self._transport.decide(number, kind, proposal)
        if missing := set(expected) - set(closing.members):
            logger.warning("round %d goes on without sites %s", number, list_members(missing))
        return closing

    def _deputy(self, state: Callable[[], bytes]) -> Callable[[Mapping[int, bytes]], None]:
        """Return what posts the state in place of members of the majority before this one."""
        closing = self._ended
        began = self._clock.now()
        has_posted = False
        if closing is None or self._member not in closing.majority:
            return lambda present: None
        waiting = {*closing.members} - {*closing.majority} | {*closing.joined}
        rank = closing.majority.index(self._member)

        def post(present: Mapping[int, bytes]) -> None:
            nonlocal has_posted
            is_due = self._clock.now() - began >= rank * self._rules.grace
            if rank and is_due and not has_posted and waiting - set(present):
                has_posted = True
                self.post_state(state())

        return post

    def _read(self, members: tuple[int, ...]) -> dict[int, bytes]:
        """Return the updates of members; after half of the grace without those still missing."""
        until = self._clock.now() + self._rules.grace / 2
        while True:
            found = self._transport.collect(self._number, Kind.UPDATE).payloads
            payloads = {member: found[member] for member in members if member in found}
            if len(payloads) == len(members) or self._clock.now() >= until:
                return payloads
            self._pause()

    def _compare(self, payloads: Mapping[int, bytes]) -> Closing:
        joined = self._transport.collect(self._number, Kind.JOIN).payloads
        return Closing(
            members=tuple(sorted(payloads)),
            majority=majority(payloads),
            joined=tuple(sorted(joined)),
        )

    def _fetch(self, number: int, closing: Closing, until: float) -> bytes | None:
        """Return the state after a round; None if the next round ends before it comes."""
        while self._clock.now() < until:
            collected = self._transport.collect(number, Kind.STATE)
            for member in closing.majority:
                if member in collected.payloads:
                    return collected.payloads[member]
            if collected.newest is not None and collected.newest > number:
                return None
            self._pause()
        raise QuorumError(
            f"none of the sites {list_members(closing.majority)} posted the state after round"
            f" {number}"
            f" within {self._rules.timeout:g} s"
        )


def _present(payloads: Mapping[int, bytes]) -> Closing:
    return Closing(members=tuple(sorted(payloads)))


def _confirm(payloads: Mapping[int, bytes]) -> Closing:
    return Closing(members=confirmed_members(payloads))
