# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Free ports for the processes of a test; each is used once."""

import itertools
import os
import socket

_FIRST, _SHARE, _WORKERS = 20000, 500, 24
_given = itertools.count(os.getpid())


def free_port() -> int:
    """Return a free port of the loopback interface."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for number in itertools.islice(_given, _SHARE):
        port = _FIRST + _SHARE * worker + number % _SHARE
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"none of the {_SHARE} ports of worker {worker} is free")
