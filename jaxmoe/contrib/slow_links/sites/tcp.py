# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`TcpTransport`: a site's connection to a coordinator.

A lost connection is made again, and the request repeated: all requests can be. When the coordinator
was started again, which its larger epoch shows, the site posts its messages of the current round
again. Frames of an older epoch than it has seen are refused.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from jaxmoe.contrib.slow_links.sites.connections import (
    ANSWER_BYTES,
    REASON_BYTES,
    Connection,
    decode_found,
    encode_collect,
)
from jaxmoe.contrib.slow_links.sites.coordinator import EPOCH, host_and_port
from jaxmoe.contrib.slow_links.sites.errors import (
    FrameError,
    LeftOutError,
    SiteError,
    TransportError,
)
from jaxmoe.contrib.slow_links.sites.frames import COORDINATOR, Frame, Kind
from jaxmoe.contrib.slow_links.sites.transport import Closing, Collected, MessageSizes

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_PAUSE = 0.2  # seconds between attempts to connect
_REPLIES = {Kind.ANSWER: ANSWER_BYTES, Kind.REFUSED: REASON_BYTES}


class TcpTransport:
    """A board at a coordinator.

    Args:
        address: host:port of the coordinator.
        member: Number of this site.
        sizes: Largest sizes of messages.
        key: Shared secret.
        timeout: Seconds without progress after which a connection counts as lost.
        patience: Seconds of attempts to reach the coordinator, after which a call raises.
        check: Called while a call waits; may raise `StoppedError`, which ends the call.
    """

    def __init__(
        self,
        address: str,
        member: int,
        sizes: MessageSizes,
        key: bytes | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 300.0,
        check: Callable[[], None] = lambda: None,
    ):
        self._address = address
        self._member = member
        self._host, self._port = host_and_port(address)
        self._bounds = sizes.bounds()
        self._key = key
        self._timeout = timeout
        self._patience = patience
        self._check = check
        self._connection: Connection | None = None
        self._epoch = 0
        self._own: dict[tuple[int, Kind], bytes] = {}
        self._held: dict[tuple[int, Kind], dict[int, bytes]] = {}

    def post(self, number: int, kind: Kind, payload: bytes) -> None:
        """Post a message, as `Transport.post` does."""
        self._own.setdefault((number, kind), payload)
        self._repeat(lambda connection: self._post(connection, number, kind, payload))

    def collect(self, number: int, kind: Kind) -> Collected:
        """Return what is there, as `Transport.collect` does."""
        return self._repeat(lambda connection: self._collect(connection, number, kind))

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record how a step closed, as `Transport.decide` does."""

        def ask(connection: Connection) -> Closing:
            self._send(connection, Kind.CLOSING, number, closing.encode(kind))
            _, reply = decode_found(self._receive(connection, number, {}).payload, kind)
            if reply is None:
                raise FrameError("answer to a closing has none")
            return reply

        return self._repeat(ask)

    def forget(self, number: int) -> None:
        """Drop own messages of older rounds; the coordinator does so by itself."""
        self._held.clear()
        self._own = {key: payload for key, payload in self._own.items() if key[0] >= number}

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _repeat(self, ask: Callable[[Connection], _Result]) -> _Result:
        """Return the result of a request, repeated on new connections until it has one."""
        until = time.monotonic() + self._patience
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return ask(self._connection)
            except LeftOutError:
                raise
            except (FrameError, TransportError) as error:
                self.close()
                if time.monotonic() >= until:
                    raise TransportError(
                        f"coordinator {self._address} did not answer for {self._patience:g} s:"
                        f" {error}"
                    ) from error
                self._check()
                logger.info("sites: coordinator %s: %s; trying again", self._address, error)
                time.sleep(_PAUSE)

    def _connect(self) -> Connection:
        try:
            connected = socket.create_connection((self._host, self._port), self._timeout)
        except OSError as error:
            raise TransportError(f"no connection: {error}") from error
        connection = Connection(connected, self._timeout, self._key, check=self._check)
        try:
            connection.send(Frame(kind=Kind.HELLO, number=0, member=self._member))
            frame = self._receive(connection, 0, {})
            if len(frame.payload) != EPOCH.size or EPOCH.unpack(frame.payload)[0] != frame.epoch:
                raise FrameError("answer to HELLO has another epoch")
            if frame.epoch > self._epoch:
                self._epoch = frame.epoch
                for (number, kind), payload in self._own.items():
                    try:
                        self._post(connection, number, kind, payload)
                    except LeftOutError:
                        continue  # that round has ended
        except SiteError:
            connection.close()
            raise
        return connection

    def _post(self, connection: Connection, number: int, kind: Kind, payload: bytes) -> None:
        self._send(connection, kind, number, payload)
        self._receive(connection, number, {})

    def _collect(self, connection: Connection, number: int, kind: Kind) -> Collected:
        payloads = self._held.setdefault((number, kind), {})
        self._send(connection, Kind.COLLECT, number, encode_collect(kind, tuple(sorted(payloads))))
        while True:
            frame = self._receive(connection, number, {kind: self._bounds[kind]})
            if frame.kind == Kind.ANSWER:
                newest, closing = decode_found(frame.payload, kind)
                return Collected(payloads=dict(payloads), closing=closing, newest=newest)
            payloads[frame.member] = frame.payload

    def _send(self, connection: Connection, kind: Kind, number: int, payload: bytes) -> None:
        connection.send(
            Frame(kind=kind, number=number, member=self._member, payload=payload, epoch=self._epoch)
        )

    def _receive(self, connection: Connection, number: int, bounds: dict[Kind, int]) -> Frame:
        """Return the next frame of an answer.

        Raises:
            FrameError: It is not an expected one, or of an older epoch.
            LeftOutError: The request was refused because it came too late.
            TransportError: The connection is lost, or the coordinator was started again.
        """
        frame = connection.receive({**_REPLIES, **bounds}, number=number)
        if frame.epoch < self._epoch:
            raise FrameError(f"epoch {frame.epoch} is older than {self._epoch}")
        if (frame.kind in _REPLIES) != (frame.member == COORDINATOR):
            raise FrameError(f"{frame.kind.name} comes from member {frame.member}")
        if frame.kind == Kind.REFUSED:
            reason = frame.payload.decode(errors="replace")
            if frame.epoch != self._epoch:
                raise TransportError(reason)
            raise LeftOutError(reason)
        return frame
