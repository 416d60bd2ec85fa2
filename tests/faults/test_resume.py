# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at any step and started again equal an uninterrupted run bitwise."""

import os
import pathlib
import signal

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.run.reporter import Reporter
from tests.support.faults import read_batches
from tests.support.runs import flags, logged_losses, saved_leaves, start_run, written_by

STEPS = 12


class Death(BaseException):
    """An exception that nothing catches."""


def command(run, steps=STEPS):
    every = ("--checkpoint.every", "4", "--tracking.print_every", "1", "--evaluation.every", "0")
    return flags(run, steps, *every, "--tracking.sample_length", "0")


def die_at(run, step: int) -> None:
    """Start the run once, and kill it after a step."""
    trained = Reporter.log_steps

    def trained_and_dead(self, report):
        trained(self, report)
        if report.steps[-1] == step:
            raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "log_steps", trained_and_dead)
        with pytest.raises(Death):
            pretrain.main(command(run))


def check_equals_never_stopped(run, whole, deaths, is_lost=False) -> None:
    """Compare parameters, optimiser, keys, counters, every loss and every batch."""
    finished, batches = whole
    with read_batches(is_lost=is_lost) as read:
        for step in deaths:
            die_at(run, step)
        assert pretrain.main(command(run)) == ExitCode.DONE
    wanted, found = saved_leaves(finished, STEPS), saved_leaves(run, STEPS)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(run) == logged_losses(finished)
    assert read == batches


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    with read_batches() as read:
        assert pretrain.main(command(run)) == ExitCode.DONE
    assert sorted(read) == list(range(1, STEPS + 1)) and len(set(read.values())) == STEPS
    return run, read


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_resume_after_two_kills_is_bitwise(whole, tmp_path, seed):
    deaths = sorted(np.random.default_rng(seed).choice(np.arange(1, STEPS), 2, replace=False))
    check_equals_never_stopped(tmp_path / "run", whole, [int(step) for step in deaths])


@pytest.mark.slow
def test_a_resume_that_lost_its_data_position_is_found(whole, tmp_path):
    """The test of the test: the same batches again, from the first."""
    with pytest.raises(AssertionError):
        check_equals_never_stopped(tmp_path / "run", whole, [5], is_lost=True)


# In a group of its own, so that processes that outlive it can be identified.
VICTIM = """
import os, pathlib, signal, sys
from experiments import pretrain
from jaxmoe.run.reporter import Reporter

os.setpgrp()
trained = Reporter.log_steps

def trained_and_killed(self, report):
    trained(self, report)
    if report.steps[-1] == 3:
        shared = pathlib.Path("/proc/self/maps").read_text().count("/dev/shm/")
        print(f"shared segments: {shared}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

Reporter.log_steps = trained_and_killed
pretrain.main(sys.argv[1:])
"""


def _alive(group: int) -> list[int]:
    """Return the processes of a group."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == group:
                found.append(int(path.name))
        except (ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.slow
def test_killed_run_leaves_no_process_and_no_file(tmp_path):
    """Batches are read ahead by threads of Grain within the process (`Loader.iterate` asks for no
    workers), which end with it: no orphan can hold its memory, its segments or its pipes."""
    process = start_run(command(tmp_path / "run"), VICTIM)
    (output,) = written_by(process)  # an orphan would keep the pipe open
    assert process.returncode == -signal.SIGKILL, output
    assert "shared segments: 0" in output
    assert _alive(process.pid) == []
