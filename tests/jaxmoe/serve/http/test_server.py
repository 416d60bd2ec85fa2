# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Connections that do nothing, that are too many, whose clients do not read or go away."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import httpx2 as httpx
import pytest

from jaxmoe.serve.http.server import tell_accept_errors
from tests.support.endpoint import serving


async def _endless(scope, receive, send):
    """An application that writes more than sockets hold."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000):
        await send({"type": "http.response.body", "body": b"x" * 2**14, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _opened(address, text=b""):
    place = urllib.parse.urlsplit(address)
    opened = socket.create_connection((place.hostname, place.port), timeout=5)
    opened.sendall(text)
    return opened


def _is_closed(opened, seconds=5.0):
    """Whether the server closes a connection within a time."""
    opened.settimeout(seconds)
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "text",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "half a line", "half a header"],
)
def test_connections_without_a_request_are_closed(text):
    with serving(header_seconds=0.3) as (address, _, _), _opened(address, text) as opened:
        begin = time.monotonic()
        assert _is_closed(opened) and time.monotonic() - begin < 3


def test_half_a_header_behind_an_answer_is_closed():
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(header_seconds=0.3) as (address, _, _), _opened(address, whole) as opened:
        assert opened.recv(12) == b"HTTP/1.1 200"
        opened.sendall(b"GET /hea")
        with contextlib.suppress(ConnectionResetError):
            while opened.recv(65536):
                pass


def test_those_that_wait_longest_make_room_for_others(caplog):
    """Also for /health and for answers; the log has one line."""
    with (
        serving(connections=10) as (address, _, _),
        contextlib.ExitStack() as stack,
    ):
        idle = [stack.enter_context(_opened(address, b"G")) for _ in range(40)]
        assert _is_closed(idle[0]) and _is_closed(idle[20])
        assert httpx.get(f"{address}/health", timeout=5).json() == {"status": "ok"}
        asked = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=asked, timeout=5).status_code == 200
        assert not _is_closed(idle[-1], 0.1)
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 1 and "at most 10 are held" in told[0]


def test_health_has_room_where_all_connections_are_answered():
    stream = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    async def app(scope, receive, send):
        if scope["path"] == "/":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well"})

    with (
        serving(app=app, connections=8, header_seconds=60.0) as (address, _, _),
        contextlib.ExitStack() as stack,
    ):
        busy = [stack.enter_context(_opened(address, stream)) for _ in range(8)]
        time.sleep(0.3)
        assert httpx.get(f"{address}/health", timeout=5).text == "well"
        refused = httpx.get(f"{address}/other", timeout=5)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert not _is_closed(busy[0], 0.1)


def test_a_client_that_does_not_read_is_closed():
    text = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        serving(app=_endless, stalled_seconds=0.4) as (address, _, _),
        _opened(address, text) as opened,
    ):
        time.sleep(1.5)
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while part := opened.recv(2**20):
                got += len(part)
        assert got < 2000 * 2**14


def test_a_client_that_goes_away_while_it_sends_is_one_line(caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with serving() as (address, _, _):
        _opened(address, head).close()
        for _ in range(100):
            if caplog.records:
                break
            time.sleep(0.05)
        assert httpx.get(f"{address}/health", timeout=5).status_code == 200
    told = [(one.getMessage(), one.exc_info) for one in caplog.records]
    assert told == [("127.0.0.1 went away while it sent a request", None)]


def test_errors_of_accepting_are_told_once(caplog):
    loop = asyncio.new_event_loop()
    try:
        tell_accept_errors(loop)
        for _ in range(100):
            error = OSError(24, "Too many open files")
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": error}
            )
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert "ulimit -n" in caplog.text
        loop.call_exception_handler({"message": "another error"})
        assert caplog.records[-1].getMessage() == "another error"
    finally:
        loop.close()


_SERVED = """
import asyncio, socket
from experiments.serve import ServeConfig, _serve
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.app import Endpoint
from jaxmoe.serve.http.served import Served
from tests.jaxmoe.serve.http.test_server import _endless
from tests.support.endpoint import Speller, Text
listening = socket.create_server(("127.0.0.1", 0))
with Engine(Speller(), codec=Text()) as engine:
    served = Served(name="speller", engine=engine, codec=Text())
    endpoint = Endpoint(served)
    endpoint.app = _endless
    asyncio.run(_serve(ServeConfig(drain=1.0), endpoint, served, listening))
"""


@pytest.mark.slow
def test_a_signal_beside_a_client_that_does_not_read_ends_within_the_drain():
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVED],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    try:
        line = process.stdout.readline()
        while "ready at" not in line:
            assert line, "it has ended"
            line = process.stdout.readline()
        address = line.split()[-1]
        with _opened(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            time.sleep(1.0)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
            assert time.monotonic() - begin < 4.0
        assert process.returncode == 0 and "before all clients had read" in out
        assert "Traceback" not in out
    finally:
        process.kill()
