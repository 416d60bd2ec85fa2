# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that save one checkpoint after another, to be killed at any time.

    python -m tests.support.killed_saver      a request per line: {"run", "port", "processes"}

Importing JAX and Orbax takes seconds and starting a backend a fraction of one: this process
imports, has one thread and no backend, and forks the processes that save. It answers a line with
their ids, and a second line when all have ended. What they have acknowledged stands in
`<run>/acknowledged`, written by the first of them after `finish`. Every other save is lazy, and
the state is overwritten after each.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.run.directory import RunDirectory
from sharding.distributed import start_processes
from tests.support.runs import ROOT

SIZE = 1 << 20
_PR_SET_PDEATHSIG = 1
_BASE = np.random.default_rng(0).standard_normal(SIZE, np.float32)


def values(step: int) -> np.ndarray:
    """Return the state of a step, the same in every process."""
    return np.roll(_BASE, step)


def start_server() -> subprocess.Popen[str]:
    """The process that forks; closing its input ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed_saver"],
        cwd=ROOT,
        # One device, whatever the tests have; and no thread before it forks.
        env={**os.environ, "XLA_FLAGS": "", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _end_with_parent() -> None:
    """End the process if the test was interrupted."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _save_for_ever(run: pathlib.Path, port: int, processes: int, index: int, keep: int) -> None:
    if processes > 1:
        start_processes(f"127.0.0.1:{port}", processes, index)
    directory = RunDirectory(run)
    if index == 0:
        directory.acquire()
    fence = directory.fence if index == 0 else None
    manager = CheckpointManager(directory.checkpoints_directory, keep=keep, fence=fence)
    placed = NamedSharding(Mesh(np.asarray(jax.devices()), "data"), PartitionSpec("data"))
    acknowledged = os.open(run / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    overwrite = jax.jit(lambda state: jax.tree.map(jnp.zeros_like, state), donate_argnums=0)
    step = (manager.latest_step() or 0) + 1
    while True:
        whole = values(step)
        state = {"w": jax.make_array_from_callback(whole.shape, placed, whole.__getitem__)}
        is_saved = manager.save(step, state, config={}, is_lazy=step % 2 == 0)
        jax.block_until_ready(overwrite(state))  # as a train step does
        is_saved = manager.finish() and is_saved
        if index == 0:
            assert is_saved
            os.write(acknowledged, f"{step}\n".encode())
        step += 1


def main() -> None:
    """Serves requests until there are no more."""
    _end_with_parent()
    assert len(os.listdir("/proc/self/task")) == 1, "only a process of one thread may fork"
    for line in sys.stdin:
        request = json.loads(line)
        request["run"] = pathlib.Path(request["run"])
        children = []
        for index in range(request["processes"]):
            if (child := os.fork()) == 0:
                _end_with_parent()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Gloo talks
                _save_for_ever(index=index, **request)
            children.append(child)
        print(json.dumps(children), flush=True)
        for child in children:
            os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
