# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Coordinator`: the board of sites that are connected by TCP.

Sites connect to it, post their messages and collect those of the others. It keeps the messages of
the current round in memory, and records how each step closed.

- A peer that sends garbage, has no key, or speaks for another member is disconnected; so is one
  that sends nothing for `hello` seconds after it connected. Of those that have not spoken yet, the
  oldest is disconnected when there are more than 64. Other connections are not affected.
- Lengths are checked before anything is allocated.
- With a lease (`lease.py`) the second coordinator is refused. With closings in a
  directory, a coordinator that is started again knows how rounds closed; the sites post their
  messages again.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import logging
import re
import socket
import struct
import threading
import time

from jaxmoe.contrib.slow_links.sites.connections import (
    COLLECT_BYTES,
    Connection,
    decode_collect,
    encode_found,
)
from jaxmoe.contrib.slow_links.sites.errors import FrameError, LeftOutError, TransportError
from jaxmoe.contrib.slow_links.sites.frames import COORDINATOR, Frame, Kind, encode_header
from jaxmoe.contrib.slow_links.sites.lease import CoordinatorLease, new_epoch
from jaxmoe.contrib.slow_links.sites.transport import (
    CLOSING_BYTES,
    KEPT_ROUNDS,
    Closing,
    Closings,
    MessageSizes,
    decode_closing,
)

logger = logging.getLogger(__name__)

_PENDING = 64
_OPEN_ROUNDS = 3
_PAUSE = 0.05
EPOCH = struct.Struct("!Q")
"""Payload of the answer to HELLO."""


class MemoryClosings:
    """Records closings in memory, for one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closings: dict[tuple[int, Kind], Closing] = {}
        self._newest: int | None = None

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record a closing unless there is one, as `Transport.decide` does."""
        with self._lock:
            if (saved := self._closings.get((number, kind))) is not None:
                return saved
            if self._newest is not None and self._newest > number:
                raise LeftOutError(
                    f"round {self._newest} has ended, and round {number} was not closed"
                )
            self._closings[number, kind] = closing
            if kind == Kind.FINGERPRINT:
                self._newest = number
                for key in [k for k in self._closings if k[0] < number - KEPT_ROUNDS]:
                    del self._closings[key]
            return closing

    def find(self, number: int, kind: Kind) -> Closing | None:
        """Return the record of a step, None while there is none."""
        with self._lock:
            return self._closings.get((number, kind))

    def newest(self) -> int | None:
        """Return the newest round that has ended."""
        with self._lock:
            return self._newest


class Coordinator:
    """A board that is served by TCP, in threads of this process.

    Args:
        address: host:port to listen on; port 0 chooses a free one.
        sizes: Largest sizes of messages.
        key: Shared secret; needed where other hosts can connect.
        lease: Lease of this coordinator; it is released at the end.
        closings: Record of closings; in memory when None.
        timeout: Seconds without progress after which a connection counts as lost.
        hello: Seconds for the first request of a connection.
        idle: Seconds between requests of a connection.

    Raises:
        ValueError: The address is not host:port, or reachable from other hosts without a key.
        TransportError: The address is in use, by another coordinator perhaps.
    """

    def __init__(
        self,
        address: str,
        sizes: MessageSizes,
        *,
        key: bytes | None = None,
        lease: CoordinatorLease | None = None,
        closings: Closings | None = None,
        timeout: float = 30.0,
        hello: float = 5.0,
        idle: float = 120.0,
    ):
        host, port = host_and_port(address)
        if key is None and not _is_loopback(host):
            raise ValueError(
                f"sites address={address} can be reached from other hosts: set"
                " $JAXMOE_ISLANDS_KEY to the same secret on all of them, or listen on 127.0.0.1"
            )
        self._key = key
        self._lease = lease
        self._timeout = timeout
        self._hello = hello
        self._idle = idle
        self.epoch = lease.epoch if lease else new_epoch()
        self._closings: Closings = closings or MemoryClosings()
        self._post_bounds = sizes.bounds()
        self._bounds = {
            **self._post_bounds,
            Kind.CLOSING: CLOSING_BYTES,
            Kind.COLLECT: COLLECT_BYTES,
            Kind.HELLO: 0,
        }
        self._lock = threading.Lock()
        self._posts: dict[tuple[int, Kind], dict[int, tuple[bytes, bytes]]] = {}
        self._pending: collections.deque[Connection] = collections.deque()
        self._connections: set[Connection] = set()
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, port), family=family, backlog=_PENDING)
        except OSError as error:
            raise TransportError(
                f"sites address={address} cannot be listened on: {error.strerror}"
            ) from error
        port = self._server.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """host:port on which it listens."""
        threading.Thread(target=self._accept, name="sites accept", daemon=True).start()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, disconnect all sites and release the lease; twice is a no-op."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in connections:
            connection.close()
        if self._lease is not None:
            self._lease.release()

    def _accept(self) -> None:
        while True:
            try:
                connected, peer = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_PAUSE)  # the peer was gone before, or there are too many open files
                continue
            connection = Connection(connected, self._timeout, self._key)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
                self._pending.append(connection)
                oldest = self._pending.popleft() if len(self._pending) > _PENDING else None
            if oldest is not None:
                oldest.close()
            threading.Thread(
                target=self._serve, args=(connection, peer), name=f"sites {peer}", daemon=True
            ).start()

    def _serve(self, connection: Connection, peer: object) -> None:
        try:
            hello = connection.receive({Kind.HELLO: 0}, idle=self._hello, timeout=self._hello)
            with self._lock:
                if connection in self._pending:
                    self._pending.remove(connection)
            self._answer(connection, 0, EPOCH.pack(self.epoch))
            while True:
                frame = connection.receive(self._bounds, idle=self._idle)
                if frame.member != hello.member:
                    raise FrameError(f"member {hello.member} speaks for {frame.member}")
                try:
                    self._handle(connection, frame)
                except LeftOutError as error:
                    self._reply(connection, Kind.REFUSED, frame.number, str(error).encode())
        except FrameError as error:
            logger.warning("sites: %s is disconnected: %s", peer, error)
        except TransportError as error:
            logger.info("sites: %s is disconnected: %s", peer, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                if connection in self._pending:
                    self._pending.remove(connection)

    def _handle(self, connection: Connection, frame: Frame) -> None:
        """Answer one request.

        Raises:
            FrameError: The request is not valid.
            LeftOutError: It comes too late.
            TransportError: The connection or the lease is lost.
        """
        if frame.epoch != self.epoch:
            reason = f"coordinator has epoch {self.epoch}, not {frame.epoch}: connect again"
            self._reply(connection, Kind.REFUSED, frame.number, reason.encode())
            raise TransportError(reason)
        if frame.kind == Kind.COLLECT:
            self._collect(connection, frame)
        elif frame.kind == Kind.CLOSING:
            kind, proposal = decode_closing(frame.payload)
            if self._lease is not None:
                self._lease.fence()
            closing = self._closings.decide(frame.number, kind, proposal)
            if kind == Kind.FINGERPRINT:
                self._forget(frame.number)
            self._answer(connection, frame.number, encode_found(None, kind, closing))
        elif frame.kind in self._post_bounds:
            self._post(frame)
            self._answer(connection, frame.number, b"")
        else:
            raise FrameError(f"{frame.kind.name} comes first, once")

    def _post(self, frame: Frame) -> None:
        newest = self._closings.newest()
        with self._lock:
            numbers = {number for number, _ in self._posts} | {frame.number}
            is_known = newest is None or newest <= frame.number <= newest + 1
            if not is_known or len(numbers) > _OPEN_ROUNDS:
                raise LeftOutError(f"round {frame.number} is not open; {newest} was the last one")
            posts = self._posts.setdefault((frame.number, frame.kind), {})
            # The frame as its member signed it.
            posts.setdefault(frame.member, (encode_header(frame, self._key), frame.payload))

    def _collect(self, connection: Connection, frame: Frame) -> None:
        asked, members = decode_collect(frame.payload)
        if asked not in self._post_bounds:
            raise FrameError(f"messages of kind {asked} are not posted")
        kind = Kind(asked)
        # Looked for first, so that a round that ended before has its closing in the answer.
        newest = self._closings.newest()
        with self._lock:
            posts = dict(self._posts.get((frame.number, kind), {}))
        for member, parts in posts.items():
            if member not in members:
                connection.send_raw(*parts)
        closing = self._closings.find(frame.number, kind)
        self._answer(connection, frame.number, encode_found(newest, kind, closing))

    def _forget(self, number: int) -> None:
        with self._lock:
            for key in [key for key in self._posts if key[0] < number]:
                del self._posts[key]

    def _answer(self, connection: Connection, number: int, payload: bytes) -> None:
        self._reply(connection, Kind.ANSWER, number, payload)

    def _reply(self, connection: Connection, kind: Kind, number: int, payload: bytes) -> None:
        connection.send(
            Frame(kind=kind, number=number, member=COORDINATOR, payload=payload, epoch=self.epoch)
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 address is in brackets.

    Raises:
        ValueError: It is not host:port.
    """
    match = re.fullmatch(r"\[?(?P<host>[^\]]+?)\]?:(?P<port>\d+)", address)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"sites address={address} is not host:port, such as 10.0.0.1:8477")
    return match["host"], int(match["port"])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
