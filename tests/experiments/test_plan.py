# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.plan`: the page and the summary in closed form, refusals, and compiled plans."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.cli.flags import ExitCode
from experiments.plan import __main__ as plan
from experiments.plan.page import size_in_words

ROOT = pathlib.Path(__file__).resolve().parents[2]


def planned(tmp_path, capsys, *argv):
    """Exit code, page, summary."""
    code = plan.main([*argv, "--run.directory", str(tmp_path / "plan")])
    summary = json.loads((tmp_path / "plan" / "summary.json").read_text())
    return code, capsys.readouterr().out, summary


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        plan.main(argv)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_a_plan_in_closed_form(tmp_path, capsys):
    argv = ("tiny", "--topology", "gpu:h100:8", "--compiles", "0")
    code, page, summary = planned(tmp_path, capsys, *argv)
    assert (code, summary["status"]) == (ExitCode.DONE, "done")
    assert summary["total"] == pytest.approx(sum(summary["memory"].values()))
    assert summary["arguments"] + summary["temporaries"] == pytest.approx(summary["total"])
    for words in ("memory per device", "saved activations", "weights over", "predicted step"):
        assert words in page, words
    flags = " ".join(summary["flags"])
    assert page.rstrip().endswith(f"flags for pretrain   {flags}")
    assert summary["execution"]["mesh"]["stage"] == 1 and "--execution.mesh.data" in flags


def test_only_the_given_mesh_is_planned(tmp_path, capsys):
    argv = ("--topology", "tpu:v5e:2x2", "--compiles", "0", "--execution.mesh.tensor", "2")
    _, _, summary = planned(tmp_path, capsys, "tiny", *argv)
    assert summary["mesh"] == {"data": 2, "tensor": 2} and summary["meshes"] == 1
    error = refused(capsys, "tiny", *argv, "--execution.mesh.data", "4")
    assert "needs 8 devices, there are 4" in error


def test_a_mesh_that_shards_sequences_prints_its_form(tmp_path, capsys):
    argv = ("--topology", "gpu:h100:8", "--compiles", "0", "--execution.mesh.seq", "8")
    argv += ("execution.sequence-parallel:auto",)
    _, page, summary = planned(tmp_path, capsys, "tiny", *argv)
    assert summary["mesh"] == {"seq": 8}
    for words in (
        "attention over seq   ring: mesh.seq=8 does not divide the 4 query and 4 key heads",
        "busiest link in its busiest direction (switch, 450 GB/s)",
        "query heads per key head",
        "1 (this model)",
        "from 2 query heads per key head on ring loads the links less",
        "--execution.mesh.seq 8 execution.sequence_parallel:auto",
    ):
        assert words in page, words


def test_nothing_fits_prints_remedies(tmp_path, capsys):
    argv = ("--topology", "tpu:v5e:2x2", "--compiles", "0", "--training.batch_size", "4")
    argv += ("--training.accumulation", "1", "--training.sequence_length", "128")
    code, page, summary = planned(tmp_path, capsys, "mixtral_8x7b", *argv)
    assert (code, summary["status"]) == (ExitCode.BAD_CONFIGURATION, "nothing fits")
    missing = size_in_words(summary["needed"] - summary["available"])
    assert f"nothing fits tpu:v5e:2x2: the closest mesh, {summary['closest']}, needs" in page
    assert f"{missing} too much (closed form, nothing was compiled)" in page
    assert "--execution.precision.parameters bfloat16" in page


def test_refusals_before_any_compile(capsys, monkeypatch):
    monkeypatch.setattr(plan, "in_child", None)  # would fail
    assert "did you mean 'v5e'" in refused(capsys, "--topology", "tpu:v5ee:2x2")
    assert "--compiles 0 plans in closed form" in refused(capsys, "--topology", "gpu:h100:8")
    assert "must be 0 (closed form only)" in refused(capsys, "--compiles", "-1")
    error = refused(capsys, "mixtral_8x7b", "--topology", "cpu:7")
    assert "none of the 4 meshes of 7 devices divides this model and batch" in error
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name)
    )
    assert "pip install 'jaxmoe[plan]'" in refused(capsys, "--topology", "tpu:v5e:2x2")


def command(*argv, timeout=1500):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "experiments.plan", *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.large
@pytest.mark.timeout(1600)
def test_the_plan_of_this_machine_runs(tmp_path):
    """Arguments and results exactly, temporaries within a quarter, steps that were measured."""
    done = command("tiny", "--topology", "cpu:8", "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    compiled = summary["compiled"]
    assert summary["arguments"] == compiled["arguments"]
    assert compiled["expected_results"] == compiled["results"]
    assert summary["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.25)
    assert compiled["measured"]["step_seconds"] > 0 and compiled["traffic"]


@pytest.mark.large
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "argv",
    [
        # 30.5e9 parameters, AdamW, on a device of 15.75 GiB; and of a v5p pod.
        ("qwen3_30b_a3b", "--topology", "tpu:v5e:16x16", "--training.batch_size", "256"),
        ("qwen3_30b_a3b", "--topology", "tpu:v5p:4x4x4", "--training.batch_size", "64"),
        ("d8", "--topology", "tpu:v5e:4x4", "--training.batch_size", "16"),
        ("olmoe_1b_7b", "--topology", "tpu:v5e:8x8", "--training.batch_size", "64"),
    ],
)
def test_large_models_compile_within_a_chip(tmp_path, argv):
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (extra [plan])")
    data = ("--execution.mesh.data", argv[-1], "--training.accumulation", "1")
    done = command(*argv, *data, "--run.directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # nothing of the compiler's
    summary = json.loads((tmp_path / "summary.json").read_text())
    compiled = summary["compiled"]
    assert summary["arguments"] == compiled["arguments"]
    assert compiled["expected_results"] == compiled["results"]
    assert summary["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.25)
