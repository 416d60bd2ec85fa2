# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs whose only checkpoint lacks the files of a stage (`--parts check_free`)."""

import json
import shlex
import shutil
import sys

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from experiments.launch import __main__ as launch
from jaxmoe.tracking.tracker import LEARNING_RATE
from tests.support.runs import ROOT, flags, logged_losses, saved_leaves
from tests.support.stage_files import lose_stage, split_by_stage

pytestmark = [pytest.mark.slow, pytest.mark.trains]

STAGES, FIRST, LAST, LOST = 4, 16, 24, 1
AVERAGE = ("--parts", "check_free", "--check_free.recovery_steps", "4")


def _command(run, *more):
    words = ("--execution.mesh.stage", str(STAGES), "--execution.mesh.data", "2")
    words += ("--training.accumulation", "2", "--training.batch_size", "16")
    words += ("--model.num_layers", "4", "--checkpoint.every", str(FIRST))
    words += ("--tracking.print_every", "1", "--evaluation.every", "0")
    return flags(run, LAST, *words, "--tracking.sample_length", "0", *more)


def _rates(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[LEARNING_RATE] for line in lines if LEARNING_RATE in line}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "plain"
    assert pretrain.main(_command(run)) == ExitCode.DONE
    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same run, which keeps the gradient norms of its layers."""
    run = tmp_path_factory.mktemp("runs") / "kept"
    assert pretrain.main(_command(run, *AVERAGE)) == ExitCode.DONE
    return run


@pytest.fixture
def damaged(kept, tmp_path):
    """A copy whose only checkpoint lacks a stage."""
    run = tmp_path / "run"
    shutil.copytree(kept, run)
    shutil.rmtree(run / "checkpoints" / str(LAST))
    split_by_stage(run / "checkpoints" / str(FIRST), STAGES)
    lose_stage(run / "checkpoints" / str(FIRST), LOST)
    return run


def test_a_run_that_loses_nothing_is_bitwise_the_run_without_the_choice(plain, kept):
    assert logged_losses(kept) == logged_losses(plain)
    wanted, found = saved_leaves(plain, LAST), saved_leaves(kept, LAST)
    assert found.keys() - wanted.keys() == {
        "['parts']['layer_norms']",
        "['parts']['mirror']['embedding']['weight']",
        "['parts']['mirror']['head']['weight']",
    }
    for name, axis in (("embedding", 0), ("head", 1)):
        rows = found[f"['params']['{name}']['weight']"]
        kept_rows = np.roll(rows, rows.shape[axis] // STAGES, axis)
        np.testing.assert_array_equal(found[f"['parts']['mirror']['{name}']['weight']"], kept_rows)
    assert (found["['parts']['layer_norms']"] > 0).all()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert "averaged" not in json.loads((kept / "summary.json").read_text())


def test_a_run_goes_on_with_the_mean_of_the_neighbours_of_a_lost_stage(damaged, kept, capsys):
    with pytest.raises(SystemExit) as stopped:
        pretrain.main(_command(damaged))
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert "all steps are damaged (16)" in capsys.readouterr().err

    before = logged_losses(kept)
    assert pretrain.main(_command(damaged, *AVERAGE)) == ExitCode.DONE
    out = capsys.readouterr().out
    assert f"restored step {FIRST} from {damaged}/checkpoints/damaged/{FIRST}, of which" in out
    after = logged_losses(damaged)
    for step in range(1, 5):
        assert after[FIRST + step] < before[step], "below a fresh start"
    raised = {step: rate / _rates(kept)[step] for step, rate in _rates(damaged).items()}
    wanted = {step: 1.1 if FIRST < step <= FIRST + 4 else 1.0 for step in range(1, LAST + 1)}
    assert raised == pytest.approx(wanted)
    (event,) = json.loads((damaged / "summary.json").read_text())["averaged"]
    assert event.startswith(f"averaged at step {FIRST}: layer {LOST} is 0.")
    assert (
        "of layer 0 and 0." in event
        and "values of params/embedding/weight are from their copy" in event
    )
    assert "are new" not in event
    (lineage,) = json.loads((damaged / "lineage.json").read_text())
    assert lineage["event"] == "averaged" and lineage["step"] == FIRST


VICTIM = """
import os, pathlib, shutil, signal, sys, time
directory = pathlib.Path(sys.argv[sys.argv.index("--run.directory") + 1])
memory = pathlib.Path(os.environ["JAXMOE_SNAPSHOTS"])
marks = [directory.with_suffix(f".killed{kill}") for kill in range(2)]
start = sum(mark.exists() for mark in marks)

from experiments import pretrain
from jaxmoe.run.reporter import Reporter

trained = Reporter.log_steps

def kill(lost, *needed):
    while not all(path.exists() for path in needed):
        time.sleep(0.01)
    for path in lost:
        shutil.rmtree(path)
    marks[start].touch()
    os.kill(os.getpid(), signal.SIGKILL)

def trained_and_killed(self, report):
    trained(self, report)
    memories = [memory.with_name(f"process{process}") for process in range(4)]
    if (start, memory.name) == (0, "process1") and report.steps[-1] >= 4:
        kill([memories[1], memories[3]], *(own / "3" for own in memories))
    if (start, memory.name) == (1, "process2") and report.steps[-1] >= 7:
        step = directory / "checkpoints" / "6"
        lost = step / "state" / "ocdbt.process_1"
        kill([*memories, lost], step / "files.json", step / "manifest")

Reporter.log_steps = trained_and_killed
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.large  # three times four processes, one after the other
@pytest.mark.timeout(2400)
def test_four_processes_average_a_snapshot_and_then_a_checkpoint(tmp_path, monkeypatch, capsys):
    """Two memories are lost before there is a checkpoint; later all, and the files of a stage."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    )
    victim = tmp_path / "victim.py"
    victim.write_text(VICTIM)
    words = ("--execution.mesh.stage", "4", "--training.accumulation", "2")
    words += ("--model.num_layers", "4", "--checkpoint.every", "6", "--evaluation.every", "0")
    words += ("--snapshots.every", "3", "--tracking.print_every", "1", *AVERAGE)
    given = flags(tmp_path / "run", 9, *words)
    experts = given.index("--model.moe.expert_dim")
    given = [*given[:experts], *given[experts + 2 :], "model.moe:none"]
    command = shlex.join([sys.executable, str(victim), *given])
    launched = ["--run.directory", str(tmp_path / "launch"), "--command", command]
    memory = ["--snapshots", str(tmp_path)]
    code = launch.main(["--supervise", "--processes", "4", *memory, *launched])
    out = capsys.readouterr().out
    assert code == ExitCode.DONE, out
    assert "restored step 3 from the snapshots in memory, of which a part was lost" in out
    damaged = tmp_path / "run" / "checkpoints" / "damaged" / "6"
    assert f"restored step 6 from {damaged}, of which a part was lost" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    first, second = summary["averaged"]
    assert first.startswith("averaged at step 3: layer 1 is 0.") and "layer 3 is 1.000" in first
    assert second.startswith("averaged at step 6: layer 1 is 0.") and "layer 3" not in second
    assert sorted(logged_losses(tmp_path / "run")) == list(range(1, 10))
    assert not (tmp_path / "run" / "snapshots").exists()
