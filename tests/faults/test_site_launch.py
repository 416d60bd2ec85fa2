# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher of sites: environment, directories, restarts, exit codes."""

import json
import os
import pathlib
import shlex
import signal
import sys
import threading
import time

import pytest

from experiments.cli.flags import ExitCode
from experiments.cli.output import write
from experiments.launch import __main__ as launch
from experiments.launch import sites
from experiments.launch.sites import SitesConfig
from jaxmoe.contrib.slow_links.sites.config import KEY_VARIABLE, VARIABLE, SiteConfig
from jaxmoe.run.directory import RunDirectory
from tests.support.runs import ROOT, flags, start_run

LAUNCHER = (
    "import sys; from experiments.launch import __main__ as launch; launch.main(sys.argv[1:])"
)


def _launch(folder, *more, command=None):
    given = ["--islands", "2", "--run.directory", str(folder / "run"), "--snapshots", str(folder)]
    code = launch.main([*given, "--command", command, *more])
    return code, json.loads((folder / "run" / "summary.json").read_text())


def test_each_site_has_its_environment_and_is_restarted_alone(tmp_path, capsys):
    """Real sites: one is killed after its first round, is started again, and joins."""
    script = ROOT / "tests" / "support" / "site_process.py"
    killed = (
        f"mark={tmp_path}/mark; if [ {{island}} = 2 ] && [ ! -e $mark ]; then touch $mark;"
        f" {sys.executable} {script} {tmp_path}/killed &"
        f" until [ -s {tmp_path}/killed ]; do sleep 0.02; done; kill -9 $!; kill -9 $$; fi;"
        f" exec {sys.executable} {script} {tmp_path}/log{{island}}"
    )
    given = ["--islands", "4", "--islands_grace", "1", "--run.directory", str(tmp_path / "run")]
    code = launch.main([*given, "--snapshots", str(tmp_path), "--command", f"bash -c '{killed}'"])
    assert code == ExitCode.DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "ended" and set(summary["islands"]) == {"0", "1", "2", "3"}
    assert "site 2: process 0 was killed by SIGKILL; start 2 follows" in capsys.readouterr().out
    lines = [(tmp_path / f"log{m}").read_text().splitlines()[-1] for m in range(4)]
    ends = [json.loads(line) for line in lines]
    assert len({end["state"] for end in ends}) == 1
    assert [end["members"] for end in ends] == [[0, 1, 2, 3]] * 4


def test_run_directories_and_variables_of_sites(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    script = (
        "import json, os, sys; names = ('JAXMOE_ISLAND', 'JAXMOE_ISLANDS_KEY');"
        "print(json.dumps([*(os.environ[name] for name in names), *sys.argv[1:]]))"
    )
    command = shlex.join([sys.executable, "-c", script, "--run.directory", "runs/my run/"])
    code, summary = _launch(
        tmp_path, "--islands_transport", "directory", "--islands_quorum", "1", command=command
    )
    assert code == ExitCode.DONE and summary["code"] == 0
    keys = set()
    for member in range(2):
        log = tmp_path / "run" / f"island{member}" / "start1-process0.log"
        site, key, flag, directory = json.loads(log.read_text())
        assert (flag, directory) == ("--run.directory", f"runs/my run-island{member}")
        assert SiteConfig.from_text(site) == SiteConfig(
            member=member, of=2, quorum=1, transport=f"directory:{tmp_path}/run/exchange"
        )
        keys.add(key)
    assert len(keys) == 1 and len(keys.pop()) == 64


@pytest.mark.parametrize(("code", "starts"), [(ExitCode.DIVERGED, 1), (ExitCode.NOT_SAVED, 2)])
def test_the_exit_code_is_that_of_the_site_that_failed(tmp_path, code, starts):
    """And of one that may be restarted only while others are there to join."""
    script = (
        "import os, sys, time; is_bad = 'member=1' in os.environ['JAXMOE_ISLAND'];"
        f"time.sleep(not is_bad and 1.5); sys.exit(is_bad and {int(code)})"
    )
    found, summary = _launch(
        tmp_path, "--max_restarts", "1", command=shlex.join([sys.executable, "-c", script])
    )
    assert found == code == summary["code"] and summary["islands"]["0"]["code"] == 0
    own = json.loads((tmp_path / "run" / "island1" / "summary.json").read_text())
    assert len(own["starts"]) == starts


def test_a_signal_reaches_all_sites(tmp_path):
    script = (
        "import os, pathlib, signal, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75));"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['JAXMOE_ISLAND'].split()[0]).touch();"
        "is_first = 'member=0' in os.environ['JAXMOE_ISLAND'];"
        f"\nwhile len(list(pathlib.Path({str(tmp_path)!r}).glob('member=*'))) < 2: time.sleep(.01)"
        "\nif is_first: os.kill(os.getppid(), signal.SIGTERM)"
        "\nwhile True: time.sleep(.01)"  # a signal just before a sleep is handled after it
    )
    code, _ = _launch(tmp_path, command=shlex.join([sys.executable, "-c", script]))
    assert code == ExitCode.PREEMPTED
    ends = json.loads((tmp_path / "run" / "summary.json").read_text())["islands"]
    assert [ends[member]["code"] for member in "01"] == [75, 75]


def test_the_coordinator_runs_alone_until_a_signal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sites, "write", lambda text: (timer.start(), write(text)))
    given = ["--islands", "0", "--islands_of", "4", "--islands_address", "127.0.0.1:0"]
    assert launch.main([*given, "--run.directory", str(tmp_path)]) == ExitCode.DONE
    assert "sites: coordinator on tcp://127.0.0.1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--islands", "-1"), "islands=-1 must be at least 0"),
        (("--islands", "0"), "islands=0 runs the coordinator alone: give --islands_of"),
        (("--islands", "2", "--islands_quorum", "3"), "site quorum=3 must be from 1 to of=2"),
        (("--islands", "2", "--islands_grace", "0"), "site grace=0.0 must be more than 0 s"),
        (("--islands", "2", "--islands_of", "4"), "give the --islands_address at which they meet"),
        (("--islands", "2", "--islands_first", "1"), "islands_first=1 and islands=2 must lie"),
        (
            ("--islands=2", "--islands_of", "4", "--islands_address", "10.0.0.1:84"),
            "sites on several hosts need the same secret in $JAXMOE_ISLANDS_KEY",
        ),
        (
            ("--islands", "2", "--command", "python -m experiments.pretrain"),
            "command has no --run.directory, and sites cannot share the default one",
        ),
        (("--islands", "2", "--islands_address", "node0"), "address=node0 is not host:port"),
    ],
)
def test_bad_input(tmp_path, capsys, monkeypatch, given, message):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as stopped:
        launch.main(["--run.directory", str(tmp_path / "run"), *given])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("x --run.directory runs/a", "x --run.directory runs/a-island3"),
        ("x --run.directory=runs/a/ -y", "x --run.directory=runs/a-island3 -y"),
        ("x --run.directory runs/{island}/a", "x --run.directory runs/3/a"),
        ("x 'a b'", "x 'a b'"),
    ],
)
def test_the_command_of_an_site(command, wanted):
    assert SitesConfig(command=command, islands=4).command_of(3) == wanted
    assert VARIABLE == "JAXMOE_ISLAND"


@pytest.mark.slow
@pytest.mark.trains
def test_sites_of_a_launcher_that_is_killed_end_in_words(tmp_path):
    """One waits in a round for the other, which is held: neither keeps its directory."""
    place = tmp_path / "run-island{island}"
    words = [sys.executable, "-m", "experiments.pretrain", *flags(place, 10**6)]
    words += ["--evaluation.every", "0", "replicas:diloco", "--replicas.every", "3"]
    begin = f"echo $$ > {tmp_path}/pid{{island}}; exec {shlex.join(words)}"
    given = ["--islands", "2", "--run.directory", str(tmp_path / "launch")]
    given += ["--snapshots", str(tmp_path), "--command", shlex.join(["bash", "-c", begin])]
    launcher = start_run(given, LAUNCHER)
    runs = [tmp_path / f"run-island{member}" for member in range(2)]
    sites = list[int]()
    try:
        _wait_for(lambda: all(_has_steps(run) for run in runs), 240)
        sites += [int((tmp_path / f"pid{member}").read_text()) for member in range(2)]
        os.kill(sites[1], signal.SIGSTOP)
        time.sleep(2)  # site 0 waits by now
        launcher.kill()
        _wait_for(lambda: not _is_there(sites[0]), 60)
        os.kill(sites[1], signal.SIGCONT)
        _wait_for(lambda: not _is_there(sites[1]), 60)
    finally:
        launcher.kill()
        launcher.communicate()
        for site in sites:
            if _is_there(site):
                os.kill(site, signal.SIGKILL)
    for member, run in enumerate(runs):
        log = (tmp_path / "launch" / f"island{member}" / "start1-process0.log").read_text()
        assert "the launcher of this process has ended" in log
        assert json.loads((run / "summary.json").read_text())["status"] == "preempted"
        directory = RunDirectory(run)
        directory.acquire()
        directory.release()


def _has_steps(run):
    path = run / "metrics.jsonl"
    return path.exists() and '"step": ' in path.read_text()


def _is_there(process):
    """Whether it runs; one that has ended stays a zombie where no process waits for orphans."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def _wait_for(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
