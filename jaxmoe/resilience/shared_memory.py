# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Directories in this host's memory that outlive the processes which write into them.

    <parent>/jaxmoe-<id>/process<i>      a directory for each process
    <parent>/jaxmoe-<id>/held            locked for as long as somebody answers for them

They are deleted when the context ends. What a supervisor left that was itself killed holds memory
until the next one starts, which finds it by the lock that nobody has.
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
"""Memory that is a directory, on Linux."""
SNAPSHOTS = "JAXMOE_SNAPSHOTS"
"""The environment variable with the directory of a process."""
_PREFIX, _LOCK = "jaxmoe-", "held"


@contextlib.contextmanager
def memory_directories(parent: str, processes: Sequence[int]) -> Iterator[dict[int, pathlib.Path]]:
    """{process: its directory}, of which nothing is left afterwards.

    Args:
        parent: in memory; another is taken, with a warning, where that is not to be had.
        processes: numbers of those on this host.
    """
    where = pathlib.Path(parent)
    _delete_abandoned(where)
    try:
        root = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    except OSError as error:
        other = tempfile.gettempdir()
        write(
            f"warning: no directory in {parent} ({error.strerror}): snapshots go to {other}, which"
            " may be a disk; choose one in memory with --snapshots"
        )
        root = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=other))
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
    # Locked before it has its name: whoever sees it without a lock may delete the directory.
    pending = root / f"{_LOCK}.pending"
    with pending.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.replace(pending, root / _LOCK)
        yield


def _delete_abandoned(parent: pathlib.Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:  # somebody else's, or just gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
