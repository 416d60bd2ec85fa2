# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Leases the closing of rounds to one coordinator at a time, and numbers coordinators.

The lease is a file, locked with flock while its holder is alive, with the epoch of the holder:
larger than that of every earlier one. The second coordinator on the same file is refused. A holder
whose file was replaced, or has another epoch, closes no round any more (`fence`).

Sites refuse frames of an older epoch than they have seen, so that a coordinator that was replaced
is not heard either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time

from jaxmoe.contrib.slow_links.sites.errors import TransportError


class CoordinatorLease:
    """A lease on a file; held until `release`.

    Args:
        path: File of the lease; made if need be.

    Raises:
        TransportError: Another coordinator holds it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise TransportError(f"{path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.epoch = new_epoch(self._read())
            os.pwrite(self._file, b"%d\n" % self.epoch, 0)
            os.fsync(self._file)
        except BlockingIOError as error:
            os.close(self._file)
            raise TransportError(
                f"{path} is held by another coordinator: stop it, or give this one another address"
                " and lease"
            ) from error
        except OSError as error:
            os.close(self._file)
            raise TransportError(f"{path} cannot be locked: {error.strerror}") from error
        self._is_held = True

    def fence(self) -> None:
        """Return if this coordinator still holds the lease.

        Raises:
            TransportError: It does not.
        """
        with contextlib.suppress(OSError):
            is_same = os.path.samestat(os.fstat(self._file), self._path.stat())
            if self._is_held and is_same and self._read() == self.epoch:
                return
        raise TransportError(f"{self._path} is not held by epoch {self.epoch} any more")

    def release(self) -> None:
        """Release the lease; a second call is a no-op."""
        if self._is_held:
            self._is_held = False
            os.close(self._file)

    def _read(self) -> int:
        text = os.pread(self._file, 64, 0).split(b"\n")[0]
        return int(text) if text.isdigit() else 0


def new_epoch(before: int = 0) -> int:
    """Return an epoch larger than an earlier one, by the clock if there was none.

    Args:
        before: Epoch of an earlier coordinator, 0 if unknown.
    """
    return max(before + 1, time.time_ns() // 1_000_000)
