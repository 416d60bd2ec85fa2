# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is preempted and goes on with fewer devices, then with more: nothing but rounding.

The same global batch, the same rows in the same order, the same random bits (the router's noise
depends on the step and the place of a token, not on the devices), losses within 1e-5 of a run that
stayed where it was.
"""

import json

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli import ExitCode
from tests.support.faults import read_batches
from tests.support.runs import flags, logged_losses, start_run

STEPS = 9
# Asks to be preempted after a step, and leaves what each step has read.
SCRIPT = """
import json, os, pathlib, signal, sys
from experiments import pretrain
from experiments.reporting import Reporter
from tests.support.faults import read_batches

last, where = int(sys.argv[1]), pathlib.Path(sys.argv[2])
trained = Reporter.trained

def trained_and_preempted(self, report):
    trained(self, report)
    if report.steps[-1] == last:
        os.kill(os.getpid(), signal.SIGTERM)

Reporter.trained = trained_and_preempted
with read_batches() as read:
    code = pretrain.main(sys.argv[3:])
where.write_text(json.dumps(read))
sys.exit(code)
"""


def command(run, *mesh):
    noisy = ("model.moe.router:noisy_topk", "model.moe.gate:softmax")
    often = ("--tracking.print_every", "1", "--evaluation.every", "0")
    return flags(run, STEPS, *mesh, *often, "--tracking.sample_length", "0", *noisy)


def data(count, *more):
    return ("--execution.mesh.data", str(count), *more)


@pytest.mark.slow
def test_a_run_moves_to_fewer_and_to_more_devices(tmp_path):
    whole = data(4, "--execution.mesh.expert", "2")
    with read_batches() as read:
        assert pretrain.main(command(tmp_path / "stays", *whole)) == ExitCode.DONE
    wanted, found = read, {}
    stages = [
        (8, 3, whole, ExitCode.PREEMPTED),
        (2, 6, data(2, "--execution.rules", "data_parallel"), ExitCode.PREEMPTED),
        (4, STEPS + 1, data(4), ExitCode.DONE),
    ]
    for devices, last, mesh, code in stages:
        batches = tmp_path / f"{devices}.json"
        words = [str(last), str(batches), *command(tmp_path / "moves", *mesh)]
        process = start_run(words, SCRIPT, devices=devices)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == code, output
        for step, digest in json.loads(batches.read_text()).items():
            found.setdefault(int(step), set()).add(digest)
    # Batches are read ahead of the steps: some are read by two starts, and are the same.
    assert {step: {digest} for step, digest in wanted.items()} == found
    stayed, moved = logged_losses(tmp_path / "stays"), logged_losses(tmp_path / "moves")
    assert list(moved) == list(stayed) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(moved.values()), list(stayed.values()), rtol=1e-5)
    summary = json.loads((tmp_path / "moves" / "summary.json").read_text())
    assert summary["mesh"] == {"data": 4} and summary["status"] == "done"
