# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A preempted run that continues on fewer devices, then on more, differs by rounding only."""

import json
import os
import signal

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.run.reporter import Reporter
from tests.support.faults import read_batches
from tests.support.runs import flags, logged_losses, start_run, written_by

STEPS = 9


def preempt_after(step):
    """Make the reporter request preemption after a step."""
    trained = Reporter.log_steps

    def trained_and_preempted(self, report):
        trained(self, report)
        if report.steps[-1] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return trained_and_preempted


# Elsewhere, with other devices; leaves what each step has read.
SCRIPT = """
import json, pathlib, sys
from experiments import pretrain
from jaxmoe.run.reporter import Reporter
from tests.support.faults import read_batches
from tests.faults.test_elastic import preempt_after

Reporter.log_steps = preempt_after(int(sys.argv[1]))
with read_batches() as read:
    code = pretrain.main(sys.argv[3:])
pathlib.Path(sys.argv[2]).write_text(json.dumps(read))
sys.exit(code)
"""


def command(run, *mesh):
    noisy = ("model.moe.router:noisy_topk", "model.moe.gate:softmax")
    often = ("--tracking.print_every", "1", "--evaluation.every", "0")
    return flags(run, STEPS, *mesh, *often, "--tracking.sample_length", "0", *noisy)


@pytest.mark.slow
def test_resume_on_fewer_and_more_devices(tmp_path, monkeypatch):
    eight = ("--execution.mesh.data", "4", "--execution.mesh.expert", "2")
    two = ("--execution.mesh.data", "2", "--execution.rules", "data_parallel")
    stays, moves, told = tmp_path / "stays", tmp_path / "moves", tmp_path / "batches.json"
    with read_batches() as wanted:
        assert pretrain.main(command(stays, *eight)) == ExitCode.DONE
    with read_batches() as found:
        with monkeypatch.context() as patch:
            patch.setattr(Reporter, "log_steps", preempt_after(3))
            assert pretrain.main(command(moves, *eight)) == ExitCode.PREEMPTED
        process = start_run(["6", str(told), *command(moves, *two)], SCRIPT, devices=2)
        (output,) = written_by(process)
        assert process.returncode == ExitCode.PREEMPTED, output
        assert pretrain.main(command(moves, *eight)) == ExitCode.DONE
    there = {int(step): digest for step, digest in json.loads(told.read_text()).items()}
    # Batches are read ahead of the steps: some are read twice, and are the same.
    assert {5, 6} <= there.keys() and there.items() <= wanted.items()
    assert found | there == wanted
    stayed, moved = logged_losses(stays), logged_losses(moves)
    assert list(moved) == list(stayed) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(moved.values()), list(stayed.values()), rtol=1e-5)
