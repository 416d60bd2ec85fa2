# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two processes of four devices go on with three of each, and equal one process of eight."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from tests.support.ports import free_port
from tests.support.runs import flags, logged_losses, start_run, written_by

STEPS = 6

# Waits for the mesh that is being prepared, so that a short run sees it.
SCRIPT = """
import concurrent.futures, sys
from experiments import pretrain
from jaxmoe.contrib.elastic import resizing

event = resizing.Resizing.event

def waiting(self):
    if self._preparing is not None:
        concurrent.futures.wait([self._preparing])
    return event(self)

resizing.Resizing.event = waiting
sys.exit(pretrain.main(sys.argv[1:]))
"""


def _flags(run):
    given = flags(run, STEPS, "--tracking.print_every", "1", "--evaluation.batches", "1")
    experts = given.index("--model.moe.expert_dim")
    given = [*given[:experts], *given[experts + 2 :], "--checkpoint.every", "0"]
    sizes = ("--training.batch_size", "24", "--model.embed_dim", "24")
    return [*given, *sizes, "--model.attention.head_dim", "24", "model.moe:none"]


@pytest.mark.large
def test_two_processes_resize_without_a_restart(tmp_path):
    run, port = tmp_path / "moves", free_port()
    run.mkdir()
    (run / "resize.json").write_text('{"mesh": {"data": 6}}')
    started = [
        start_run(
            _flags(run),
            SCRIPT,
            devices=4,
            variables={
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
        )
        for index in range(2)
    ]
    printed = written_by(*started)
    assert [process.returncode for process in started] == [0, 0], printed
    summary = json.loads((run / "summary.json").read_text())
    (event,) = summary["resizes"]
    assert summary["mesh"] == {"data": 6} and 1 <= event["step"] < STEPS, event
    print(event["message"])
    assert pretrain.main(_flags(tmp_path / "stays")) == ExitCode.DONE
    found, wanted = logged_losses(run), logged_losses(tmp_path / "stays")
    assert list(found) == list(wanted) == [*range(1, STEPS + 1)]
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
