# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs on stages: killed, moved to other numbers of stages, then evaluated and exported."""

import re

import numpy as np
import pytest

from experiments import evaluate, generate, pretrain
from experiments.checkpoint import convert
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import read_huggingface
from jaxmoe.run.reporter import Reporter
from tests.faults.test_elastic import preempt_after
from tests.faults.test_resume import Death
from tests.support.runs import flags, logged_losses, saved_leaves

pytestmark = [pytest.mark.slow, pytest.mark.trains]

STEPS = 8
GREEDY = ("--length", "8", "--temperature", "0")
MESHES = {
    "four stages": (4, 2, 1),
    "one stage": (1, 8, 1),
    "two stages of two chunks": (2, 4, 2),
}


def _command(run, mesh):
    stages, data, chunks = MESHES[mesh]
    words = ("--execution.mesh.stage", str(stages), "--execution.mesh.data", str(data))
    words += ("--execution.pipeline.chunks", str(chunks), "--training.accumulation", "2")
    words += ("--model.num_layers", "4", "--training.batch_size", "16", "--checkpoint.every", "2")
    words += ("--tracking.print_every", "1", "--evaluation.every", "0")
    return flags(run, STEPS, *words, "--tracking.sample_length", "0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert pretrain.main(_command(run, "four stages")) == ExitCode.DONE
    return run


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run on four stages, on one, and on two of two chunks each."""
    run = tmp_path_factory.mktemp("runs") / "moved"
    for last, mesh in ((2, "four stages"), (5, "one stage")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reporter, "log_steps", preempt_after(last))
            assert pretrain.main(_command(run, mesh)) == ExitCode.PREEMPTED
    assert pretrain.main(_command(run, "two stages of two chunks")) == ExitCode.DONE
    return run


def test_resume_on_stages_after_a_kill_is_bitwise(whole, tmp_path):
    run, trained = tmp_path / "run", Reporter.log_steps

    def trained_and_dead(self, report):
        trained(self, report)
        if report.steps[-1] == 5:
            raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "log_steps", trained_and_dead)
        with pytest.raises(Death):
            pretrain.main(_command(run, "four stages"))
    assert pretrain.main(_command(run, "four stages")) == ExitCode.DONE
    wanted, found = saved_leaves(whole, STEPS), saved_leaves(run, STEPS)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(run) == logged_losses(whole)


def test_resume_on_other_numbers_of_stages(whole, moved):
    """That restored arrays are equal bitwise is in tests/faults/test_restore_matrix.py."""
    stayed, found = logged_losses(whole), logged_losses(moved)
    assert list(found) == list(stayed) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(stayed.values()), rtol=1e-5)


def test_a_run_on_stages_opens_on_devices_without(moved, capsys):
    where = ("--run.directory", str(moved))
    losses, texts = [], []
    for mesh in ((), ("--run.mesh.data", "8")):
        assert evaluate.main([*where, *mesh]) == ExitCode.DONE
        losses.append(float(re.search(r"bits_per_token=([\d.]+)", capsys.readouterr().out)[1]))
        assert generate.main([*where, *mesh, "--prompt", "1 2", *GREEDY]) == 0
        texts.append(capsys.readouterr().out)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert texts[0] == texts[1]


def test_a_quantised_run_on_stages_is_evaluated_without(moved, tmp_path, capsys):
    where = ["--run.directory", str(tmp_path / "x")]
    words = ["--run.directory", str(moved), "--quantise", "w4a8", "--to", where[1]]
    assert convert.main(words) == ExitCode.DONE
    with pytest.raises(SystemExit) as ended:
        evaluate.main(where)
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    error = capsys.readouterr().err
    assert "execution.mesh.stage=2 splits the layers, and run.directory=" in error
    assert "weights=w4a8, of whole models" in error
    assert generate.main([*where, "--prompt", "1 2", *GREEDY]) == ExitCode.DONE


def test_a_run_on_stages_is_exported(moved, tmp_path):
    words = ["--run.directory", str(moved), "--to_huggingface", "auto", "--to", str(tmp_path / "x")]
    assert convert.main(words) == ExitCode.DONE
    imported = read_huggingface(tmp_path / "x")
    saved = saved_leaves(moved, STEPS)
    table = imported.params["embedding"]["weight"]
    np.testing.assert_array_equal(table, saved["['params']['embedding']['weight']"])
