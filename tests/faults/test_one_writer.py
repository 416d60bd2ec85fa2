# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two writers of one directory: the second is refused, and a replaced holder commits nothing.

Hosts are simulated: each has its own name and boot id, and a flock that the others do not see.
"""

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import CheckpointManager, LeaseLostError, load_checkpoint
from jaxmoe.resilience.lease import STALE, Host, Lease
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.restore import Continuation
from tests.support.runs import ROOT, flags

HEARTBEAT = 0.1


def _has_no_locks(opened, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _locks_for_itself(opened, operation):
    """Lock as a file system does whose locks stay on each host."""


def _lease(path, name, *, flock=_locks_for_itself, heartbeat=HEARTBEAT, **given):
    return Lease(path, heartbeat=heartbeat, host=Host(name=name, boot=name), flock=flock, **given)


@contextlib.contextmanager
def _held(lease):
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


def _stop_heart(lease):
    """Stop the heartbeat, as if the process were stopped or cut off."""
    lease._ended.set()
    lease._thread.join()
    lease._ended.clear()


def _wait_until(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("flock", [_has_no_locks, _locks_for_itself])
@pytest.mark.parametrize("skew", [-86400, 0, 86400])
def test_heartbeat_decides_without_flock(tmp_path, caplog, flock, skew):
    """Only the local clock counts, whatever the other host has."""
    caplog.set_level("INFO", logger="jaxmoe.messages")
    with _held(_lease(tmp_path, "one", flock=flock)) as first:
        for name in ("run.lease", "run.heartbeat"):
            os.utime(tmp_path / name, (time.time() + skew,) * 2)
        with pytest.raises(ValueError) as refused:
            _lease(tmp_path, "two", flock=flock).acquire()
        text = str(refused.value)
        assert f"run.directory={tmp_path} is in use by process {os.getpid()} on one" in text
        assert "last heartbeat 0." in text and "--run.lock.steal True" in text
        first.fence()
        assert str(os.getpid()) in (tmp_path / "run.lock").read_text(), "who was refused wiped it"

        _stop_heart(first)
        os.utime(tmp_path / "run.heartbeat", (time.time() + skew,) * 2)
        began = time.monotonic()
        with _held(_lease(tmp_path, "two", flock=flock)) as second:
            assert time.monotonic() - began >= STALE * HEARTBEAT
            assert second.holder.incarnation == 2 and second.holder.run == first.holder.run
            assert "is taken over from process" in caplog.text
            second.fence()
            with pytest.raises(LeaseLostError, match=r"on two.*incarnation 2; this process"):
                first.fence()
            first.release()  # which leaves the other's alone
            second.fence()
            assert json.loads((tmp_path / "run.lock").read_text())["host"] == "two"


def test_stopped_watcher_does_not_take_over(tmp_path, monkeypatch):
    """Between two looks, for longer than it would watch."""
    with _held(_lease(tmp_path, "one")):
        two, seen = _lease(tmp_path, "two"), []
        look = two._heartbeat_of

        def look_and_stand(holder):
            seen.append(look(holder))
            if len(seen) == 2:
                time.sleep(2 * STALE * HEARTBEAT)
            return seen[-1]

        monkeypatch.setattr(two, "_heartbeat_of", look_and_stand)
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on one"):
            two.acquire()


def test_released_lease_is_taken_without_wait(tmp_path):
    with _held(_lease(tmp_path, "one", heartbeat=60)):
        pass
    with _held(_lease(tmp_path, "two")) as second:
        assert second.holder.incarnation == 2


def test_dead_local_holder_is_replaced_without_wait(tmp_path):
    first = Lease(tmp_path, heartbeat=60)
    first.acquire()
    os.close(first._lock)  # the kernel lets go, as when it dies
    with _held(Lease(tmp_path)) as second:
        assert second.holder.incarnation == 2
    first._lock = None
    first.release()


def test_one_of_two_simultaneous_takeovers_wins(tmp_path):
    with _held(_lease(tmp_path, "dead")) as dead:
        _stop_heart(dead)
        both = [_lease(tmp_path, name) for name in ("one", "two")]
        refused = []

        def take(lease):
            try:
                lease.acquire()
            except ValueError as error:
                refused.append(error)

        threads = [threading.Thread(target=take, args=(lease,)) for lease in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        going_on = 0
        for lease in both:
            with contextlib.suppress(LeaseLostError):
                lease.fence()
                going_on += 1
        assert going_on == 1
        for lease in both:
            lease.release()


def test_a_lease_can_be_taken_from_a_live_holder(tmp_path, caplog):
    caplog.set_level("INFO", logger="jaxmoe.messages")
    lost = threading.Event()
    first, second, third = (RunDirectory(tmp_path) for _ in range(3))
    first.acquire(heartbeat=HEARTBEAT, on_lost=lost.set)
    with pytest.raises(ValueError, match="in use by process"):
        second.acquire()
    second.acquire(steal=True, heartbeat=HEARTBEAT)
    assert "is taken from process" in caplog.text
    assert lost.wait(10), "its heartbeat tells it"
    with pytest.raises(LeaseLostError):
        first.fence()
    with pytest.raises(ValueError, match="writes nothing more"):
        first.write_summary({})
    first.release()
    second.fence()
    with pytest.raises(ValueError, match="in use by process"):
        third.acquire()  # the kernel's lock went with it
    second.release()


SLEEPER = """
import sys, threading
from jaxmoe.resilience.lease import Host, Lease
lost = threading.Event()
host = Host(name="one", boot="one")
lease = Lease(sys.argv[1], heartbeat=0.2, host=host, flock=lambda *_: None, on_lost=lost.set)
lease.acquire()
print("held", flush=True)
lost.wait(600)
print("lost" if lost.is_set() else "held", flush=True)
"""


def _has_stopped(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_stopped_holder_detects_takeover(tmp_path):
    command = [sys.executable, "-c", SLEEPER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as one:
        assert one.stdout is not None and one.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {one.pid} on one"):
            _lease(tmp_path, "two").acquire()
        one.send_signal(signal.SIGSTOP)
        _wait_until(lambda: _has_stopped(one.pid))  # it may be writing its heartbeat
        with _held(_lease(tmp_path, "two")) as two:
            one.send_signal(signal.SIGCONT)
            assert one.communicate(timeout=600)[0] == "lost\n"
            two.fence()
    assert one.returncode == 0


# The fence protects the checkpoints from a replaced holder.


def _state(step):
    return {"w": np.full(1000, step, np.float32)}


@pytest.mark.parametrize("moment", ["before the save", "before the commit", "between the two asks"])
def test_replaced_holder_commits_nothing(tmp_path, caplog, moment):
    asks = {"before the save": 1, "before the commit": 2, "between the two asks": 3}[moment]
    checkpoints, asked = tmp_path / "checkpoints", []
    with _held(_lease(tmp_path, "one")) as one:
        two = _lease(tmp_path, "two", steal=True)

        def fence():
            asked.append(None)
            if len(asked) == 3 + asks:
                two.acquire()
            one.fence()

        zombie = CheckpointManager(checkpoints, fence=fence)
        assert zombie.save(1, _state(1), config={}) and zombie.finish()
        assert len(asked) == 3
        if moment == "before the save":
            with pytest.raises(LeaseLostError, match="on two"):
                zombie.save(2, _state(2), config={})
        else:
            assert zombie.save(2, _state(2), config={})
            assert not zombie.finish()
            assert zombie.is_owed(), "so that the loop hears of it"
            with pytest.raises(LeaseLostError, match="on two"):
                zombie.save(3, _state(3), config={})
        assert zombie.steps() == [1] and zombie.failures == 0
        assert "was not saved" not in caplog.text
        follower = CheckpointManager(checkpoints, fence=two.fence)
        assert follower.save(2, _state(20), config={}) and follower.finish()
        zombie.close()
        assert follower.steps() == [1, 2]
        np.testing.assert_array_equal(load_checkpoint(checkpoints, step=2)["w"], 20)
        assert not list(checkpoints.glob("*tmp*")), "cleared by whoever took over"
        follower.close()
        two.release()


def test_replaced_holder_moves_nothing(tmp_path):
    with _held(_lease(tmp_path, "one")) as one, _held(_lease(tmp_path, "two", steal=True)):
        zombie = CheckpointManager(tmp_path / "checkpoints")
        assert zombie.save(1, _state(1), config={}) and zombie.finish()
        zombie.close()
        os.truncate(tmp_path / "checkpoints" / "1" / "manifest" / "metadata", 3)
        zombie = CheckpointManager(tmp_path / "checkpoints", fence=one.fence)
        with pytest.raises(LeaseLostError, match="on two"):
            zombie.restore_newest(_state(0))
        assert zombie.steps() == [1]
        zombie.close()


def test_a_run_that_was_taken_over_before_it_begins_ends(tmp_path, capsys, monkeypatch):
    thief = RunDirectory(tmp_path / "run")

    def restore(*arguments, **more):
        thief.acquire(steal=True)
        raise LeaseLostError

    monkeypatch.setattr(Continuation, "restore_or_start", restore)
    try:
        command = flags(tmp_path / "run", 3, "--run.lock.heartbeat", "60")
        assert pretrain.main(command) == ExitCode.TAKEN_OVER
        assert "this process (incarnation 1) writes nothing more" in capsys.readouterr().err
        thief.fence()
    finally:
        thief.release()


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("heard", ["at a save", "by the heartbeat"])
def test_a_run_that_was_taken_over_ends_and_writes_nothing(tmp_path, capsys, monkeypatch, heard):
    """As the summary, the metrics and the checkpoints of its directory show."""
    path, thief = tmp_path / "run", RunDirectory(tmp_path / "run")
    before, trained, steps = {}, Reporter.log_steps, []

    def trained_and_robbed(self, report):
        trained(self, report)
        steps.extend(report.steps)
        if not before and report.steps[-1] >= 3:
            (robbed,) = (one for one in threading.enumerate() if one.name == "lease")
            thief.acquire(steal=True)
            files = [file for file in path.rglob("*") if file.is_file()]
            before.update({file: file.read_bytes() for file in files if file.parent == path})
            if heard == "by the heartbeat":
                _wait_until(lambda: not robbed.is_alive(), 60)

    monkeypatch.setattr(Reporter, "log_steps", trained_and_robbed)
    if heard == "at a save":
        more = ("--run.lock.heartbeat", "60", "--checkpoint.every", "4")
    else:
        more = ("--run.lock.heartbeat", "0.05", "--checkpoint.every", "0")
    command = flags(path, 9, *more, "--tracking.print_every", "1")
    try:
        assert pretrain.main(command) == ExitCode.TAKEN_OVER
        assert "this process (incarnation 1) writes nothing more" in capsys.readouterr().err
        assert steps[-1] == (4 if heard == "at a save" else 3)
        changed = {file.name for file in before if file.read_bytes() != before[file]}
        # At a save it has reported that very step, and flushed, when it hears of it.
        assert changed <= ({"metrics.jsonl", "router.npz"} if heard == "at a save" else set())
        assert not (path / "summary.json").exists()
        assert not list((path / "checkpoints").glob("[0-9]*"))
        thief.fence()
    finally:
        thief.release()
