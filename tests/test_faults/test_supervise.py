# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor: lost, raising, hanging and preempted processes, in time and with the cause."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import launch
from experiments.cli import ExitCode
from tests.support.runs import ROOT, flags, logged_losses, saved_leaves

# Process 1 of the first start does what it is told; every other one waits, or is done.
TOY = """
import os, pathlib, signal, sys, time
what, marks = sys.argv[1], pathlib.Path(sys.argv[2])
index = int(os.environ.get("JAX_PROCESS_ID", 0))
marks.mkdir(exist_ok=True)
(marks / str(os.getpid())).touch()
print("process", index, flush=True)
if len(list(marks.iterdir())) > 2:
    sys.exit(0)
while len(list(marks.iterdir())) < 2:
    time.sleep(0.01)
if index == 1:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("broken")
    if what != "hang":
        sys.exit(int(what))
time.sleep(600)
"""


def _supervise(tmp_path, what, *more):
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    command = shlex.join([sys.executable, str(script), what, str(tmp_path / "marks")])
    given = ["--supervise", "--processes", "2", "--grace", "1", "--command", command]
    began = time.monotonic()
    code = launch.main([*given, "--run.directory", str(tmp_path / "run"), *more])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    return code, summary, time.monotonic() - began


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("kill", "process 1 was killed by SIGKILL"),
        ("raise", "process 1 ended with 1 (a traceback, see its log)"),
        ("75", "process 1 ended with 75 (preempted)"),
    ],
)
def test_a_lost_process_ends_the_others_and_all_start_again(tmp_path, capsys, what, cause):
    code, summary, seconds = _supervise(tmp_path, what)
    assert code == ExitCode.DONE and summary["status"] == "ended"
    assert [start["cause"] for start in summary["starts"]] == [cause, "done"]
    assert summary["starts"][0]["seconds"] < 1 + 5, "the grace and five seconds"
    out = capsys.readouterr().out
    assert f"supervisor: {cause}; start 2 follows" in out and "process 0" in out
    log = (tmp_path / "run" / "start1-process1.log").read_text()
    assert "process 1" in log and ("broken" in log) == (what == "raise")


@pytest.mark.parametrize("code", [ExitCode.BAD_CONFIGURATION, ExitCode.DIVERGED])
def test_what_would_end_alike_is_not_started_again(tmp_path, capsys, code):
    found, summary, _ = _supervise(tmp_path, str(int(code)))
    assert found == code and len(summary["starts"]) == 1
    words = code.name.lower().replace("_", " ")
    assert f"process 1 ended with {int(code)} ({words}); ended after 1 starts" in (
        capsys.readouterr().out
    )


def test_silence_counts_as_hanging(tmp_path):
    code, summary, _ = _supervise(tmp_path, "hang", "--silence", "2", "--max_restarts", "0")
    assert code == 128 + signal.SIGKILL
    assert "they hang" in summary["starts"][0]["cause"]


def test_signals_go_on_to_the_processes(tmp_path):
    script = (
        "import signal, sys, time; print('ready', flush=True);"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(600)"
    )
    command = [sys.executable, "-m", "experiments.launch", "--supervise", "--run.directory"]
    command += [str(tmp_path / "run"), "--command", shlex.join([sys.executable, "-c", script])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # until its handler is there
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--processes", "0"), "processes=0 must be at least 1"),
        (("--command", ""), "command is empty: give what each process runs"),
        (("--grace", "0"), "grace=0 must be at least 1 second"),
    ],
)
def test_bad_input(tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as stopped:
        launch.main(["--supervise", "--run.directory", str(tmp_path / "run"), *more])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


# Kills process 1 in its first start, after step 5 and once the checkpoint of step 4 is written.
VICTIM = """
import os, pathlib, signal, sys, time
from experiments import pretrain
from experiments.reporting import Reporter

directory = pathlib.Path(sys.argv[sys.argv.index("--run.directory") + 1])
mark = directory.with_suffix(".killed")
trained = Reporter.trained

def trained_and_killed(self, report):
    trained(self, report)
    is_victim = os.environ["JAX_PROCESS_ID"] == "1" and not mark.exists()
    if is_victim and report.steps[-1] >= 5:
        while not (directory / "checkpoints" / "4").exists():
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

Reporter.trained = trained_and_killed
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_one_of_two_processes_of_a_run_is_killed(tmp_path, monkeypatch):
    """The other is out in time, the restart has the losses of a run that was left alone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    victim = tmp_path / "victim.py"
    victim.write_text(VICTIM)
    more = ("--execution.mesh.data", "4", "--checkpoint.every", "4", "--tracking.print_every", "1")
    starts = {}
    for name, script in {"alone": ["-m", "experiments.pretrain"], "killed": [str(victim)]}.items():
        command = shlex.join([sys.executable, *script, *flags(tmp_path / name, 8, *more)])
        where = str(tmp_path / f"launch-{name}")
        given = ["--supervise", "--processes", "2", "--run.directory", where]
        assert launch.main([*given, "--command", command]) == ExitCode.DONE
        summary = json.loads((pathlib.Path(where) / "summary.json").read_text())
        starts[name] = summary["starts"]
    assert [s["cause"] for s in starts["killed"]] == ["process 1 was killed by SIGKILL", "done"]
    assert logged_losses(tmp_path / "killed") == logged_losses(tmp_path / "alone")
    wanted = saved_leaves(tmp_path / "alone", 8)
    for path, leaf in saved_leaves(tmp_path / "killed", 8).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
