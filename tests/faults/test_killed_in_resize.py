# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is killed while it moves to another mesh moves after the restart, and ends bitwise."""

import json
import shutil
import signal

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.run.reporter import Reporter
from tests.support.runs import flags, logged_losses, saved_leaves, start_run, written_by

pytestmark = [pytest.mark.slow, pytest.mark.trains]

SAVED, LAST = 2, 5
REQUEST = json.dumps({"mesh": {"data": 6}, "name": "fewer"})

# The mesh is ready at the border after the one at which the request is read.
PROMPT = """
import concurrent.futures, os, pathlib, signal, sys, time
from experiments import pretrain
from jaxmoe.run.directory import RunDirectory
from jaxmoe.contrib.elastic import move, resizing
from jaxmoe.run import parts
from jaxmoe.run.reporter import Reporter

event, Resizing = resizing.Resizing.event, resizing.Resizing

def prompt(self):
    if self._preparing is not None:
        concurrent.futures.wait([self._preparing])
    return event(self)

Resizing.event = prompt
resizing._POLL_SECONDS = parts._POLL_SECONDS = 0.0
"""

ENDS = "sys.exit(pretrain.main(sys.argv[1:]))"

KILLED = f"""{PROMPT}
moment, *arguments = sys.argv[1:]

def end(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def then_end(function, is_reached=lambda *_, **__: True):
    def ended(*given, **named):
        result = function(*given, **named)
        if is_reached(*given, **named):
            end()
        return result
    return ended

if moment == "compiling":
    Resizing._record = then_end(Resizing._record)
if moment == "compiled":
    Resizing.move = end
if moment == "moving":
    move.jax.device_put = then_end(move.jax.device_put, lambda *_: len(Resizing.begun) > 0)
    Resizing.begun = []
    begin = Resizing.move
    Resizing.move = lambda self, *given: (Resizing.begun.append(1), begin(self, *given))[1]
if moment == "moved":
    Resizing.move = then_end(Resizing.move)
if moment == "answered":
    written = RunDirectory.write_resizes
    is_done = lambda self, events: events[-1]["status"] == "done"
    RunDirectory.write_resizes = then_end(written, is_done)
if moment == "saved":
    saved = pathlib.Path(arguments[arguments.index("--run.directory") + 1]) / "checkpoints" / "4"

    def wait_and_end(_, report):
        while report.steps[-1] == 5 and not (saved / "manifest").exists():
            time.sleep(0.01)
        return report.steps[-1] == 5

    Reporter.log_steps = then_end(Reporter.log_steps, wait_and_end)
sys.exit(pretrain.main(arguments))
"""


def command(run):
    """A run on all 8 devices, whose batch 6 devices divide."""
    given = flags(run, LAST, "--tracking.print_every", "1", "--evaluation.every", "0")
    experts = given.index("--model.moe.expert_dim")
    given = [*given[:experts], *given[experts + 2 :], "--checkpoint.every", str(SAVED)]
    sizes = ("--training.batch_size", "24", "--model.embed_dim", "24")
    quiet = ("--tracking.sample_length", "0", "--evaluation.batches", "1")
    return [*given, *sizes, *quiet, "--model.attention.head_dim", "24", "model.moe:none"]


class Death(BaseException):
    """An exception that nothing catches."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed after step 3, with a checkpoint of step 2 and a request."""
    run = tmp_path_factory.mktemp("runs") / "stopped"
    trained = Reporter.log_steps

    def trained_and_dead(self, report):
        trained(self, report)
        if report.steps[-1] == SAVED + 1:
            raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "log_steps", trained_and_dead)
        with pytest.raises(Death):
            pretrain.main(command(run))
    (run / "resize.json").write_text(REQUEST)
    return run


def moved(run):
    """Start a run again, which moves at the first border where it can, and train it to its end."""
    process = start_run(command(run), PROMPT + ENDS, devices=8)
    (printed,) = written_by(process)
    assert process.returncode == ExitCode.DONE, printed
    return printed


@pytest.fixture(scope="module")
def whole(stopped, tmp_path_factory):
    """The run that is not killed while it moves."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    shutil.copytree(stopped, run)
    moved(run)
    (event,) = json.loads((run / "resizes.json").read_text())
    assert (event["status"], event["name"]) == ("done", "fewer")
    assert SAVED < event["step"] < LAST
    assert json.loads((run / "summary.json").read_text())["mesh"] == {"data": 6}
    return run


@pytest.mark.parametrize("moment", ["compiling", "compiled", "moving", "moved", "answered"])
def test_a_run_that_is_killed_while_it_moves_ends_bitwise(moment, stopped, whole, tmp_path):
    """The request waits for the restart; one that was answered is met once more."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    process = start_run([moment, *command(run)], KILLED, devices=8)
    (printed,) = written_by(process)
    assert process.returncode == -signal.SIGKILL, printed
    assert (run / "resize.json").read_text() == REQUEST
    moved(run)
    assert not (run / "resize.json").exists()
    events = json.loads((run / "resizes.json").read_text())
    assert [event["status"] for event in events] == ["done"] * (1 + (moment == "answered"))
    assert json.loads((run / "summary.json").read_text())["mesh"] == {"data": 6}
    wanted, found = saved_leaves(whole, LAST), saved_leaves(run, LAST)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(run) == logged_losses(whole)


def test_a_run_that_is_killed_after_it_has_moved_goes_on_on_the_mesh_of_its_command(
    stopped, whole, tmp_path
):
    """From the checkpoint of step 4, which 6 devices saved; the request was answered."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    process = start_run(["saved", *command(run)], KILLED, devices=8)
    (printed,) = written_by(process)
    assert process.returncode == -signal.SIGKILL, printed
    assert not (run / "resize.json").exists()
    kept, wanted = saved_leaves(run, 4), saved_leaves(whole, 4)
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(kept[path], leaf, err_msg=path)
    assert "restored step 4" in moved(run)
    assert json.loads((run / "summary.json").read_text())["mesh"] == {"data": 8}
    (event,) = json.loads((run / "resizes.json").read_text())
    assert event["status"] == "done"
    found, wanted = logged_losses(run), logged_losses(whole)
    assert list(found) == list(wanted) == [*range(1, LAST + 1)]
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
