# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes train as one does: over loopback, with gloo between them.

They are started as a user would start them, by the variables that `start_processes` reads.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.cli.flags import ExitCode
from tests.support.ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6

SMALL = (
    "tiny",
    "--training.steps",
    str(STEPS),
    "--training.batch_size",
    "16",
    "--training.sequence_length",
    "32",
    "--schedule.warmup_steps",
    "2",
    "--model.num_layers",
    "2",
    "--model.embed_dim",
    "32",
    "--model.moe.expert_dim",
    "16",
    "--evaluation.every",
    "3",
    "--evaluation.batches",
    "2",
    "--checkpoint.every",
    "3",
    "--tracking.print_every",
    "1",
    "--tracking.trackers",
)
# Processes, devices of each, and the mesh. The rows of a process are its own, or those of others.
LAYOUTS = {
    "shared": (2, 1, ("--execution.mesh.data=1",)),
    "stages": (
        2,
        2,
        ("--execution.mesh.stage=2", "--execution.mesh.data=1", "--training.accumulation=4"),
    ),
    "own": (4, 2, ("--execution.mesh.data=2", "--execution.mesh.expert=2")),
}


def _train(directory: pathlib.Path, processes: int, devices: int, mesh: tuple[str, ...]) -> None:
    """Runs the command in so many processes of so many devices; each must end well."""
    port = free_port()

    def start(index: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
            " --xla_backend_optimization_level=0",  # most of the time is compilation
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
        }
        command = [sys.executable, "-m", "experiments.pretrain", *SMALL, *mesh]
        return subprocess.Popen(
            [*command, "--execution.mesh.tensor=2", "--run.directory", str(directory)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    running = [start(index) for index in range(processes)]
    try:
        printed = [process.communicate(timeout=600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    assert codes == [ExitCode.DONE] * processes, "\n".join(printed)


def _losses(directory: pathlib.Path) -> dict[int, float]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("rows", ["shared", "stages", "own"])
def test_processes_train_to_the_loss_of_one(tmp_path, rows):
    """Two that are fully sharded are in tests/faults/test_restore_matrix.py."""
    alone, (processes, devices, mesh) = tmp_path / "alone", LAYOUTS[rows]
    _train(alone, 1, processes * devices, mesh)
    _train(tmp_path / "shared", processes, devices, mesh)
    expected, found = _losses(alone), _losses(tmp_path / "shared")
    assert list(found) == list(expected) and len(found) == STEPS
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    one, other = (
        json.loads((directory / "summary.json").read_text())
        for directory in (alone, tmp_path / "shared")
    )
    assert other["status"] == "done" and other["tokens"] == one["tokens"]
    assert other["mesh"] == one["mesh"]
    assert other["eval_bits_per_byte"] == pytest.approx(one["eval_bits_per_byte"], rel=1e-5)
