# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The run directory: lock, config check, environment, atomic files, errors in words."""

import dataclasses
import errno
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys

import pytest

from jaxmoe.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    steps: int = 10
    directory: str = "d"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run: Run = Run()
    learning_rate: float = 1e-3


HOLDER = """
import sys, time
from jaxmoe.run.directory import RunDirectory
run = RunDirectory(sys.argv[1])
run.acquire()
print("held", flush=True)
time.sleep(60)
"""


def hold(path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_layout_of_the_contract(tmp_path):
    run = RunDirectory(tmp_path)
    files = {
        run.config_file: "config.json",
        run.environment_file: "environment.json",
        run.metrics_file: "metrics.jsonl",
        run.router_file: "router.npz",
        run.plots_directory: "plots",
        run.report_file: "report.html",
        run.samples_file: "samples.txt",
        run.checkpoints_directory: "checkpoints",
        run.summary_file: "summary.json",
    }
    assert all(path == tmp_path / name for path, name in files.items())


def test_a_second_process_is_told_who_holds_the_directory(tmp_path):
    path = tmp_path / "run"
    holder = hold(path)
    with pytest.raises(ValueError) as error:
        RunDirectory(path).acquire()
    text = str(error.value)
    assert f"run.directory={path} is in use by process {holder.pid} on {platform.node()}" in text
    assert text.endswith("choose another directory with --run.directory")
    # kill -9: the kernel lets go.
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    run = RunDirectory(path)
    run.acquire()
    assert json.loads((run.path / "run.lock").read_text())["pid"] == os.getpid()
    run.release()


def test_the_lock_can_be_released(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.acquire()
    with pytest.raises(ValueError, match="in use"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()  # twice does no harm


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with RunDirectory("~/runs/mine").held():
        assert (tmp_path / "runs" / "mine" / "run.lock").exists()
    assert not (tmp_path / "~").exists()


def test_an_unwritable_place_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run"
    with pytest.raises(ValueError) as error:
        RunDirectory(path).acquire()
    assert f"run.directory={path} cannot be used (Not a directory" in str(error.value)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "has no space left: free some, or choose another directory"),
        (errno.EACCES, "is not writable: change its permissions, or choose another directory"),
    ],
)
def test_a_full_or_forbidden_disk_is_said_in_words(tmp_path, monkeypatch, number, words):
    run = RunDirectory(tmp_path)
    run.write_summary({"steps": 1})

    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for action in (run.acquire, lambda: run.write_summary({"steps": 2})):
        with pytest.raises(ValueError, match=words):
            action()
    run.release()
    # The old file is whole, and nothing is left behind.
    assert json.loads(run.summary_file.read_text()) == {"steps": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "run.lock"}


def test_another_config_is_refused_field_by_field(tmp_path):
    run = RunDirectory(tmp_path)
    run.check_config(Config())
    run.check_config(Config())
    before = run.config_file.read_text()
    with pytest.raises(ValueError) as error:
        run.check_config(Config(learning_rate=0.5, run=Run(steps=20)))
    assert str(error.value).splitlines() == [
        f"run.directory={tmp_path} belongs to a run with another config:",
        "  run.steps: saved 10, given 20",
        "  learning_rate: saved 0.001, given 0.5",
        "repeat the saved values, or choose another directory with --run.directory",
    ]
    assert run.config_file.read_text() == before


def test_free_fields_may_change_and_the_file_follows(tmp_path):
    run = RunDirectory(tmp_path)
    run.check_config(Config())
    run.check_config(Config(run=Run(steps=20)), free=("run.steps",))
    assert run.load_config(Config) == Config(run=Run(steps=20))
    with pytest.raises(ValueError, match="learning_rate"):
        run.check_config(Config(learning_rate=1.0, run=Run(steps=30)), free=("run.steps",))


def test_loading_says_what_is_wrong(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match="holds no run .config.json is missing.: give the dir"):
        run.load_config(Config)
    run.config_file.write_text('{"run": {"steps": 1, "directory": "d"}, "learning_rat": 1.0}')
    with pytest.raises(ValueError, match="config.json: learning_rat is not a field of Config"):
        run.load_config(Config)
    run.config_file.write_text('{"run": ')
    with pytest.raises(ValueError, match="config.json is not JSON"):
        run.check_config(Config())


def test_the_environment_is_recorded_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=1")
    monkeypatch.setenv("A_TOKEN", "secret")
    run = RunDirectory(tmp_path)
    run.write_environment(["cpu:0", "cpu:1"])
    text = run.environment_file.read_text()
    environment = json.loads(text)
    assert environment["devices"] == ["cpu:0", "cpu:1"]
    assert environment["python"] == platform.python_version()
    assert environment["host"] == platform.node()
    assert environment["packages"].keys() >= {"jax", "jaxlib", "flax", "optax", "numpy"}
    assert all(environment["packages"].values())
    assert environment["variables"]["XLA_FLAGS"] == "--xla_x=1"
    assert environment["command"] == shlex.join(sys.orig_argv)
    assert "secret" not in text


def test_the_summary_is_json_even_after_a_divergence(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_summary({"final_loss": math.nan, "mesh": {"data": 8}, "list": [1.5, math.inf]})
    summary = json.loads(run.summary_file.read_text(), parse_constant=pytest.fail)
    assert summary == {"final_loss": None, "mesh": {"data": 8}, "list": [1.5, None]}
