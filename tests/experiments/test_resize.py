# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command checks a request against the files of the run, and shows what became of it."""

from __future__ import annotations

import json
import threading
import time

import jax
import pytest

from experiments import resize
from experiments.cli import flags as cli
from experiments.cli.exit_codes import ExitCode
from experiments.recipes import RECIPES
from jaxmoe.contrib.elastic.request import Resized, parse_request, record
from jaxmoe.run.directory import RunDirectory
from tests.support.runs import flags


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run on 8 devices, with a batch of 24, of which only the files are there."""
    given = [*flags(tmp_path / "run", 9), "--execution.mesh.data", "8"]
    given += ["--training.batch_size", "24", "--execution.rules", "data_parallel"]
    _, config = cli.parse(RECIPES, "tiny", given, "pretrain", "")
    made = RunDirectory(tmp_path / "run")
    with made.held():
        made.check_config(config)
        devices = [f"tpu:{number} kind" for number in range(8)]
        sizes = config.execution.mesh.by_axis
        made.write_environment(devices, mesh=sizes, spare_devices=[])
    for name in ("devices", "default_backend"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("the run holds the devices"))
    return made


def command(directory, *words):
    return resize.main(["--run.directory", str(directory.path), *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--wait", "nan"], "wait=nan must be 0 seconds or more"),
        (
            ["--mesh.data", "5"],
            "mesh.data=5 divides the rows of a batch among 5 devices, and training.batch_size=24"
            " stays, which is no multiple of 5; sizes of mesh.data that fit 8 devices: 1, 2, 3, 4,"
            " 6, 8",
        ),
        (
            [],
            "a resize changes nothing: give the size of an axis, such as mesh.data=6, or devices"
            " to leave out, such as without=7",
        ),
        (
            ["--without", "9"],
            "without=9 names no device of this run: it has 0,1,2,3,4,5,6,7",
        ),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_written(directory, words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command(directory, *words)
    assert stop.value.code == ExitCode.BAD_CONFIGURATION
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not directory.resize_file.exists()


def answer(directory, status, message):
    """Answer a request as a run does, in a thread."""

    def run():
        while not directory.resize_file.exists():
            time.sleep(0.01)
        text = directory.resize_file.read_text()
        name = parse_request(text).name
        with directory.held():
            given = {"name": name, "step": 7, "message": message}
            record(directory, Resized(**given, status=status), text)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_answer_of_the_run_is_shown(directory, capsys):
    thread = answer(directory, "done", "resized at step 7")
    assert command(directory, "--without", "6", "7") == ExitCode.DONE
    thread.join()
    assert capsys.readouterr().out == "requested: mesh data=6, 6 devices\nresized at step 7\n"
    thread = answer(directory, "refused", "it does not fit")
    with pytest.raises(SystemExit) as stop:
        command(directory, "--mesh.data", "6")
    thread.join()
    assert (stop.value.code, capsys.readouterr().err) == (2, "error: it does not fit\n")


def test_a_request_without_an_answer_waits_for_the_run(directory, capsys):
    assert command(directory, "--mesh.data", "6", "--wait", "0") == ExitCode.DONE
    (request,) = [json.loads(directory.resize_file.read_text())]
    assert (request["mesh"]["data"], request["without"]) == (6, [])
    with pytest.raises(SystemExit):
        command(directory, "--mesh.data", "4")
    assert "holds a request that the run has not answered" in capsys.readouterr().err
    directory.resize_file.unlink()
    with pytest.raises(SystemExit):
        command(directory, "--mesh.data", "4", "--wait", "0.1")
    assert "the run has not answered within 0.1 s" in capsys.readouterr().err
