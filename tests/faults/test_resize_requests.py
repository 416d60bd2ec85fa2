# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests for another mesh that are none, or that come when the run has ended."""

from __future__ import annotations

import os
import threading

import pytest

from experiments import recipes, resize
from experiments.cli.exit_codes import ExitCode
from jaxmoe.contrib.elastic.request import read_resizes
from jaxmoe.contrib.elastic.resizing import Resizing
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.supervision import library_supervision
from tests.faults.test_run_files import PLACES, TEXTS, directory, impatient, put

__all__ = ["directory", "impatient"]


@pytest.fixture
def supervision():
    with library_supervision(PretrainConfig().timeouts) as entered:
        yield entered


@pytest.mark.parametrize("kind", [kind for kind in [*TEXTS, *PLACES] if kind != "empty"])
def test_a_request_that_is_none_is_set_aside_and_the_run_goes_on(
    directory, kind, caplog, supervision
):
    path = directory.resize_file
    with directory.held():
        resizing = Resizing(PretrainConfig(), directory, supervision)
        put(path, kind)
        assert resizing.event() is None
        assert not os.path.lexists(path)
        assert os.path.lexists(directory.path / "resize.refused-1.json")
        (event,) = read_resizes(directory)
        assert event["status"] == "refused" and "set aside as resize.refused-1.json" in caplog.text
        resizing.close()


@pytest.fixture
def trains(directory):
    """A run that has described its devices."""
    with directory.held():
        config = recipes.markov(steps=9)
        sizes = config.execution.mesh.resolve(8).by_axis
        directory.write_environment([f"cpu:{n} kind" for n in range(8)], mesh=sizes)
    return directory


def _ask(directory):
    words = ["--run.directory", str(directory.path), "--mesh.data", "4"]
    with pytest.raises(SystemExit) as stopped:
        resize.main(words)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert not directory.resize_file.exists(), "a request that no run will answer"


def test_a_finished_run_is_not_resized_and_gets_no_request(trains, capsys):
    with trains.held():
        trains.write_summary({"status": "done", "steps": 9})
    _ask(trains)
    assert "has ended at step 9: there is nothing to resize" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["released", "killed"])
def test_the_command_ends_when_the_run_has_ended(trains, capsys, end):
    trains.acquire(heartbeat=0.05)
    asking = threading.Thread(target=_ask, args=(trains,))
    asking.start()
    while not trains.resize_file.exists():
        assert asking.is_alive()
    if end == "released":
        trains.release()
    else:  # no heartbeat any more, and no word
        trains._lease._ended.set()
    asking.join(20)
    assert not asking.is_alive()
    said = {"released": "the run has ended", "killed": "the run has given no sign of life"}[end]
    assert f"{said}" in capsys.readouterr().err
    trains.release()


def test_a_request_that_comes_too_late_is_answered_by_the_end_of_the_run(directory, supervision):
    with directory.held():
        resizing = Resizing(PretrainConfig(), directory, supervision)
        directory.resize_file.write_text('{"mesh": {"data": 4}, "name": "late"}')
        resizing.end(9, "done")
        resizing.close()
    (event,) = read_resizes(directory)
    assert (event["name"], event["status"], event["step"]) == ("late", "refused", 9)
    assert not directory.resize_file.exists()
