# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Three processes lose one for good: two go on, from memory, with the same losses."""

from __future__ import annotations

import json
import re
import shlex
import sys

import numpy as np
import pytest

from experiments.cli.flags import ExitCode
from experiments.launch import __main__ as launch
from tests.support.runs import ROOT, flags, logged_losses

STEPS = 8

# The process of place 1 is killed once its steps are snapshots; notes the time, as do the first
# steps of the next start.
VICTIM = """
import os, pathlib, signal, sys, time
directory = pathlib.Path(sys.argv[sys.argv.index("--run.directory") + 1])
memory = pathlib.Path(os.environ["JAXMOE_SNAPSHOTS"])
first, again = directory.with_suffix(".killed"), directory.with_suffix(".again")
is_second = first.exists()

from experiments import pretrain
from jaxmoe.run.reporter import Reporter

trained = Reporter.log_steps

def noted(self, report):
    trained(self, report)
    if is_second and memory.name == "process0" and not again.exists():
        again.write_text(str(time.time()))
    if not is_second and memory.name == "process1" and report.steps[-1] >= 5:
        while not all((memory.with_name(f"process{i}") / "4").exists() for i in range(3)):
            time.sleep(0.01)
        first.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

Reporter.log_steps = noted
sys.exit(pretrain.main(sys.argv[1:]))
"""


def supervised(tmp_path, name, script, processes, *more):
    """Run the main job under the supervisor; return the times of its marks, and its output."""
    given = flags(
        tmp_path / name, STEPS, "--tracking.print_every", "1", "--evaluation.batches", "1"
    )
    experts = given.index("--model.moe.expert_dim")
    given = [*given[:experts], *given[experts + 2 :], "--execution.rules", "data_parallel"]
    given += ["--training.batch_size", "12", "--checkpoint.every", "0", *more, "model.moe:none"]
    command = shlex.join([sys.executable, *script, *given])
    words = ["--supervise", "--processes", str(processes), "--command", command]
    words += ["--run.directory", str(tmp_path / f"launch-{name}"), "--snapshots", str(tmp_path)]
    return launch.main([*words, "--elastic", "shrink", "--elastic.after", "1"])


@pytest.mark.large
@pytest.mark.timeout(2400)
def test_two_of_three_processes_go_on_from_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    )
    victim = tmp_path / "victim.py"
    victim.write_text(VICTIM)
    snapshots = ("--snapshots.every", "2")
    code = supervised(tmp_path, "lost", [str(victim)], 3, *snapshots)
    printed = capsys.readouterr().out
    assert code == ExitCode.DONE, printed
    summary = json.loads((tmp_path / "launch-lost" / "summary.json").read_text())
    assert [start["processes"] for start in summary["starts"]] == [3, 2]
    assert "place 1 is left out: 2 of 3 processes go on" in printed
    assert (
        "elastic  mesh.data=2, the largest size that fits the 2 devices of 2 processes" in printed
    )
    origin = r"step \d from snapshots in memory of 3 processes on another mesh"
    assert re.search(rf"restored ({origin}) \(process 1 rebuilt from parity\)", printed)
    run = json.loads((tmp_path / "lost" / "summary.json").read_text())
    assert run["mesh"] == {"data": 2} and "snapshots" in run["restored_from"]
    assert [path.name for path in (tmp_path / "lost" / "checkpoints").iterdir()] == [str(STEPS)]
    killed, again = (float((tmp_path / f"lost.{name}").read_text()) for name in ("killed", "again"))
    print(f"from the kill to the first step on two processes: {again - killed:.1f} s")
    assert supervised(tmp_path, "alone", ["-m", "experiments.pretrain"], 1) == ExitCode.DONE
    found, wanted = logged_losses(tmp_path / "lost"), logged_losses(tmp_path / "alone")
    assert list(found) == list(wanted) == [*range(1, STEPS + 1)]
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
