# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The main job from end to end, on a model so small that compiling takes longer than training."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import json
import os
import pathlib
import re
import signal
import sys

import jax
import numpy as np
import pytest

from experiments import evaluate, generate, pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.models.flops import flops_per_token
from jaxmoe.run.config import PretrainConfig, ProfileConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.hooks import make_trace
from jaxmoe.run.plan import make_plan
from jaxmoe.tracking import read_metrics, read_router_load
from tests.support.runs import finished_flags, flags, logged_losses, saved_leaves, start_run

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Kills itself, as the kernel would, after step 27 and once the checkpoint of step 20 is written.
VICTIM = """
import os, pathlib, signal, sys, time
from experiments import pretrain
from jaxmoe.run.reporter import Reporter

directory = pathlib.Path(sys.argv[sys.argv.index("--run.directory") + 1])
trained = Reporter.log_steps

def trained_and_killed(self, report):
    trained(self, report)
    if report.steps[-1] == 27:
        while not (directory / "checkpoints" / "20").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

Reporter.log_steps = trained_and_killed
pretrain.main(sys.argv[1:])
"""


def test_a_run_leaves_every_file(finished):
    summary = json.loads((finished / "summary.json").read_text())
    wanted = (
        "status",
        "steps",
        "tokens",
        "final_loss",
        "eval_bits_per_byte",
        "tokens_per_second",
        "parameters_total",
        "parameters_active",
        "compile_seconds",
        "wall_seconds",
        "router_max_violation",
        "router_dropped_fraction",
        "checkpoint_step",
        "mesh",
        "implementations",
    )
    assert set(wanted) <= summary.keys()
    assert summary["status"] == "done" and summary["steps"] == summary["checkpoint_step"] == 6
    assert summary["tokens"] == 6 * 8 * 16 and summary["router_dropped_fraction"] == 0.0
    assert summary["tokens_per_second"] > 0 and summary["mesh"] == {"data": 8}
    for name in ("config.json", "environment.json", "metrics.jsonl", "report.html", "samples.txt"):
        assert (finished / name).stat().st_size > 0
    for name in ("loss.png", "router_load.png", "routing.png"):
        assert (finished / "plots" / name).read_bytes().startswith(b"\x89PNG")
    with np.load(finished / "router.npz") as router:
        assert router["load"].shape == (6, 1, 4)
        np.testing.assert_allclose(router["load"].sum(-1), 1.0, rtol=1e-6)
    assert sorted(logged_losses(finished)) == [1, 2, 3, 4, 5, 6]


def test_trackers_have_the_load_of_every_layer_and_expert(finished):
    series = read_metrics(finished / "metrics.jsonl")
    steps, recorded = read_router_load(finished / "router.npz")
    for expert in range(4):
        logged, load = series[f"router/layer_00/load_expert_{expert:02}"]
        assert logged.tolist() == [6]  # every print_every steps, and after the last
        np.testing.assert_allclose(load, 4 * recorded[steps == 6, 0, expert], rtol=1e-6)
    written = b"".join(file.read_bytes() for file in (finished / "tensorboard").iterdir())
    assert b"router/layer_00/load_expert_03" in written
    assert written.count(b"router/load_map") == 2  # with every evaluation


def test_a_run_says_what_it_used_of_the_machine(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["mfu"] is None  # a CPU has no known peak
    config = RunDirectory(finished).load_config(PretrainConfig)
    plan = make_plan(config)
    assert summary["model_flops_per_token"] == flops_per_token(plan.model, plan.table, 16)
    assert summary["peak_memory_bytes"] > 10**8 and summary["peak_memory_of"] == "process"
    series = read_metrics(finished / "metrics.jsonl")
    steps, tokens = series["progress/tokens"]
    assert tokens.tolist() == [step * 8 * 16 for step in steps] and len(steps) == 6
    _, seconds = series["progress/seconds"]
    assert np.all(np.diff(seconds) > 0) and seconds[-1] == summary["trained_seconds"]
    schedule = config.schedule.build(6)
    wanted = [0.005 * float(schedule(jax.numpy.int32(step - 1))) for step in steps]
    np.testing.assert_allclose(series["train/learning_rate"][1], wanted, rtol=1e-6)


@pytest.mark.slow
def test_chosen_steps_are_traced(tmp_path, capsys):
    directory = tmp_path / "run"
    arguments = flags(directory, 6, "--profile.steps", "3:4", "--tracking.console", "none")
    assert pretrain.main(arguments) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"trace in {directory / 'profile'}: open it with `xprof" in printed
    assert "step=" not in printed  # console none
    assert len(list((directory / "profile").rglob("*.xplane.pb"))) == 1
    assert json.loads((directory / "summary.json").read_text())["profile"] is not None


def test_a_run_that_is_past_its_trace_says_so(tmp_path, capsys):
    profile = ProfileConfig(steps="3:4")
    config = dataclasses.replace(PretrainConfig(), profile=profile)
    directory = RunDirectory(tmp_path)
    assert make_trace(directory, config, 2) is not None
    assert capsys.readouterr().out == ""
    assert make_trace(directory, config, 3) is None
    assert "no trace: step 3 is done, and profile.steps=3:4" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = flags(tmp_path / "run", 6)
    text = _refused([*arguments, "--tracking.trackers", "wandb"], capsys)
    assert "wandb is not installed: pip install 'jaxmoe[wandb]'" in text
    assert not (tmp_path / "run").exists()


def test_a_line_is_printed_before_every_silent_stretch(finished):
    lines = (finished.parent / "printed.txt").read_text().splitlines()
    expected = (
        "pretrain markov: finding devices",
        "jaxmoe pretrain",
        "compiling the training step",
        "compiled in",
        "step=6/6",
        "computing reference losses",
        "writing samples",
        "drawing plots and the report",
        "done at step 6",
        "see ",
    )
    found = [next(i for i, line in enumerate(lines) if line.startswith(s)) for s in expected]
    assert found == sorted(found) and found[0] == 0


def test_time_of_a_new_run_is_not_booked_as_restoring(finished):
    seconds = json.loads((finished / "summary.json").read_text())["goodput"]["seconds"]
    assert "restore" not in seconds and {"start", "compile", "train"} <= seconds.keys()


def test_the_report_has_command_date_commit_versions_and_host(finished):
    page = (finished / "report.html").read_text()
    environment = json.loads((finished / "environment.json").read_text())
    for value in (environment["host"], environment["started"], environment["packages"]["jax"]):
        assert value in page
    assert html.escape(environment["command"]) in page and (environment["commit"] or "") in page


def test_a_finished_run_says_so_and_exits_with_0(finished, capsys):
    before = (finished / "summary.json").read_bytes()
    assert pretrain.main(finished_flags(finished)) == ExitCode.DONE
    assert "nothing to do" in capsys.readouterr().out
    assert (finished / "summary.json").read_bytes() == before


def test_commands_announce_long_work_to_a_person_only(finished, capsys, monkeypatch):
    line = ["--run.directory", str(finished), "--run.step", "99"]
    for is_terminal in (False, True):
        for command, word in ((evaluate, "evaluating"), (generate, "generating with")):
            stream = io.StringIO()
            monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
            with contextlib.redirect_stderr(stream), pytest.raises(SystemExit):
                command.main(line)
            announced = f"{word} {finished}: reading the checkpoint, compiling ..."
            assert (announced in stream.getvalue()) == is_terminal
    assert capsys.readouterr().out == ""


def test_evaluate_gives_the_number_that_training_logged(finished, capsys):
    lines = map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())
    logged = {x["step"]: x["eval/bits_per_token"] for x in lines if "eval/bits_per_token" in x}
    assert sorted(logged) == [3, 6]
    assert evaluate.main(["--run.directory", str(finished)]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"step=6 tokens=256 eval/bits_per_token={logged[6]!r}" in printed


def test_generate_writes_text(finished, capsys):
    arguments = ["--run.directory", str(finished), "--prompt", "1 2", "--length", "4"]
    assert generate.main([*arguments, "--temperature", "0"]) == ExitCode.DONE
    first = capsys.readouterr().out
    continued = first.split("--- continued\n")[1].split()
    assert len(continued) == 4 and all(0 <= int(word) < 8 for word in continued)
    with pytest.raises(SystemExit) as stopped:
        generate.main([*arguments[:2], "--prompt", "def"])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert "error: prompt='def': 'def' is not a token of this language" in capsys.readouterr().err


@pytest.mark.large
def test_killed_at_any_moment_and_resumed_equals_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("--checkpoint.every", "20", "--evaluation.every", "0", "--tracking.sample_length", "0")
    process = start_run(flags(whole, 40, *more))
    output, _ = process.communicate()
    assert process.returncode == 0, output

    process = start_run(flags(parts, 40, *more, "--tracking.print_every", "1"), VICTIM)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert (parts / "checkpoints" / "20").exists()
    assert not (parts / "checkpoints" / "40").exists()
    assert max(logged_losses(parts)) == 27  # seven steps are lost, and their records with them
    process = start_run(flags(parts, 40, *more))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "continuing after step 20" in output

    expected, found = saved_leaves(whole, 40), saved_leaves(parts, 40)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert logged_losses(parts) == logged_losses(whole)
    seconds = read_metrics(parts / "metrics.jsonl")["progress/seconds"][1]
    assert len(seconds) == 40 and np.all(np.diff(seconds) > 0)  # over both starts together
    manifests = [
        json.loads((run / "checkpoints" / "40" / "manifest" / "metadata").read_text())
        for run in (whole, parts)
    ]
    assert manifests[0]["data"] == manifests[1]["data"] and manifests[0]["data"]["step"] == 40


def test_a_diverged_run_ends_with_its_own_code_and_keeps_the_last_good_state(tmp_path, capsys):
    arguments = flags(tmp_path / "run", 50, "--optimizer.learning_rate", "1e38")
    more = ("--training.guard.max_skipped", "3", "--training.guard.rollbacks", "0")
    assert pretrain.main([*arguments, *more]) == ExitCode.DIVERGED
    output, errors = capsys.readouterr()
    warnings = [line for line in output.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "is not finite" in warnings[0]
    first, last = map(int, re.findall(r"steps (\d+) to (\d+) changed nothing", warnings[0])[0])
    assert last == first + 2 and warnings[0].endswith("(3 in a row)")
    assert f"error: diverged: steps {first} to {last} were refused" in errors
    resume = f"jaxmoe pretrain resume {tmp_path / 'run'}"
    assert f"{resume} --optimizer.learning_rate 3.3e+37 goes on from the start" in errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"


def _refused(arguments: list[str], capsys) -> str:
    """What a bad command prints: one screen, exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        pretrain.main(arguments)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    text = "".join(capsys.readouterr())
    assert len(text.splitlines()) <= 24, text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model.moe.top_k", "5"), "moe.top_k=5 must not exceed moe.num_experts=4"),
        (
            ("--training.batch_size", "9"),
            "batch_size=9 must be divisible by the 8 devices",
        ),
        (("--model.embed_dim", "12"), "'embed' of size 12 must be divisible by mesh.data=8"),
        (("--execution.mesh.data", "3"), "needs 3 devices, there are 8"),
        (("--model.vocab_size", "4"), "model.vocab_size=4 is smaller than the vocabulary"),
        (("--model.moe.num_expert", "4"), "num_experts"),
        (("--schedule.warmup_steps", "6"), "schedule.warmup_steps=6 must be at most 5, below"),
        (
            ("--execution.kernels.attention", "pallas_gpu"),
            "execution.kernels.attention=pallas_gpu: flash_attention: implementation='pallas_gpu'"
            " needs a gpu and the mesh is of cpu devices",
        ),
        (
            ("--execution.kernels.attention", "cudnn"),
            "execution.kernels.attention=cudnn: flash_attention: implementation='cudnn'"
            " needs a gpu and the mesh is of cpu devices",
        ),
        (("--training.clip", "-1"), "training.clip=-1.0 must be above 0"),
        (("--profile.steps", "3"), "profile.steps='3' must be two step numbers a:b"),
        (("--profile.steps", "0:3"), "profile.steps=0:3 must have 1 <= a < b"),
        (("--profile.steps", "4:4"), "profile.steps=4:4 must have 1 <= a < b"),
        (("--profile.steps", "3:7"), "profile.steps=3:7 must end within the run of"),
        (("--tracking.trackers", "wandb", "wandb"), "name each at most once"),
        (("--tracking.trackers", "wandbb"), "did you mean 'wandb'"),
        (("--tracking.console", "colour"), "colour"),
        (
            ("--evaluation.batch_size", "12"),
            "evaluation.batch_size=12 must be divisible by the 8 devices",
        ),
        (
            ("--base.num_layers", "None", "parameterization:hyperp"),
            "base.num_layers is missing: hyperp carries a learning rate from the point",
        ),
        (
            ("--model.has_tied_embeddings", "True", "parameterization:hyperp"),
            "model.has_tied_embeddings=True: parameterization:hyperp keeps the head on a sphere",
        ),
        (
            ("--model.multipliers.residual", "0.5", "parameterization:hyperp"),
            "model.multipliers.residual=0.5 would be overwritten",
        ),
    ],
)
def test_bad_input_is_refused_in_words(tmp_path, capsys, more, message):
    text = _refused(flags(tmp_path / "run", 6, *more), capsys)
    assert message in " ".join(text.split())
    assert not (tmp_path / "run").exists()


def test_an_unknown_recipe_is_refused_with_a_suggestion(capsys):
    assert "did you mean" in _refused(["markow"], capsys)


def test_a_changed_config_is_refused_with_the_difference(finished, capsys):
    text = _refused([*finished_flags(finished), "--optimizer.learning_rate", "0.1"], capsys)
    assert "optimizer.learning_rate" in text and "0.1" in text and "0.005" in text


def test_a_directory_in_use_is_refused(tmp_path, capsys):
    holder = RunDirectory(tmp_path / "run")
    holder.acquire()
    try:
        text = _refused(flags(tmp_path / "run", 6), capsys)
    finally:
        holder.release()
    assert str(os.getpid()) in text


@pytest.mark.slow
def test_a_full_disk_in_mid_run_is_said_and_the_run_goes_on(tmp_path, capsys, caplog, monkeypatch):
    checks = iter([0, 0])  # two saves find the disk full, the later ones do not

    class Usage:
        def __init__(self, free: int):
            self.free = free

    monkeypatch.setattr(
        "jaxmoe.checkpoint.commit.shutil.disk_usage", lambda _: Usage(next(checks, 10**12))
    )
    arguments = flags(tmp_path / "run", 6, "--checkpoint.every", "2")
    assert pretrain.main(arguments) == ExitCode.DONE
    assert "was not saved, the run goes on" in caplog.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["checkpoint_step"] == 6
    assert not (tmp_path / "run" / "checkpoints" / "2").exists()


@pytest.mark.slow
def test_a_last_state_that_cannot_be_saved_has_its_own_code(tmp_path, capsys, monkeypatch):
    class Full:
        free = 0

    monkeypatch.setattr("jaxmoe.checkpoint.commit.shutil.disk_usage", lambda _: Full)
    assert pretrain.main(flags(tmp_path / "run", 4)) == ExitCode.NOT_SAVED
    assert "could not be saved" in capsys.readouterr().err


@pytest.mark.trains
@pytest.mark.slow
def test_the_markov_language_is_learned_to_its_entropy(tmp_path):
    assert pretrain.main(["markov", "--run.directory", str(tmp_path / "run")]) == ExitCode.DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    excess = summary["eval_bits_per_token"] - summary["references_bits"]["exact entropy"]
    assert 0.0 < excess <= 0.05
