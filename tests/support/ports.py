# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ports at which the processes that a test starts meet; each is given once.

A port that the kernel chose is free again until it is used, and the kernel may give it to a test
beside this one, or to a connection that goes out. These lie below those that it chooses from, and
each worker of pytest has its own.
"""

import itertools
import os
import socket

_FIRST, _SHARE, _WORKERS = 20000, 500, 24
_given = itertools.count(os.getpid())


def free_port() -> int:
    """One of loopback that nobody listens at."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for number in itertools.islice(_given, _SHARE):
        port = _FIRST + _SHARE * worker + number % _SHARE
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"none of the {_SHARE} ports of worker {worker} is free")
