# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Server of the endpoint: uvicorn, with bounds on connections that do nothing.

A connection without a whole header within `header_seconds` is closed, and so is one whose client
reads nothing for `stalled_seconds`. Of more than `connections` the one that has waited longest for
a request is closed; where all of them are being answered, a few more are taken for /health alone.
Errors of accepting are told once a minute. Before the server begins, `StartingPort` answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from typing import Any

from jaxmoe.optional import require
from jaxmoe.serve.http.app import Endpoint, EndpointConfig
from jaxmoe.serve.http.errors import HTTPError

logger = logging.getLogger(__name__)

_ROOM = 16
"""Connections beyond the bound that are answered on /health alone."""
_OTHER_FILES = 64
"""Descriptors that are left to the rest of the process."""
_LEAST = 8
_EVERY = 60.0
"""Connections at least, and seconds between two lines of one kind."""
_HEALTH = "/health"
_RETRY = 5
"""Seconds after which a client may ask a server again that is starting."""
_PATIENCE = 0.2
"""Seconds to wait for a connection, or for what it sends, before the server begins."""
_PART = 2**16
_PARTS = 32
"""Bytes that are read together, and how often, of a request that is refused."""


def make_server(endpoint: Endpoint, *, log_level: str = "warning") -> Any:
    """Return a `uvicorn.Server` of an endpoint; the caller awaits `serve(sockets=[...])`.

    Args:
        endpoint: The application with its limits.
        log_level: Least level that uvicorn logs.

    Raises:
        MissingPackageError: uvicorn is not installed.
    """
    uvicorn = require("uvicorn", "serve")
    base = require("uvicorn.protocols.http.h11_impl", "serve").H11Protocol
    bounds = _ConnectionBounds(endpoint.config)
    server = uvicorn.Server(
        uvicorn.Config(
            endpoint.app,
            http=_protocol(base, bounds),
            ws="none",
            log_level=log_level,
            access_log=False,
            lifespan="off",
        )
    )
    server.capture_signals = contextlib.nullcontext  # the caller drains first
    return server


class StartingPort:
    """Answers every request at a socket with 503, until the block ends and a server takes over.

        with StartingPort(listening):
            ...                                 # read the model, compile

    Connections that come between the two wait for the server.
    """

    def __init__(self, listening: socket.socket):
        """Prepare the answer.

        Args:
            listening: Socket that listens.
        """
        error = HTTPError(
            503, "the server is starting: ask again", code="starting", retry_after=_RETRY
        )
        body = json.dumps(error.body).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {_RETRY}\r\nConnection: close\r\n\r\n"
        )
        self._answer = head.encode() + body
        self._listening = listening
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="jaxmoe-starting", daemon=True)

    def __enter__(self) -> StartingPort:
        self._listening.settimeout(_PATIENCE)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._listening.settimeout(None)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # TimeoutError among them
                connection, _ = self._listening.accept()
                with connection, contextlib.suppress(OSError):
                    self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        """Answer one request, and read what is left of it, so that the answer is not lost."""
        connection.settimeout(_PATIENCE)
        connection.recv(_PART)
        connection.sendall(self._answer)
        connection.shutdown(socket.SHUT_WR)
        for _ in range(_PARTS):
            if not connection.recv(_PART):
                return


def close_connections(server: Any) -> None:
    """Close all connections at once; what their clients have not read is lost.

    Args:
        server: Server of `make_server`.
    """
    for connection in list(server.server_state.connections):
        connection.transport.abort()


def tell_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Let a loop tell errors of accepting a connection in one line, once a minute.

    Args:
        loop: The loop of the server; other errors are handled as before.
    """
    tell = _Sometimes()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        tell(
            "connections cannot be accepted (%s): raise the limit of open files (ulimit -n)",
            context.get("exception"),
        )

    loop.set_exception_handler(handle)


class _Sometimes:
    """Logs a warning, and not again within a minute."""

    def __init__(self):
        self._next = 0.0

    def __call__(self, message: str, *values: Any) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            logger.warning(message, *values)


class _ConnectionBounds:
    """Connections of a server, and which of them wait for a request."""

    def __init__(self, config: EndpointConfig):
        self.config = config
        self.most = min(config.connections, _free_files() - _ROOM - _OTHER_FILES)
        self.most = max(self.most, _LEAST)
        self.waiting: dict[Any, None] = {}
        """Connections that wait, those that have waited longest first."""
        self._tell = _Sometimes()

    def make_room(self, new: Any, number: int) -> bool:
        """Close a connection if there are too many; return whether the new one may ask anything.

        Args:
            new: Connection that was accepted.
            number: Connections with it.
        """
        if number <= self.most:
            return True
        self._tell(
            "%d connections are open, at most %d are held: those that wait longest are closed",
            number,
            self.most,
        )
        oldest = next((connection for connection in self.waiting if connection is not new), None)
        if oldest is not None:
            self.waiting.pop(oldest)
            oldest.transport.abort()
            return True
        if number > self.most + _ROOM:
            new.transport.abort()
        return False


def _free_files() -> int:
    """Return the number of descriptors that this process may still open."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return 2**20
        return limit - len(os.listdir("/dev/fd"))
    except OSError:  # no way to know
        return 2**20


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer that there are too many connections: an application of ASGI."""
    responses = require("starlette.responses", "serve")
    message = "the server has too many connections: ask again soon"
    error = HTTPError(503, message, code="too_many_connections", retry_after=1)
    headers = {**error.headers, "Connection": "close"}
    await responses.JSONResponse(error.body, error.status, headers)(scope, receive, send)


def _protocol(base: Any, bounds: _ConnectionBounds) -> Any:
    """Return the protocol of uvicorn with time limits and a bound on connections."""

    class Bounded(base):
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            """Begin to wait for a request."""
            super().connection_made(transport)
            self._slow: asyncio.TimerHandle | None = None
            self._stalled: asyncio.TimerHandle | None = None
            if not bounds.make_room(self, len(self.connections)):
                self.app = self._health_alone(self.app)
            self._wait_or_work()

        def connection_lost(self, exc: Exception | None) -> None:
            """End all timers."""
            bounds.waiting.pop(self, None)
            for timer in (self._slow, self._stalled):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Read what has arrived."""
            super().data_received(data)
            self._wait_or_work()

        def on_response_complete(self) -> None:
            """Begin to wait for the next request."""
            super().on_response_complete()
            self._wait_or_work()

        def pause_writing(self) -> None:
            """Begin to wait for the client to read."""
            super().pause_writing()
            if self._stalled is None:
                seconds = bounds.config.stalled_seconds
                self._stalled = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            """Go on: the client has read."""
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _wait_or_work(self) -> None:
            """Keep the timer of a connection that waits for a header, and no other."""
            if self.cycle is not None and not self.cycle.response_complete:
                bounds.waiting.pop(self, None)
                if self._slow is not None:
                    self._slow.cancel()
                    self._slow = None
            elif self._slow is None:
                bounds.waiting[self] = None
                seconds = bounds.config.header_seconds
                self._slow = self.loop.call_later(seconds, self.transport.abort)

        def _health_alone(self, app: Any) -> Any:
            """Return an application that answers /health."""

            async def answer(scope: Any, receive: Any, send: Any) -> None:
                chosen = app if scope.get("path") == _HEALTH else _refuse
                await chosen(scope, receive, send)

            return answer

    return Bounded
