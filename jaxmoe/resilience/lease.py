# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Leases a run directory to one process at a time.

    run.lock       locked with flock while its holder is alive; names the holder
    run.lease      {run, incarnation, token, host, boot, pid, since, heartbeat, flock}: the holder
    run.heartbeat  {token, count, released}: written by the holder every `heartbeat` seconds

flock is tried first: if another process holds it, even a stopped one, `acquire` is refused at
once. If the previous holder ran on the same running kernel (`boot`), a free lock means that it is
dead and the lease is taken without waiting. On some shared file systems flock does not reach other
hosts; there the heartbeat decides.

Clocks of different hosts are never compared. To take over from another host, `acquire` watches for
three heartbeats of the holder, by the local clock, whether the count changes. If it does, `acquire`
is refused; if not, the holder is dead or cut off from the directory, and is replaced. There is no
wait if the holder released the lease. This assumes that writes of one host are visible to the
others within two heartbeats.

Each holder has an incarnation, one more than the previous one, and a token of its own. A holder can
lose its lease while alive: stopped for a while, cut off, or through `--run.lock.steal`. It finds
another token in run.lease at its next heartbeat or when it calls `fence` before a commit, and must
not write any more. Only `acquire` writes run.lease; of two that do so at the same moment the last
one holds it. The heartbeat is a separate file, so that a late write does not overwrite a lease.

Writes that are already on their way to the disk are not prevented.

To add a fact about the holder: a field of `Holder` in `jaxmoe/resilience/lease.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import platform
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmoe.checkpoint import LeaseLostError
from jaxmoe.disk import check_plain_files
from jaxmoe.json_bounds import read_json
from jaxmoe.messages import write

FILES = ("run.lock", "run.lease", "run.heartbeat")
"""Names of the files in the directory."""

STALE = 3
"""Heartbeats without a change after which a holder counts as dead."""

_LOOKS = 10  # a heartbeat, while one watches
_LENGTH = 120  # of a heartbeat's text, padded
_MOST = 1 << 16  # bytes of a file
_LONGEST = 86400.0  # seconds between heartbeats that a reader believes
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Host of a process."""

    name: str
    boot: str
    """Id of the running kernel, new after a restart; the host name where there is none."""

    @classmethod
    def here(cls) -> Host:
        """Return this host."""
        name = platform.node()
        return cls(name=name, boot=_BOOT.read_text().strip() if _BOOT.exists() else name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Content of run.lease."""

    run: str
    """Id of the directory, the same for all holders."""
    incarnation: int
    token: str
    """Random id of this holder."""
    host: str
    boot: str
    pid: int
    since: str
    heartbeat: float
    """Seconds between heartbeats."""
    flock: bool
    """Whether the holder also has the flock."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class Lease:
    """A lease on one directory.

    Args:
        directory: Existing directory.
        heartbeat: Seconds between heartbeats.
        steal: Whether to take the lease from a live holder.
        on_lost: Called once, in the heartbeat thread, when another process has taken the lease.
        host: Host of this process.
        flock: Locks an open file, or raises BlockingIOError if another process has the lock; any
            other OSError means that the file system has no locks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        heartbeat: float = 10.0,
        steal: bool = False,
        on_lost: Callable[[], None] | None = None,
        host: Host | None = None,
        flock: Callable[[int, int], None] = fcntl.flock,
    ):
        self._directory = pathlib.Path(directory)
        self._lock_file, self._lease_file, self._heartbeat_file = map(
            self._directory.joinpath, FILES
        )
        self._heartbeat = heartbeat
        self._steals = steal
        self._on_lost = on_lost
        self._host = host or Host.here()
        self._flock = flock
        self._lock: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0
        self.holder: Holder | None = None
        """Content of run.lease while this process holds the directory."""

    def acquire(self) -> None:
        """Hold the directory until `release`.

        Raises:
            ValueError: Another process holds it.
            OSError: The files cannot be written.
        """
        check_plain_files((self._lock_file, self._lease_file, self._heartbeat_file))
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            has_lock = self._take_lock()
            before = self._read_holder()
            was_watched = before is not None and self._watch(before, has_lock)
            self.holder = holder = Holder(
                run=before.run if before else uuid.uuid4().hex,
                incarnation=before.incarnation + 1 if before else 1,
                token=uuid.uuid4().hex,
                host=self._host.name,
                boot=self._host.boot,
                pid=os.getpid(),
                since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                heartbeat=self._heartbeat,
                flock=has_lock,
            )
            self._write_lock(holder)
            self._write_lease(holder)
            self._beat()
            if was_watched:
                self._check_alone()
            undo.pop_all()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def fence(self) -> None:
        """Return if this process still holds the directory.

        Raises:
            LeaseLostError: It does not; the message names the holder.
            OSError: The file system does not answer.
        """
        mine = self.holder
        now = self._read_holder()
        if mine is not None and now is not None and now.token == mine.token:
            return
        who = (
            "no process: run.lease is gone"
            if now is None
            else f"{now}, incarnation {now.incarnation}"
        )
        was = "none" if mine is None else f"incarnation {mine.incarnation}"
        raise LeaseLostError(
            f"run.directory={self._directory} is held by {who}; this process ({was}) writes"
            " nothing more"
        )

    def release(self) -> None:
        """Release the directory; a second call is a no-op."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            with contextlib.suppress(OSError, LeaseLostError):
                self.fence()
                self._beat(is_released=True)
                if self._lock is not None:
                    os.ftruncate(self._lock, 0)
        self._close()

    def _close(self) -> None:
        lock = self._lock
        self._lock = None
        self.holder = None
        if lock is not None:
            os.close(lock)

    def _take_lock(self) -> bool:
        """Take the flock; return False if the file system has none.

        Raises:
            ValueError: another process has it.
        """
        path = self._lock_file
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                if not self._steals:
                    raise ValueError(self._refusal(self._locked_by())) from error
                # The lock stays on the unlinked file.
                write(f"run.directory={self._directory} is taken from {self._locked_by()}")
                path.unlink(missing_ok=True)
                continue
            except OSError:
                self._lock = lock
                return False
            if _is_same_file(lock, path):
                self._lock = lock
                return True
            os.close(lock)  # another file took its place meanwhile

    def _write_lock(self, holder: Holder) -> None:
        """Write the holder into run.lock."""
        assert self._lock is not None
        text = json.dumps({"pid": holder.pid, "host": holder.host, "since": holder.since})
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text.encode(), 0)
        os.fsync(self._lock)

    def _write_lease(self, holder: Holder) -> None:
        """Replace run.lease by one rename; the temporary name has the token, since pids repeat."""
        pending = self._lease_file.with_name(f"{self._lease_file.name}.{holder.token}")
        try:
            with pending.open("w", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(holder)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            pending.replace(self._lease_file)
        finally:
            pending.unlink(missing_ok=True)

    def _watch(self, before: Holder, has_lock: bool) -> bool:
        """Return once the previous holder may be replaced; True if it had to be watched.

        Raises:
            ValueError: The holder is alive.
        """
        is_here = before.boot == self._host.boot
        if self._is_released(before) or (has_lock and before.flock and is_here):
            return False  # the kernel released the lock of the dead holder
        where = f"run.directory={self._directory}"
        if self._steals:
            write(f"{where} is taken from {before}")
            return False
        seconds = STALE * before.heartbeat
        write(f"{where} was held by {before}: watching {seconds:g} s for its heartbeat")
        seen = self._heartbeat_of(before)
        looked = time.monotonic()
        # Looks are counted, not time: to stand still here for long costs one look.
        for _ in range(STALE * _LOOKS):
            time.sleep(before.heartbeat / _LOOKS)
            if self._is_released(before):
                return True
            if self._heartbeat_of(before) != seen:
                ago = time.monotonic() - looked
                raise ValueError(self._refusal(f"{before}, last heartbeat {ago:.1f} s ago"))
            looked = time.monotonic()
        write(f"{where} is taken over from {before}: no heartbeat for {seconds:g} s")
        return True

    def _check_alone(self) -> None:
        """Raise if another process watched at the same time and wrote its lease later."""
        time.sleep(self._heartbeat / _LOOKS)
        try:
            self.fence()
        except LeaseLostError as error:
            raise ValueError(self._refusal(str(self._read_holder()))) from error

    def _keep(self) -> None:
        """Renews the heartbeat until the lease is released or lost."""
        while not self._ended.wait(self._heartbeat):
            try:
                self.fence()
                self._beat()
            except LeaseLostError:
                if self._on_lost is not None:
                    self._on_lost()
                return
            except OSError:
                continue  # the disk is full, or away for a while: the next one may succeed

    def _beat(self, is_released: bool = False) -> None:
        assert self.holder is not None
        self._count += 1
        beat = {"token": self.holder.token, "count": self._count, "released": is_released}
        # In place, of one length, not synced: a full or slow disk does not look like death.
        text = json.dumps(beat).ljust(_LENGTH) + "\n"
        opened = os.open(self._heartbeat_file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(opened, text.encode(), 0)
        finally:
            os.close(opened)

    def _read_holder(self) -> Holder | None:
        """Return the holder in run.lease; None if there is none that this version can read."""
        holder = _read(self._lease_file)
        kinds = dict.fromkeys(("run", "token", "host", "boot", "since"), str)
        kinds |= {"incarnation": int, "pid": int, "heartbeat": float | int, "flock": bool}
        if holder.keys() != kinds.keys():
            return None
        is_read = all(isinstance(holder[name], kind) for name, kind in kinds.items())
        return Holder(**holder) if is_read and 0 < holder["heartbeat"] <= _LONGEST else None

    def _heartbeat_of(self, holder: Holder) -> Any:
        """Return the count of a holder; None while the file has another holder's."""
        beat = _read(self._heartbeat_file)
        return beat.get("count") if beat.get("token") == holder.token else None

    def _is_released(self, holder: Holder) -> bool:
        beat = _read(self._heartbeat_file)
        return beat.get("token") == holder.token and bool(beat.get("released"))

    def _locked_by(self) -> str:
        owner = _read(self._lock_file)
        if not {"pid", "host", "since"} <= owner.keys():
            return "another process"  # it holds the lock and has not written its name yet
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"

    def _refusal(self, who: str) -> str:
        return (
            f"run.directory={self._directory} is in use by {who}: wait until it ends, stop it, take"
            " it over with --run.lock.steal True where a command has that, or choose another"
            " directory with --run.directory"
        )


class Beat(NamedTuple):
    """Last sign of life of the process that holds a directory."""

    token: str
    count: Any
    """Number of the heartbeat; None before the first."""
    seconds: float
    """Seconds between heartbeats: one that does not change for `STALE` of them is of a dead one."""


def last_beat(directory: str | os.PathLike[str]) -> Beat | None:
    """Return the last heartbeat in a directory; None if it is free.

    Args:
        directory: Directory of a lease; nothing is written.
    """
    place = pathlib.Path(directory)
    if not place.is_dir():
        return None
    lease = Lease(place)
    holder = lease._read_holder()
    if holder is None or lease._is_released(holder):
        return None
    return Beat(holder.token, lease._heartbeat_of(holder), holder.heartbeat)


def _is_same_file(opened: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _read(path: pathlib.Path) -> dict[str, Any]:
    """Return a JSON object; empty if there is no file, or none that holds one."""
    try:
        content = read_json(path, max_bytes=_MOST)
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
