# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One writer per directory: who holds it, whether he lives, and who took it over.

    run.lock       locked by the kernel (flock) while its holder lives; says who that is
    run.lease      {run, incarnation, token, host, boot, pid, since, heartbeat, flock}: the holder
    run.heartbeat  {token, count, released}: written by the holder every `heartbeat` seconds

flock is asked first: a process that has it lives, even a stopped one, and is refused at once. Where
flock does not reach, to other hosts on some shared file systems, the heartbeat decides. Where it
does, which is known of holders on the same running kernel (`boot`), a free lock means a dead holder
and nobody waits.

Clocks of hosts differ, so that no two are compared: whoever wants a directory of another host
watches for three of the holder's heartbeats, by his own clock, whether the count changes. A change
refuses him at once; none in that time means a holder who is dead, or cut off from the directory,
and is taken over. This costs a start on another host that wait, unless the holder said that he let
go. It assumes that what one host writes is seen by the others within two heartbeats.

Each holder has an incarnation, one more than the one before him, and a token of his own. A holder
may be taken over alive: stopped for a while, cut off, or by `--run.steal_lock`. He finds another
token in run.lease at his next heartbeat, or when he asks before he commits (`fence`), and must not
write any more. Only who acquires writes run.lease; of two that do so in the same moment the last
one holds it, and the other finds out as soon. Heartbeats are a file of their own, so that a late
one hides nobody's lease.

It does not stop writes that are already on their way to the disk.

To add a fact about the holder: a field of `Holder`.
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
from typing import Any

from jaxmoe.checkpoint import LeaseLostError
from jaxmoe.messages import write

FILES = ("run.lock", "run.lease", "run.heartbeat")
"""In the directory."""

STALE = 3
"""Heartbeats without a change after which a holder counts as dead."""

_LOOKS = 10  # a heartbeat, while one watches
_LENGTH = 120  # of a heartbeat's text, padded
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a process runs."""

    name: str
    boot: str
    """Of the running kernel: another one after a restart; its name where it has none."""

    @classmethod
    def here(cls) -> Host:
        """This one."""
        name = platform.node()
        return cls(name=name, boot=_BOOT.read_text().strip() if _BOOT.exists() else name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The content of run.lease."""

    run: str
    """Of the directory: the same for all who hold it in turn."""
    incarnation: int
    token: str
    """Of this holder alone."""
    host: str
    boot: str
    pid: int
    since: str
    heartbeat: float
    """Seconds between heartbeats."""
    flock: bool
    """Whether he has the kernel's lock as well."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class Lease:
    """The lease on one directory.

    Args:
        directory: which must exist.
        heartbeat: seconds between heartbeats.
        steal: whether to take it from a holder who lives.
        on_lost: called once, in the heartbeat's thread, when another process has taken it.
        host: where this process runs.
        flock: locks an open file, or raises BlockingIOError where another has; an OSError of
            another kind says that the file system has no locks.
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
        self._heartbeat, self._steals, self._on_lost = heartbeat, steal, on_lost
        self._host, self._flock = host or Host.here(), flock
        self._lock: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0
        self.holder: Holder | None = None
        """What this process wrote, while it holds the directory."""

    def acquire(self) -> None:
        """Holds the directory until `release`.

        Raises:
            ValueError: another process holds it.
            OSError: the files cannot be written.
        """
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
        """Returns while this process holds the directory.

        Raises:
            LeaseLostError: it does not, or not any more; says who does.
            OSError: the file system does not answer.
        """
        mine, now = self.holder, self._read_holder()
        if mine is not None and now is not None and now.token == mine.token:
            return
        who = (
            "nobody: run.lease is gone" if now is None else f"{now}, incarnation {now.incarnation}"
        )
        was = "none" if mine is None else f"incarnation {mine.incarnation}"
        raise LeaseLostError(
            f"run.directory={self._directory} is held by {who}; this process ({was}) writes"
            " nothing more"
        )

    def release(self) -> None:
        """Lets go of the directory; twice does no harm."""
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
        lock, self._lock, self.holder = self._lock, None, None
        if lock is not None:
            os.close(lock)

    def _take_lock(self) -> bool:
        """Whether the kernel's lock is ours; False where the file system has none.

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
                # Its lock stays on a file that has no name any more.
                write(f"run.directory={self._directory} is taken from {self._locked_by()}")
                path.unlink(missing_ok=True)
                continue
            except OSError:
                self._lock = lock
                return False
            if _is_same_file(lock, path):
                self._lock = lock
                return True
            os.close(lock)  # somebody has put another there in between

    def _write_lock(self, holder: Holder) -> None:
        """Says in run.lock who holds it."""
        assert self._lock is not None
        text = json.dumps({"pid": holder.pid, "host": holder.host, "since": holder.since})
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text.encode(), 0)
        os.fsync(self._lock)

    def _write_lease(self, holder: Holder) -> None:
        """In one rename, of a file that no other process has: pids of two hosts may be the same."""
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
        """Returns when the holder before may be replaced; whether that took watching him.

        Raises:
            ValueError: he lives.
        """
        is_here = before.boot == self._host.boot
        if self._is_released(before) or (has_lock and before.flock and is_here):
            return False  # the kernel has let go of what it held for him
        where = f"run.directory={self._directory}"
        if self._steals:
            write(f"{where} is taken from {before}")
            return False
        seconds = STALE * before.heartbeat
        write(f"{where} was held by {before}: watching {seconds:g} s whether it lives")
        seen, looked = self._heartbeat_of(before), time.monotonic()
        # Looks are counted, not time: to stand still here for long costs one look.
        for _ in range(STALE * _LOOKS):
            time.sleep(before.heartbeat / _LOOKS)
            if self._is_released(before):
                return True
            if self._heartbeat_of(before) != seen:
                ago = time.monotonic() - looked
                raise ValueError(self._refusal(f"{before}, last sign of life {ago:.1f} s ago"))
            looked = time.monotonic()
        write(f"{where} is taken over from {before}: no sign of life for {seconds:g} s")
        return True

    def _check_alone(self) -> None:
        """Refuses where somebody else has watched as long, and has written after us."""
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
        """Of run.lease; None where there is none that this version understands."""
        try:
            return Holder(**_read(self._lease_file))
        except TypeError:
            return None

    def _heartbeat_of(self, holder: Holder) -> Any:
        """His count; None while the file holds somebody else's."""
        beat = _read(self._heartbeat_file)
        return beat.get("count") if beat.get("token") == holder.token else None

    def _is_released(self, holder: Holder) -> bool:
        beat = _read(self._heartbeat_file)
        return beat.get("token") == holder.token and bool(beat.get("released"))

    def _locked_by(self) -> str:
        owner = _read(self._lock_file)
        if not {"pid", "host", "since"} <= owner.keys():
            return "another process"  # it holds the lock and has not yet said who it is
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"

    def _refusal(self, who: str) -> str:
        return (
            f"run.directory={self._directory} is in use by {who}: wait until it ends, stop it, take"
            " it over with --run.steal_lock True where a command has that, or choose another"
            " directory with --run.directory"
        )


def _is_same_file(opened: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _read(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
