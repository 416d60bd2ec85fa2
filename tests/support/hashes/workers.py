# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that compute rows: each takes the next row, and a dead one is replaced.

A process ends after some rows, because compiled programs are mapped memory, of which it may have
only so many pieces. A row that ends its process is tried once more, in another one: XLA for the CPU
has hung where it began collectives in another order on each device.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.hashes.files import ERROR, Parts

ROWS_OF_A_PROCESS = 25
_SPAWN = multiprocessing.get_context("spawn")


def compute(name: str) -> Parts:
    """Compute a row in this process, and return the hashes of its parts or its error."""
    import jax

    from tests.support.hashes.rows import table

    with tempfile.TemporaryDirectory() as directory:
        try:
            parts = table()[name](pathlib.Path(directory))
        except (Exception, SystemExit) as error:  # recorded under the name of the row
            traceback.print_exc()
            message = str(error).strip().partition("\n")[0]
            return {ERROR: f"{type(error).__name__}: {message}".replace(directory, "DIRECTORY")}
        finally:
            jax.clear_caches()
            _restore_cache()
    return parts if parts else {ERROR: "ValueError: the row has no parts"}


def compute_all(
    names: Sequence[str],
    *,
    workers: int,
    logs: pathlib.Path,
    report: Callable[[str, Parts, float], None],
) -> dict[str, Parts]:
    """Compute rows in processes.

    Args:
        names: Rows, in the order in which they begin.
        workers: Number of processes.
        logs: Directory of what rows print.
        report: Called with the name, parts and seconds of each row.
    """
    logs.mkdir(parents=True, exist_ok=True)
    queue = collections.deque(names)
    tries: collections.Counter[str] = collections.Counter()
    results: dict[str, Parts] = {}
    processes: list[_Worker] = []
    while True:
        while queue and len(processes) < workers:
            processes.append(_Worker.start(logs / f"{len(processes)}.txt"))
        for worker in processes:
            if worker.row is None and queue:
                worker.give(queue.popleft())
        for worker in [worker for worker in processes if worker.row is None]:
            worker.end()
            processes.remove(worker)
        if not processes:
            break
        ready = set(wait([worker.pipe for worker in processes]))
        for worker in [worker for worker in processes if worker.pipe in ready]:
            name, seconds = str(worker.row), time.monotonic() - worker.since
            try:
                parts = worker.pipe.recv()
            except EOFError:
                worker.process.join()
                processes.remove(worker)
                tries[name] += 1
                if tries[name] == 1:
                    queue.append(name)
                    continue
                parts = {ERROR: f"process ended with exit code {worker.process.exitcode}, twice"}
            results[name] = parts
            report(name, parts, seconds)
            worker.row = None
            if worker in processes and worker.is_old:
                worker.end()
                processes.remove(worker)
    return results


@dataclasses.dataclass(eq=False)
class _Worker:
    """A process and the row that it computes."""

    process: Any
    pipe: Connection
    row: str | None = None
    since: float = 0.0
    rows: int = 0

    @classmethod
    def start(cls, log: pathlib.Path) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_work, args=(theirs, str(log)), daemon=False)
        process.start()
        theirs.close()
        return cls(process, ours)

    @property
    def is_old(self) -> bool:
        return self.rows >= ROWS_OF_A_PROCESS

    def give(self, name: str) -> None:
        self.row, self.since = name, time.monotonic()
        self.rows += 1
        self.pipe.send(name)

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def _work(pipe: Connection, log: str) -> None:
    """Compute the rows that come through a pipe; what they print goes to a file."""
    file = open(log, "a")  # until the process ends
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
    while (name := pipe.recv()) is not None:
        print(f"=== {name}", flush=True)
        pipe.send(compute(name))


def _restore_cache() -> None:
    """Pipelines on CPUs keep their programs out of the cache: see sharding/pipeline/executor.py."""
    import jax

    if seconds := os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))
