# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every pair of seven meshes: save on one, restore on the other bitwise, then train 20 steps."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.fingerprints import fingerprints
from jaxmoe.state_tree import flatten, is_key
from tests.support.ports import free_port
from tests.support.restores import ALONE, MESHES, STEPS, TOGETHER, Training
from tests.support.runs import ROOT

HERE = [name for name in MESHES if name != TOGETHER]


def _two_processes(directory):
    """Restores, saves and continues over there; what the first of them tells."""
    port = free_port()
    running = []
    for index in range(2):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }
        command = [sys.executable, "-m", "tests.support.restores", str(directory)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    try:
        printed = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    return json.loads(printed[0][0].splitlines()[-1])


def _bits(state):
    leaves = {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in flatten(state).items()
    }
    return {path: (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in leaves.items()}


@pytest.mark.slow
def test_every_mesh_restores_what_every_mesh_saved(tmp_path):
    trainings = {name: Training(name) for name in HERE}
    first, _ = trainings[ALONE].run(trainings[ALONE].new, 3)
    wanted, names = _bits(first), fingerprints(first)
    assert any(path.startswith("router_state/") for path in wanted)
    save_checkpoint(tmp_path / ALONE, first, step=3, config={})
    for name in HERE[1:]:
        state = trainings[name].restore(tmp_path / ALONE)
        assert (
            len(jax.tree.leaves(state.params)[0].sharding.device_set) == trainings[name].mesh.size
        )
        save_checkpoint(tmp_path / name, state, step=3, config={})

    there = _two_processes(tmp_path)
    assert there["fingerprints"] == dict.fromkeys(MESHES, names)

    for source in MESHES:
        for target in HERE:
            assert _bits(trainings[target].restore(tmp_path / source)) == wanted, (source, target)

    ends = {name: trainings[name].continue_twice(tmp_path / TOGETHER) for name in HERE}
    ends[TOGETHER] = there
    for name, end in ends.items():
        assert len(end["losses"]) == STEPS and end["is_repeated"], name
        np.testing.assert_allclose(end["losses"], ends[ALONE]["losses"], rtol=1e-5, err_msg=name)
    _, losses = trainings[ALONE].run(first, STEPS)
    assert losses == ends[ALONE]["losses"], "as if it had never been saved"
