# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Processes killed during a save or a deletion: acknowledged steps stay bitwise."""

import contextlib
import json
import os
import pathlib
import random
import signal
import time

import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointManager, checksums
from tests.support.killed_saver import start_server, values
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.trains]

NUM_KILLS = {"one process": 30, "two processes": 4, "deleting": 6}
NUM_FILES = 5000


@pytest.fixture(scope="module")
def server():
    with start_server() as process:
        yield process
        process.stdin.close()


class Savers:
    """Processes that save into a directory until they are killed."""

    def __init__(self, server, run: pathlib.Path, processes: int = 1, keep: int = 3):
        run.mkdir(exist_ok=True)
        self._server, self._log = server, run / "acknowledged"
        self.before = self.acknowledged()
        request = {"run": str(run), "port": free_port(), "processes": processes, "keep": keep}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pids = json.loads(server.stdout.readline())

    def acknowledged(self) -> int:
        """The newest step, 0 before any."""
        lines = self._log.read_text().split("\n") if self._log.exists() else []
        return max((int(line) for line in lines if line), default=0)

    def wait_for(self, condition, seconds: float = 300) -> None:
        """Wait for a condition."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "the processes that save do not get on"
            time.sleep(0.001)

    def kill(self, *indices: int) -> int:
        """Kill these, then the others, which wait for them; return the newest acknowledged step."""
        for index in indices:
            os.kill(self.pids[index], signal.SIGKILL)
        if len(indices) < len(self.pids):
            time.sleep(0.2)
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert self._server.stdout.readline() == "ended\n"
        return self.acknowledged()


def _assert_whole(checkpoints: pathlib.Path, acknowledged: int) -> None:
    """Check that listed steps are what was saved, and the newest not older than acknowledged."""
    manager = CheckpointManager(checkpoints, is_writer=False)
    steps = manager.steps()
    assert steps and steps[-1] >= acknowledged, "an acknowledged step is lost"
    for step in steps:
        np.testing.assert_array_equal(manager.restore(step, None)["w"], values(step))
    manager.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_kill_during_save_keeps_acknowledged_steps(server, tmp_path, processes):
    """Repeated until enough kills hit a save in progress."""
    dice, run, trial, was_mid_save = random.Random(0), tmp_path / "run", 0, 0
    victims = [(0,)] if processes == 1 else [(0,), (1,), (0, 1)]
    num_kills = NUM_KILLS["one process" if processes == 1 else "two processes"]
    while trial < num_kills or (3 * was_mid_save < num_kills and trial < 5 * num_kills):
        savers = Savers(server, run, processes)
        savers.wait_for(lambda now=savers: now.acknowledged() > now.before)
        first, began = savers.acknowledged(), time.monotonic()
        savers.wait_for(lambda now=savers, first=first: now.acknowledged() > first)
        saved = time.monotonic() - began
        time.sleep(dice.uniform(0, 2 * saved))  # of a save's own time, however busy the machine
        acknowledged = savers.kill(*victims[trial % len(victims)])
        was_mid_save += bool(list((run / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
        _assert_whole(run / "checkpoints", acknowledged)
        trial += 1
    assert 3 * was_mid_save >= num_kills, f"{was_mid_save} of {trial} were in mid save"
    lease = json.loads((run / "run.lease").read_text())
    assert lease["incarnation"] == trial, "each start took over from a dead one"


def _files_left(trash: pathlib.Path) -> int:
    """Return the files left in the step that was renamed away; all, before it is."""
    if (trash.parent / "1").exists():
        return NUM_FILES
    return sum(name.startswith("more") for _, _, names in os.walk(trash) for name in names)


def test_kill_during_delete_keeps_acknowledged_steps(server, tmp_path):
    """For a step of thousands of files, which is no longer listed by then."""
    dice, trial, was_mid_delete = random.Random(0), 0, 0
    num_kills = NUM_KILLS["deleting"]
    while trial < num_kills or (2 * was_mid_delete < num_kills and trial < 5 * num_kills):
        run = tmp_path / str(trial)
        checkpoints, trash = run / "checkpoints", run / "checkpoints" / "trash"
        savers = Savers(server, run, keep=100)  # the first step stays
        savers.wait_for(lambda now=savers: now.acknowledged() > 1)
        savers.kill(0)
        for number in range(NUM_FILES):
            (checkpoints / "1" / f"more{number}").touch()
        checksums.write_list(checkpoints / "1")

        savers = Savers(server, run, keep=2)
        savers.wait_for(lambda trash=trash: _files_left(trash) < NUM_FILES)
        time.sleep(dice.uniform(0, 0.01))
        acknowledged = savers.kill(0)
        left = _files_left(trash)
        was_mid_delete += 0 < left < NUM_FILES
        _assert_whole(checkpoints, acknowledged)
        CheckpointManager(checkpoints).close()
        assert not trash.exists(), "the next start clears it"
        trial += 1
    assert 2 * was_mid_delete >= num_kills, f"{was_mid_delete} of {trial} were in mid delete"
