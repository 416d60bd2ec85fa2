# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM or Ctrl-C at any moment of a run: it ends in seconds and resumes bitwise.

Before the first step nothing is lost: the run ends at once, even inside the compiler, which keeps
Python from handling signals. Later the last finished step is saved.
"""

import json
import os
import signal
import time

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.run.reporter import Reporter
from jaxmoe.training.hooks import EvaluateHook
from tests.support.runs import flags, logged_losses, saved_leaves, start_run

pytestmark = pytest.mark.slow

STEPS = 8
AT_ONCE, WITH_REPORT = 5, 30
"""Seconds; a report with its pictures takes two on a quiet machine."""
MORE = ("--checkpoint.every", "4", "--evaluation.every", "3", "--tracking.print_every", "1")

# What stands for a compiler at work: a computation of half an hour, while no Python runs.
BUSY = """
import sys
import jax
from experiments import pretrain
from jaxmoe.run import trainer

def busy(*arguments, **options):
    print("busy", flush=True)
    def some(i, x):
        return jax.lax.fori_loop(0, 10**6, lambda i, x: jax.numpy.sin(x), x)

    turn = jax.jit(lambda x: jax.lax.fori_loop(0, 10**5, some, x))
    jax.block_until_ready(turn(1.0))

trainer.compile_steps = busy
sys.exit(pretrain.main(sys.argv[1:]))
"""
TERM = (signal.SIGTERM, ExitCode.PREEMPTED)
INT = (signal.SIGINT, ExitCode.INTERRUPTED)
# Where the signal comes, and the steps after which the run may have stopped.
LATE = {
    "reporting": (Reporter, "log_steps", {1, 2}, *INT),
    "evaluating": (EvaluateHook, "run", {3, 4}, *TERM),
    "saving": (CheckpointManager, "save", {4, 5}, *TERM),
    "finishing a save": (CheckpointManager, "finish", {1, 2, 3, 4, 5}, *TERM),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "alone"
    assert pretrain.main(flags(directory, STEPS, *MORE)) == ExitCode.DONE
    return directory


def _assert_goes_on(directory, alone):
    assert pretrain.main(flags(directory, STEPS, *MORE)) == ExitCode.DONE
    assert logged_losses(directory) == logged_losses(alone)
    wanted = saved_leaves(alone, STEPS)
    for path, leaf in saved_leaves(directory, STEPS).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)


@pytest.mark.parametrize("moment", LATE)
def test_signal_between_steps_saves_and_resumes_bitwise(
    moment, alone, tmp_path, monkeypatch, capsys
):
    owner, name, stops, number, code = LATE[moment]
    plain, sent = getattr(owner, name), []

    def with_signal(*arguments, **options):
        if not sent:
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, with_signal)
    directory = tmp_path / "run"
    assert pretrain.main(flags(directory, STEPS, *MORE)) == code
    assert time.monotonic() - sent[0] < WITH_REPORT
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["checkpoint_step"] == summary["steps"] in stops
    output = capsys.readouterr().out
    assert summary["status"] in output and "the same command continues from step" in output
    _assert_goes_on(directory, alone)


@pytest.mark.parametrize(("number", "code"), [TERM, INT])
def test_signal_during_compilation_ends_at_once(number, code, alone, tmp_path):
    directory = tmp_path / "run"
    process = start_run(flags(directory, STEPS, *MORE), BUSY)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line == "busy\n":
                break
        time.sleep(0.5)  # it is in there
        process.send_signal(number)
        began = time.monotonic()
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert time.monotonic() - began < AT_ONCE
    assert "before the first step: nothing to save" in output
    _assert_goes_on(directory, alone)
