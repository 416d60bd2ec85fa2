# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs whose workers exchange beside the training are killed while numbers are on their way."""

import signal

import numpy as np
import pytest

from experiments.cli.flags import ExitCode
from jaxmoe.contrib.slow_links import StreamingConfig
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from tests.support.runs import flags, logged_losses, saved_leaves, start_run, written_by

STEPS, WORKERS = 8, 2
METHODS = {
    "streaming": ("--replicas.every", "4", "--replicas.fragments", "2", "--replicas.delay", "2"),
    "co2": ("--replicas.every", "3"),
}

_ARRIVED = "['parts']['workers']['arrived']"

# Killed at the step after a checkpoint that is whole.
KILLED = """
import os, pathlib, signal, sys, time
from experiments import pretrain
from jaxmoe.run.reporter import Reporter

step, *arguments = sys.argv[1:]
directory = pathlib.Path(arguments[arguments.index("--run.directory") + 1])
saved, trained = directory / "checkpoints" / step / "manifest", Reporter.log_steps

def trained_and_killed(self, report):
    trained(self, report)
    if report.steps[-1] == int(step) + 1:
        while not saved.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

Reporter.log_steps = trained_and_killed
pretrain.main(arguments)
"""


def command(run, method, saved):
    quiet = ("--tracking.print_every", "1", "--evaluation.every", "0")
    quiet += ("--tracking.sample_length", "0", "--checkpoint.every", str(saved))
    mesh = ("--execution.mesh.replica", str(WORKERS), "--training.batch_size", "16")
    return flags(run, STEPS, *quiet, *mesh, f"replicas:{method}", *METHODS[method])


def step_in_flight():
    """A step after which a fragment has been sent and not yet merged."""
    streaming = StreamingConfig(every=4, fragments=2, delay=2, workers=WORKERS)
    timing = streaming.build(TrainingFacts((), WORKERS, STEPS)).timing
    sent = [step for step in range(STEPS) for part in range(2) if timing.sends(part, step)]
    return sent[1] + 1


def _run(arguments, code, script=None):
    """What a process of one device for each worker prints until it ends with a code."""
    process = start_run(arguments, script, devices=WORKERS)
    (printed,) = written_by(process)
    assert process.returncode == code, printed
    return printed


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_killed_with_numbers_on_their_way_resumes_bitwise(method, tmp_path):
    whole, killed, saved = tmp_path / "whole", tmp_path / "killed", step_in_flight()
    _run(command(whole, method, saved), ExitCode.DONE)
    _run([str(saved), *command(killed, method, saved)], -signal.SIGKILL, KILLED)
    if method == "streaming":
        arrays = saved_leaves(killed, saved)
        on_the_way = [leaf for path, leaf in arrays.items() if path.startswith(_ARRIVED)]
        assert any(map(np.any, on_the_way))
    assert f"restored step {saved}" in _run(command(killed, method, saved), ExitCode.DONE)
    wanted, found = saved_leaves(whole, STEPS), saved_leaves(killed, STEPS)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(killed) == logged_losses(whole)
