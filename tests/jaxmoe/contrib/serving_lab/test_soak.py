# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two thousand requests of all kinds to one server, which is killed and started again halfway."""

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import httpx2 as httpx
import pytest

from jaxmoe.contrib.serving_lab.client import Client
from tests.support.ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[4]
REQUESTS, THREADS = 2000, 8
BAD = (
    ({"prompt": [300]}, 400),
    ({"prompt": "a", "use_beam_search": True}, 400),
    ({"prompt": "a" * 128}, 400),
    ({"prompt": "a", "model": "x"}, 404),
    ({}, 400),
)
KINDS = ("stream", "stream", "whole", "several", "gone_stream", "gone_whole", "bad")


@contextlib.contextmanager
def _server(port):
    """Yield a server in a process of its own that is ready; kill it at the end."""
    command = [sys.executable, "-m", "tests.support.endpoint", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("http")
            assert _wait(lambda: _is_up(port))
            yield process
        finally:
            process.kill()


def _is_up(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def _wait(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _status(pid):
    """Return the threads and the resident megabytes of a process."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["Threads"]), int(found["VmRSS"].split()[0]) / 1024


def _letters(rng, count):
    return "".join(rng.choices("abcdefgh", k=count))


def _ask(client, url, kind, rng):
    """Send one request of a kind and return its outcome; what is answered must be right."""
    prompt = "abcdefgh" * rng.randrange(3) + _letters(rng, rng.randint(1, 20))
    count = rng.randint(1, 24)
    asked = {"prompt": prompt, "max_tokens": count, "seed": 0}
    if kind == "stream":
        found = client.complete({"prompt": prompt, "max_tokens": count, "seed": 0})
        assert found.failure or found.num_written == count
        return f"failed: {found.failure}" if found.failure else "done"
    try:
        if kind == "gone_stream":
            with client.http.stream("POST", url, json=asked | {"stream": True}) as parts:
                if parts.status_code == 200:
                    next(parts.iter_lines())
            return "gone" if parts.status_code == 200 else f"failed: {parts.status_code}"
        if kind == "gone_whole":
            limits = httpx.Timeout(30.0, read=0.004)
            client.http.post(url, json=asked | {"max_tokens": 60}, timeout=limits)
            return "done"
        if kind == "bad":
            body, status = BAD[rng.randrange(len(BAD))]
            found = client.http.post(url, json=body)
            assert found.status_code == status, found.text
            return "refused"
        several = {"n": 3, "stop": ["cde"]} if kind == "several" else {}
        found = client.http.post(url, json=asked | several)
        if found.status_code != 200:
            return f"failed: {found.status_code}"
        first = found.json()["choices"][0]["text"]
        spelled = [chr(97 + (ord(prompt[-1]) - 97 + n) % 26) for n in range(1, count + 1)]
        assert first == "".join(spelled).partition("cde" if several else "!")[0]
        return "done"
    except httpx.ReadTimeout:
        return "gone"
    except httpx.TransportError as error:
        return f"failed: {type(error).__name__}"


class _Plain(Client):
    """The client of `serving load`, with a plain one beside it for what that never does."""

    def __init__(self, address):
        super().__init__(address, timeout=30)
        self.http = httpx.Client(timeout=30)


def _drive(address, numbers, outcomes, errors, is_down):
    """Send requests until none is left; those that fail while the server is down wait for it."""
    client = _Plain(address)
    with client.http:
        while True:
            try:
                number = numbers.popleft()
            except IndexError:
                return
            rng = random.Random(number)
            kind = KINDS[number % len(KINDS)]
            try:
                outcome = _ask(client, f"{address}/v1/completions", kind, rng)
            except Exception as error:
                outcome = f"wrong: {kind} {error!r}"
                errors.append(outcome)
            outcomes.append((number, outcome))
            if outcome.startswith("failed"):
                while is_down.is_set():
                    time.sleep(0.02)


@contextlib.contextmanager
def _sending(address, numbers, outcomes, errors, is_down):
    """Yield threads that send; they end with the test, whatever it finds."""
    threads = [
        threading.Thread(
            target=_drive, args=(address, numbers, outcomes, errors, is_down), name=f"soak {n}"
        )
        for n in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        numbers.clear()
        is_down.clear()
        for thread in threads:
            thread.join()


def _settled(address):
    """Return the numbers of a server once it holds no request."""

    def stats():
        return json.loads(httpx.get(f"{address}/stats").text)

    assert _wait(lambda: not (stats()["num_running"] or stats()["num_waiting"]))
    return stats()


def _check(found):
    """Check that a server has no page in use and has ended every request once."""
    assert found["pages_used"] == 0
    assert sum(found["num_ended"].values()) == found["num_submitted"]
    assert set(found["num_ended"]) <= {"length", "stop", "cancelled"}, found["num_ended"]


@pytest.mark.slow
def test_two_thousand_requests_and_a_kill_leave_nothing_behind():
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    numbers = collections.deque(range(REQUESTS))
    outcomes, errors, is_down = [], [], threading.Event()
    own_threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        with _server(port) as process:
            threads = stack.enter_context(_sending(address, numbers, outcomes, errors, is_down))
            assert _wait(lambda: len(outcomes) >= REQUESTS // 4 or errors)
            is_down.set()
            process.send_signal(signal.SIGKILL)
            process.wait()
        process = stack.enter_context(_server(port))
        is_down.clear()
        assert _wait(lambda: len(outcomes) >= REQUESTS // 2 or errors)
        (early_threads, early), own = _status(process.pid), _status(os.getpid())[1]
        for thread in threads:
            thread.join()
        found = _settled(address)
        (late_threads, late), own_late = _status(process.pid), _status(os.getpid())[1]
        final = Client(address).complete({"prompt": "a", "max_tokens": 4, "seed": 0})
    assert not errors, errors[:3]
    assert sorted(number for number, _ in outcomes) == list(range(REQUESTS))
    kinds = collections.Counter(outcome.partition(":")[0] for _, outcome in outcomes)
    # A request fails while the server is down only; then its thread waits for the next one.
    assert 0 < kinds["failed"] <= 2 * THREADS, collections.Counter(o for _, o in outcomes)
    assert kinds["done"] > REQUESTS // 2 and kinds["gone"] > 50 and kinds["refused"] > 100
    _check(found)
    assert found["num_ended"].get("cancelled", 0) > 10
    assert not final.failure and final.num_written == 4
    assert late_threads <= early_threads, (early_threads, late_threads)
    print(f"server {early:.1f} then {late:.1f} MB, clients {own:.1f} then {own_late:.1f}, {kinds}")
    assert late - early < 20 and own_late - own < 20
    assert threading.active_count() == own_threads
