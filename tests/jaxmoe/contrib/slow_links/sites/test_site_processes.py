# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sites as processes: one of four is killed at a random moment, and started again."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import pytest

from jaxmoe.contrib.slow_links.sites.config import KEY_VARIABLE, VARIABLE, SiteConfig
from jaxmoe.contrib.slow_links.sites.coordinator import Coordinator
from tests.support.site_process import SIZES
from tests.support.source_tree import ROOT

COUNT, GRACE, KEY = 4, 1.0, "secret"


@contextlib.contextmanager
def _address(kind, folder):
    if kind == "directory":
        yield f"directory:{folder / 'shared'}"
        return
    with Coordinator("127.0.0.1:0", SIZES, key=KEY.encode()) as coordinator:
        yield f"tcp://{coordinator.address}"


class Sites:
    """Four processes and their logs."""

    def __init__(self, folder, address, *words):
        self._folder, self._address, self._words = folder, address, words
        self.processes = [self.start(member) for member in range(COUNT)]

    def start(self, member):
        config = SiteConfig(
            member=member, of=COUNT, transport=self._address, grace=GRACE, timeout=60, poll=0.01
        )
        script = ROOT / "tests" / "support" / "site_process.py"
        return subprocess.Popen(
            [sys.executable, str(script), str(self._log(member)), *self._words],
            env={**os.environ, VARIABLE: config.to_text(), KEY_VARIABLE: KEY},
        )

    def _log(self, member):
        return self._folder / f"log{member}"

    def lines(self, member):
        """Return what a process wrote of each round; the last line may be cut by its end."""
        text = self._log(member).read_text() if self._log(member).exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait_for(self, member, holds, seconds=60):
        until = time.monotonic() + seconds
        while not any(map(holds, self.lines(member))):
            assert time.monotonic() < until and self.processes[member].poll() is None
            time.sleep(0.01)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


def _kill_one(kind, folder, seed, returns):
    """Kill one of four; return the logs of those that went on."""
    chance = random.Random(seed)
    victim = chance.randrange(COUNT)
    with _address(kind, folder) as address:
        sites = Sites(folder, address, *[] if returns else ["lost"])
        try:
            witness = (victim + 1) % COUNT
            sites.wait_for(witness, lambda line: line["number"] >= 2)
            time.sleep(chance.random() / 5)
            sites.processes[victim].kill()
            sites.processes[victim].wait()
            if returns:
                sites.wait_for(witness, lambda line: len(line["members"]) < COUNT)
                sites.processes[victim] = sites.start(victim)
            alive = [m for m in range(COUNT) if returns or m != victim]
            for member in alive:
                assert sites.processes[member].wait(60) == 0
            return victim, {member: sites.lines(member) for member in alive}
        finally:
            sites.kill()


def _check(victim, logs):
    """All have the same members and bytes in each round; none waited much longer than the grace."""
    rounds = {}
    for member, lines in logs.items():
        for line in lines:
            found = rounds.setdefault(line["number"], {})
            found[member] = (tuple(line["members"]), line["state"])
    for number, found in rounds.items():
        assert len(set(found.values())) == 1, (number, found)
        ((members, _),) = set(found.values())
        assert set(found) - {victim} == set(logs) - {victim} and set(members) >= {*found} - {victim}
    longest = max(line["seconds"] for m, lines in logs.items() if m != victim for line in lines)
    assert longest < GRACE + 3, longest
    return rounds


@pytest.mark.parametrize("kind", ["tcp", pytest.param("directory", marks=pytest.mark.slow)])
def test_a_killed_site_is_left_out_and_joins_again(kind, tmp_path):
    victim, logs = _kill_one(kind, tmp_path, seed=0, returns=True)
    rounds = _check(victim, logs)
    last = rounds[max(rounds)]
    assert {members for members, _ in last.values()} == {(0, 1, 2, 3)} and len(last) == COUNT
    assert any(len(members) == 3 for found in rounds.values() for members, _ in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "directory"])
@pytest.mark.rows(2)
def test_sites_go_on_whenever_one_is_killed(kind, tmp_path):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        victim, logs = _kill_one(kind, folder, seed=seed, returns=False)
        rounds = _check(victim, logs)
        survivors = tuple(m for m in range(COUNT) if m != victim)
        assert {members for members, _ in rounds[max(rounds)].values()} == {survivors}
