# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends and receives frames over a TCP connection, within time limits, and packs requests.

request                               answer
HELLO                                 ANSWER with the epoch
UPDATE, RECEIPT, FINGERPRINT,         ANSWER, empty
STATE, JOIN: a message to post
COLLECT: a kind, members that the     the messages of other members, as they were posted; then
client has                            ANSWER: the newest round, the closing
CLOSING: a proposal                   ANSWER: what is recorded
anything that is refused              REFUSED with the reason
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Mapping

from jaxmoe.contrib.slow_links.sites.errors import FrameError, TransportError
from jaxmoe.contrib.slow_links.sites.frames import (
    NUMBERS_BYTES,
    Frame,
    Kind,
    decode_numbers,
    encode_header,
    encode_numbers,
    read_frame,
)
from jaxmoe.contrib.slow_links.sites.transport import CLOSING_BYTES, Closing, decode_closing

SLOWEST = 1 << 16
"""Bytes a second below which a transfer counts as stuck."""
_SMALL = 1 << 16
_LOOK = 0.5
"""Seconds of waiting for an answer between two looks whether to go on."""
_NEWEST = struct.Struct("!Q")

COLLECT_BYTES = 1 + NUMBERS_BYTES
ANSWER_BYTES = _NEWEST.size + CLOSING_BYTES
REASON_BYTES = 4096


class Connection:
    """A connection on which frames travel in both directions.

    Args:
        connected: Socket.
        timeout: Seconds without progress after which the connection counts as lost.
        key: Shared secret.
        check: Called while an answer is awaited; may raise, which ends the wait.
    """

    def __init__(
        self,
        connected: socket.socket,
        timeout: float,
        key: bytes | None,
        *,
        check: Callable[[], None] = lambda: None,
    ):
        self._socket = connected
        self._timeout = timeout
        self._key = key
        self._check = check
        self._until = 0.0
        # A Unix socket, as tests have, knows no such option.
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            TransportError: The peer is gone, or does not read.
        """
        self.send_raw(encode_header(frame, self._key), frame.payload)

    def send_raw(self, *parts: bytes) -> None:
        """Send bytes, within the time that a slow connection needs for them.

        Args:
            *parts: Bytes of whole frames.

        Raises:
            TransportError: The peer is gone, or does not read.
        """
        try:
            self._socket.settimeout(self._timeout + sum(map(len, parts)) / SLOWEST)
            if sum(map(len, parts)) <= _SMALL:
                parts = (b"".join(parts),)
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise TransportError(f"connection lost while sending: {error}") from error

    def receive(
        self,
        bounds: Mapping[Kind, int],
        number: int | None = None,
        *,
        idle: float | None = None,
        timeout: float | None = None,
    ) -> Frame:
        """Return the next frame.

        Args:
            bounds: Largest length of a payload in bytes, of each kind that is expected.
            number: Round that it must be of; None accepts any.
            idle: Seconds to wait for its first byte; the timeout when None.
            timeout: Seconds for the rest, in place of the connection's, beside those that a slow
                connection needs.

        Raises:
            FrameError: It is not an expected frame.
            TransportError: The peer is gone, or does not send it in time.
        """
        largest = max(bounds.values())
        if idle is not None:
            self._wait(idle)
        timeout = self._timeout if timeout is None else timeout
        self._until = time.monotonic() + timeout + largest / SLOWEST
        return read_frame(self._read, bounds, key=self._key, number=number)

    def close(self) -> None:
        """Close the connection; wakes a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, idle: float) -> None:
        try:
            self._socket.settimeout(idle)
            is_there = self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise TransportError(f"no request within {idle:g} s: {error}") from error
        if not is_there:
            raise TransportError("connection closed by the peer")

    def _read(self, most: int) -> bytes:
        seconds_left = min(self._timeout, self._until - time.monotonic())
        if seconds_left <= 0:
            raise TransportError("the peer sends too slowly")
        end = time.monotonic() + seconds_left
        while True:
            try:
                self._socket.settimeout(max(min(_LOOK, end - time.monotonic()), 1e-3))
                return self._socket.recv(min(most, _SMALL * 4))
            except TimeoutError as error:
                self._check()
                if time.monotonic() >= end:
                    raise TransportError(f"connection lost while receiving: {error}") from error
            except OSError as error:
                raise TransportError(f"connection lost while receiving: {error}") from error


def encode_collect(kind: Kind, members: tuple[int, ...]) -> bytes:
    """Return the payload of COLLECT.

    Args:
        kind: Kind of the messages.
        members: Members whose message the client has.
    """
    return bytes([kind]) + encode_numbers(members)


def decode_collect(payload: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the kind and the members of `encode_collect`.

    Raises:
        FrameError: They are not there.
    """
    members, remaining = decode_numbers(payload[1:])
    if remaining:
        raise FrameError(f"{len(remaining)} bytes follow the request")
    return payload[0], members


def encode_found(newest: int | None, kind: Kind, closing: Closing | None) -> bytes:
    """Return the payload of the answer to COLLECT.

    Args:
        newest: Newest round that has ended.
        kind: Kind of the messages.
        closing: How the step closed.
    """
    number = 0 if newest is None else newest + 1
    return _NEWEST.pack(number) + (b"" if closing is None else closing.encode(kind))


def decode_found(payload: bytes, kind: Kind) -> tuple[int | None, Closing | None]:
    """Return the newest round and the closing of `encode_found`.

    Args:
        payload: Payload of the answer.
        kind: Kind that was asked for.

    Raises:
        FrameError: They are not there, or of another kind.
    """
    if len(payload) < _NEWEST.size:
        raise FrameError("answer is cut")
    (number,) = _NEWEST.unpack_from(payload)
    newest = number - 1 if number else None
    remaining = payload[_NEWEST.size :]
    if not remaining:
        return newest, None
    found, closing = decode_closing(remaining)
    if found != kind:
        raise FrameError(f"closing is of {found.name}, not {kind.name}")
    return newest, closing
