# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor handles lost, failing, hanging and preempted processes, in time."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from experiments.cli.flags import ExitCode
from experiments.launch import __main__ as launch
from tests.support.runs import ROOT

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
def test_permanent_failures_are_not_restarted(tmp_path, capsys, code):
    found, summary, _ = _supervise(tmp_path, str(int(code)))
    assert found == code and len(summary["starts"]) == 1
    words = code.name.lower().replace("_", " ")
    assert f"process 1 ended with {int(code)} ({words}); ended after 1 start" in (
        capsys.readouterr().out
    )


def test_silent_process_counts_as_hung(tmp_path):
    code, summary, _ = _supervise(tmp_path, "hang", "--silence", "2", "--max_restarts", "0")
    assert code == 128 + signal.SIGKILL
    assert "they hang" in summary["starts"][0]["cause"]


# The process of place 1 is killed in every start in which it is; of fewer than three, the others
# wait until they are asked to save.
SHRINKING = """
import os, pathlib, signal, sys, time
place, marks = pathlib.Path(os.environ["JAXMOE_SNAPSHOTS"]).name, pathlib.Path(sys.argv[1])
number = int(os.environ.get("JAX_NUM_PROCESSES", 1))
print(place, number, os.environ["JAXMOE_ELASTIC"], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if place == "process1" and len(list(marks.iterdir())) < 2:
    (marks / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)
if number == int(sys.argv[2]):
    sys.exit(2)
if number < 3 and len(sys.argv) > 3 or len(list(marks.iterdir())) < 2:
    while True:
        time.sleep(0.01)  # a signal that comes just before a sleep is handled after it
"""


def _shrink(tmp_path, *words, more=()):
    script, marks = tmp_path / "toy.py", tmp_path / "marks"
    script.write_text(SHRINKING)
    marks.mkdir()
    command = shlex.join([sys.executable, str(script), str(marks), *words])
    given = ["--supervise", "--processes", "3", "--grace", "1", "--command", command]
    given += ["--elastic", "shrink", *more]
    code = launch.main([*given, "--run.directory", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    return code, [(start["code"], start["processes"]) for start in summary["starts"]]


def test_a_process_that_is_lost_twice_is_left_out(tmp_path, capsys):
    """The others keep their memory under other numbers."""
    code, starts = _shrink(tmp_path, "0")
    assert code == ExitCode.DONE and starts == [(137, 3), (137, 3), (0, 2)]
    logs = [(tmp_path / "run" / f"start3-process{i}.log").read_text() for i in (0, 1)]
    assert logs == ["process0 2 shrink\n", "process2 2 shrink\n"]
    assert "place 1 is left out: 2 of 3 processes go on" in capsys.readouterr().out


def test_fewer_processes_are_tried_where_two_cannot_share_the_batch(tmp_path):
    code, starts = _shrink(tmp_path, "2")
    assert code == ExitCode.DONE and starts == [(137, 3), (137, 3), (2, 2), (0, 1)]


@pytest.mark.parametrize("spawning", [0.0, 0.2])
def test_all_processes_are_tried_again_after_a_while(tmp_path, capsys, monkeypatch, spawning):
    """Also where starting the processes takes part of the while."""

    begin = subprocess.Popen.__init__

    def slow(self, *args, **options):
        time.sleep(spawning)
        begin(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", slow)
    more = ("--elastic.retry", "2")
    code, starts = _shrink(tmp_path, "0", "waits", more=more)
    assert code == ExitCode.DONE and starts == [(137, 3), (137, 3), (75, 2), (0, 3)]
    assert "supervisor: all 3 processes are tried again" in capsys.readouterr().out


def test_signals_are_forwarded(tmp_path):
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75));"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"  # a signal just before a sleep is handled after it
    )
    command = [sys.executable, "-m", "experiments.launch", "--supervise", "--run.directory"]
    command += [str(tmp_path / "run"), "--command", shlex.join([sys.executable, "-c", script])]
    command += ["--snapshots", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert list(tmp_path.glob("jaxmoe-*/process0"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == ExitCode.PREEMPTED
    assert not list(tmp_path.glob("jaxmoe-*")), "the memory is given back"


# Counts the signals that it gets from the first one on, for a while.
COUNTING = """
import os, pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
pathlib.Path(sys.argv[1], f"ready{os.environ['JAX_PROCESS_ID']}").touch()
while not heard:
    time.sleep(0.01)
time.sleep(1.0)
print(len(heard), "heard", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_while_they_are_started_reaches_each_once(tmp_path, monkeypatch, asked):
    class Interrupting(subprocess.Popen):
        """Is there, and its supervisor does not know it yet when the signal comes."""

        def __init__(self, *arguments, env, **options):
            super().__init__(*arguments, env=env, **options)
            index = env["JAX_PROCESS_ID"]
            while not (tmp_path / f"ready{index}").exists():
                time.sleep(0.01)
            if index == str(asked):
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    command = shlex.join([sys.executable, "-c", COUNTING, str(tmp_path)])
    given = ["--supervise", "--processes", "2", "--command", command, "--silence", "60"]
    code = launch.main([*given, "--run.directory", str(tmp_path / "run")])
    assert code == ExitCode.PREEMPTED
    logs = [tmp_path / "run" / f"start1-process{index}.log" for index in range(2)]
    assert [log.read_text() for log in logs] == ["1 heard\n"] * 2


def test_supervisor_names_the_first_failure(tmp_path):
    """Process 0 prints the reason and ends last."""
    script = (
        "import os, sys, time; is_first = os.environ['JAX_PROCESS_ID'] == '0';"
        "time.sleep(is_first); sys.exit(2 if is_first else 69)"
    )
    command = shlex.join([sys.executable, "-c", script])
    given = ["--supervise", "--processes", "2", "--grace", "60", "--command", command]
    assert launch.main([*given, "--run.directory", str(tmp_path)]) == ExitCode.BAD_CONFIGURATION
    (start,) = json.loads((tmp_path / "summary.json").read_text())["starts"]
    assert start["cause"] == "process 0 ended with 2 (bad configuration)"


def test_each_of_several_hosts_has_its_own_supervisor(tmp_path):
    """The numbers of its processes, the common address, a directory in memory for each; which is
    there until the end, and what an earlier supervisor left when it was killed is not."""
    memory = tmp_path / "memory"
    abandoned = memory / "jaxmoe-abandoned"
    (abandoned / "process0").mkdir(parents=True)
    (abandoned / "held").touch()
    script = (
        "import json, os, pathlib, sys; own = pathlib.Path(os.environ['JAXMOE_SNAPSHOTS']);"
        "names = ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID');"
        "told = [os.environ[f'JAX_{name}'] for name in names];"
        "is_first = not (own / 'kept').exists(); (own / 'kept').touch();"
        f"left = os.path.exists({str(abandoned)!r});"
        "print(json.dumps([*told, own.name, os.listdir(own), left])); sys.exit(75 * is_first)"
    )
    given = ["--supervise", "--run.directory", str(tmp_path / "run"), "--processes", "2"]
    given += ["--coordinator", "node0:8476", "--num_processes", "6", "--first_process", "4"]
    command = shlex.join([sys.executable, "-c", script])
    assert launch.main([*given, "--snapshots", str(memory), "--command", command]) == ExitCode.DONE
    for process in ("4", "5"):
        log = (tmp_path / "run" / f"start2-process{process}.log").read_text()
        wanted = ["node0:8476", "6", process, f"process{process}", ["kept"], False]
        assert json.loads(log) == wanted
    assert list(memory.iterdir()) == []


def test_snapshots_fall_back_to_the_temporary_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "import os; print('in', os.environ['JAXMOE_SNAPSHOTS'])"
    given = ["--supervise", "--run.directory", str(tmp_path / "run"), "--snapshots", "/nowhere"]
    command = shlex.join([sys.executable, "-c", script])
    assert launch.main([*given, "--command", command]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "warning: no directory in /nowhere (No such file or directory): snapshots go to" in out
    assert f"in {tmp_path}/jaxmoe-" in out and not list(tmp_path.glob("jaxmoe-*"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--processes", "0"), "processes=0 must be at least 1"),
        (("--command", ""), "command is empty: give what each process runs"),
        (("--grace", "0"), "grace=0 must be at least 1 second"),
        (("--num_processes", "4"), "num_processes=4 are more than the processes=1"),
        (
            ("--first_process", "1"),
            "first_process=1 and processes=1 must lie within",
        ),
        (("--coordinator", "node0"), "JAX_COORDINATOR_ADDRESS=node0 is not host:port"),
        (
            ("--coordinator", "node0:1", "--num_processes", "4", "--elastic", "shrink"),
            "elastic=shrink leaves out processes of this host, and num_processes=4 are on several",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as stopped:
        launch.main(["--supervise", "--run.directory", str(tmp_path / "run"), *more])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


def test_excluded_processes_are_not_started_and_the_others_are_numbered_anew(tmp_path, capsys):
    """Without 1 and 2 of four processes, 0 and 3 become 0 and 1 of two."""
    script = "import os; print(*(os.environ[f'JAX_{x}'] for x in ('PROCESS_ID', 'NUM_PROCESSES')))"
    command = shlex.join([sys.executable, "-c", script])
    given = ["--supervise", "--processes", "4", "--exclude", "1", "2", "--command", command]
    assert launch.main([*given, "--run.directory", str(tmp_path / "run")]) == ExitCode.DONE
    logs = sorted(path.name for path in (tmp_path / "run").glob("*.log"))
    assert logs == ["start1-process0.log", "start1-process1.log"]
    printed = [(tmp_path / "run" / name).read_text().split() for name in logs]
    assert printed == [["0", "2"], ["1", "2"]]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["excluded"] == [1, 2]
    here = [*given, "--num_processes", "8", "--coordinator", "node0:8476"]
    numbers = ["--exclude", *map(str, range(4)), "--run.directory", str(tmp_path / "none")]
    capsys.readouterr()
    assert launch.main([*here, *numbers]) == ExitCode.DONE
    assert "leaves no process of this host" in capsys.readouterr().out
    for words, message in (
        (["--exclude", "4"], "exclude=4 is no process: they count from 0 to 3"),
        (["--exclude", "0", "1", "2", "3"], "exclude leaves none of the 4 processes"),
    ):
        with pytest.raises(SystemExit) as stop:
            launch.main([*given, *words])
        assert stop.value.code == ExitCode.BAD_CONFIGURATION
        assert message in capsys.readouterr().err
