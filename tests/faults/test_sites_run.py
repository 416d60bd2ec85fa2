# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of four sites: equal to one another bit for bit, to one program, and after kills.

The exchange equals that of one program bit for bit
(`tests/jaxmoe/contrib/slow_links/workers/test_between_jobs.py`); local steps of one worker and of
several are different programs, whose results differ by rounding.
"""

import random
import shlex
import sys
import time

import numpy as np
import pytest

from experiments.cli.flags import ExitCode
from experiments.launch import __main__ as launch
from jaxmoe.contrib.slow_links.sites.config import VARIABLE
from tests.support.runs import flags, logged_losses, saved_leaves, start_run, written_by

pytestmark = pytest.mark.slow

SITES, EVERY, STEPS = 4, 3, 6
COMMON = ("['params']", "['opt_state']", "['router_state']")
TOLERANCE = 2e-6


def _command(run, steps=STEPS, *more, every=3):
    given = ("--checkpoint.every", str(every), "--checkpoint.keep", "99")
    given += ("--evaluation.every", "0")
    given += ("--tracking.sample_length", "0", "--tracking.print_every", "1", *more)
    methods = ("model.moe.router.bias:loss_free", "replicas:diloco", "--replicas.every", str(EVERY))
    return [*flags(run, steps, *given), *methods]


def _common(directory, step):
    """What all sites have in common at a step."""
    leaves = saved_leaves(directory, step)
    return {path: leaf for path, leaf in leaves.items() if path.startswith(COMMON)}


def _check_equal_bitwise(directories, steps):
    for step in steps:
        first, *others = [_common(directory, step) for directory in directories]
        assert {path[: path.index("]") + 1] for path in first} == set(COMMON)
        for other in others:
            assert first.keys() == other.keys()
            for path, leaf in first.items():
                np.testing.assert_array_equal(other[path], leaf, err_msg=f"{path} at {step}")


@pytest.fixture(scope="module")
def in_one_program(tmp_path_factory):
    """The run with all workers in one program, one after another and on four devices."""
    base = tmp_path_factory.mktemp("runs")
    one, mesh = base / "one", base / "mesh"
    workers = ("--replicas.workers", str(SITES))
    places = ("--execution.mesh.replica", str(SITES), "--execution.mesh.data", "1")
    processes = [
        start_run([*_command(one), *workers]),
        start_run(_command(mesh, STEPS, *places), devices=SITES),
    ]
    outputs = written_by(*processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    return one, mesh


def _check_equals_one_program(directories, in_one_program):
    _check_equal_bitwise(directories, (3, 6))
    for whole in in_one_program:
        for step in (3, 6):
            wanted, found = _common(whole, step), _common(directories[0], step)
            assert wanted.keys() == found.keys()
            for path, leaf in wanted.items():
                np.testing.assert_allclose(
                    found[path], leaf, rtol=0, atol=TOLERANCE, err_msg=f"{path} at {step}"
                )
    routers = [leaf for path, leaf in found.items() if path.startswith(COMMON[2])]
    assert any(np.any(leaf) for leaf in routers)
    losses = [logged_losses(directory) for directory in directories]
    for step, loss in logged_losses(in_one_program[0]).items():
        assert np.mean([own[step] for own in losses]) == pytest.approx(loss, abs=1e-5)


def test_sites_that_share_a_directory_equal_one_program(tmp_path, in_one_program):
    directories = [tmp_path / f"island{member}" for member in range(SITES)]
    place = f"of={SITES} transport=directory:{tmp_path / 'exchange'} grace=120"
    processes = [
        start_run(_command(directory), variables={VARIABLE: f"member={member} {place}"})
        for member, directory in enumerate(directories)
    ]
    outputs = written_by(*processes)
    assert [process.returncode for process in processes] == [0] * SITES, outputs
    assert "4, diloco: all parameters every 3 steps" in outputs[0]
    _check_equals_one_program(directories, in_one_program)


def test_sites_of_the_launcher_equal_one_program(tmp_path, in_one_program):
    """Over its coordinator."""
    words = ["env", "XLA_FLAGS=", sys.executable, "-m", "experiments.pretrain"]
    given = ["--islands", str(SITES), "--islands_grace", "120", "--snapshots", str(tmp_path)]
    given += ["--run.directory", str(tmp_path / "launch")]
    command = shlex.join([*words, *_command(tmp_path / "run")])
    assert launch.main([*given, "--command", command]) == ExitCode.DONE
    directories = [tmp_path / f"run-island{member}" for member in range(SITES)]
    _check_equals_one_program(directories, in_one_program)


# Founders wait for one another, rounds take a moment, and the others hold one until the site that
# was killed is there again; then it may join in any of the rounds that are left.
SITE = """
import pathlib, sys, time
from experiments import pretrain
from jaxmoe.contrib.slow_links.site_part import Site

place, member, held = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
start, exchange, number = Site.start, Site._exchange, 0

def wait_for(names):
    while not all((place / name).exists() for name in names):
        time.sleep(0.02)

def started(self, step, state):
    founds = not (place / member).exists()
    (place / (member if founds else "back")).touch()
    if founds:
        wait_for("0123")
    return start(self, step, state)

def exchanged(self, fragment, state):
    number = self._step // 3
    (place / f"round{number}-{member}").touch()
    if number == held:
        wait_for(["back"])
    time.sleep(0.3)
    state = exchange(self, fragment, state)
    time.sleep(0.1)
    return state

Site.start, Site._exchange = started, exchanged
pretrain.main(sys.argv[4:])
"""
ROUNDS, HELD, GRACE = 16, 5, 10


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.large) for seed in range(1, 10))]
)
def test_an_site_that_is_killed_at_any_moment_joins_again(tmp_path, seed):
    drawn, place = random.Random(seed), tmp_path / "marks"
    place.mkdir()
    victim, last = drawn.randrange(SITES), drawn.randrange(1, HELD)
    directories = [tmp_path / f"island{member}" for member in range(SITES)]

    def begin(member):
        where = f"of={SITES} transport=directory:{tmp_path / 'exchange'} grace={GRACE}"
        arguments = [str(place), str(member), str(HELD)]
        arguments += _command(directories[member], ROUNDS * EVERY, every=6)
        return start_run(
            arguments, SITE, variables={VARIABLE: f"member={member} {where} timeout=240"}
        )

    processes = [begin(member) for member in range(SITES)]
    try:
        until = time.monotonic() + 240
        while not (place / f"round{last}-{victim}").exists():
            assert time.monotonic() < until and processes[victim].poll() is None
            time.sleep(0.01)
        time.sleep(drawn.uniform(0.0, 0.9))
        processes[victim].kill()
        processes[victim].communicate()
        others = [member for member in range(SITES) if member != victim]
        held, until = [place / f"round{HELD}-{member}" for member in others], time.monotonic()
        while not all(path.exists() for path in held):  # they go on without it
            assert time.monotonic() < until + 2 * HELD + 4 * GRACE
            time.sleep(0.01)
        processes[victim] = begin(victim)
    finally:
        outputs = written_by(*processes)
    assert [process.returncode for process in processes] == [0] * SITES, outputs[victim]
    _check_equal_bitwise([directories[member] for member in others], range(6, ROUNDS * EVERY, 6))
    _check_equal_bitwise(directories, [ROUNDS * EVERY])
    assert "joined the others at step" in outputs[victim]
