# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes directories in shared memory that outlive the processes which write to them.

    <parent>/jaxmoe-<id>/process<i>      a directory for each process
    <parent>/jaxmoe-<id>/held            locked while the supervisor is alive

They are deleted when the context ends. Directories of a supervisor that was killed are deleted by
the next one, which recognises them by the free lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from jaxmoe.messages import write

PARENT = "/dev/shm"
"""Directory in memory, on Linux."""
SNAPSHOTS = "JAXMOE_SNAPSHOTS"
"""Environment variable with the directory of a process."""
ELASTIC = "JAXMOE_ELASTIC"
"""Environment variable of runs that take the mesh that fits the processes which are left."""
_PREFIX = "jaxmoe-"
_LOCK = "held"


@contextlib.contextmanager
def memory_directories(parent: str, processes: Sequence[int]) -> Iterator[dict[int, pathlib.Path]]:
    """Yield {process: directory}; delete all of them afterwards.

    Args:
        parent: Directory in memory; if it is not writable, the temporary directory with a warning.
        processes: Numbers of the processes on this host.
    """
    where = pathlib.Path(parent)
    _delete_abandoned(where)
    try:
        root = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    except OSError as error:
        fallback = tempfile.gettempdir()
        write(
            f"warning: no directory in {parent} ({error.strerror}): snapshots go to {fallback},"
            f" which"
            " may be a disk; choose one in memory with --snapshots"
        )
        root = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=fallback))
    try:
        with _held(root):
            directories = {process: root / f"process{process}" for process in processes}
            for directory in directories.values():
                directory.mkdir()
            yield directories
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _held(root: pathlib.Path) -> Iterator[None]:
    # Locked before it is renamed: a directory with a free lock may be deleted.
    pending = root / f"{_LOCK}.pending"
    with pending.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.replace(pending, root / _LOCK)
        yield


def _delete_abandoned(parent: pathlib.Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with (
            contextlib.suppress(OSError),
            lock.open() as file,
        ):  # held by another supervisor, or deleted meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
