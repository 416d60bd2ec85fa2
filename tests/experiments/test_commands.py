# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""All commands together: their list, their names, the length of their help, short runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxmoe
from experiments import finetune, serve
from experiments.__main__ import main
from experiments.cli import flags
from experiments.recipes import RECIPES
from experiments.rl import __main__ as rl
from jaxmoe.configs import to_json
from jaxmoe.data import ChatConfig
from jaxmoe.optim import CosineConfig, WarmupStableDecayConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMANDS = {
    "bench",
    "checkpoint",
    "data",
    "depth",
    "describe",
    "doctor",
    "ensemble",
    "evaluate",
    "evaluate_tasks",
    "finetune",
    "gates",
    "generate",
    "launch",
    "layer_paths",
    "levels",
    "outer",
    "place",
    "plan",
    "precision",
    "pretrain",
    "replay",
    "report",
    "resize",
    "rl",
    "routers",
    "serve",
    "serving",
    "transfer",
}
PARTS = {
    "data": [["inspect"]],
    "launch": [[], ["--supervise"]],
    "doctor": [[], ["--links"]],
    "checkpoint": [[], ["convert"], ["inspect"], ["reshard"], ["verify"]],
    "serving": [[], ["advise"], ["caches"], ["load"], ["simulate"]],
}


def listed(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:-2]
    return {line.split()[0]: line for line in lines}


def test_every_command_is_listed_with_a_line(capsys):
    lines = listed(capsys)
    assert set(lines) >= COMMANDS
    assert all(len(line.split()) > 3 for line in lines.values())


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["pretrian"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: there is no command 'pretrian': did you mean 'pretrain'?\ncommands: bench,"
    )


def test_the_console_command_runs_a_command_as_the_module_does():
    words = ["-m", "experiments", "describe", "tiny", "--model.num_layers", "1"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and run.stdout.startswith("recipe               tiny\n"), run.stderr
    words = ["-m", "experiments", "describe", "--steps", "1"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (
        2,
        "error: there is no flag --steps: did you mean --training.steps?\n",
    )


def test_the_console_command_has_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxmoe {jaxmoe.__version__}\n"


@pytest.mark.parametrize(
    "words",
    ["experiments", "experiments --version", "experiments data inspect markov --run.directory run"],
)
def test_output_without_a_reader_ends_no_command(words, tmp_path):
    """Nor with unbuffered streams, where the first line that is printed fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = f"{sys.executable} -m {words} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists() == ("data" in words)


def prints(tree):
    """Return the lines of a file that print on standard output, where an error is not dropped."""
    nodes = list(ast.walk(tree))
    dropped = [node for node in nodes if isinstance(node, ast.With) and "dropped" in ast.dump(node)]
    safe = {child for node in dropped for child in ast.walk(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and node not in safe]
    names = ((call.lineno, ast.unparse(call.func), call.keywords) for call in calls)
    return [line for line, name, given in names if name == "print" and not given]


def test_no_command_prints_where_an_error_ends_it():
    files = [path for path in (ROOT / "experiments").rglob("*.py") if "bench" not in path.parts]
    raw = {path.name: prints(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert {name: lines for name, lines in raw.items() if lines} == {}


def test_the_list_of_commands_imports_no_jax():
    program = "import sys; from experiments.__main__ import main; main([]); assert 'jax' not in "
    subprocess.run(
        [sys.executable, "-c", f"{program}sys.modules"], cwd=ROOT, check=True, capture_output=True
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_at_most_120_lines_of_100_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        command = importlib.import_module(f"experiments.{name}.__main__")
    except ModuleNotFoundError:
        command = importlib.import_module(f"experiments.{name}")
    for words in PARTS.get(name, [[]]):
        try:
            code = command.main([*words, "--help"])
        except SystemExit as stop:
            code = stop.code
        lines = capsys.readouterr().out.splitlines()
        assert code == 0 and 5 < len(lines) <= 120, (words, len(lines))
        assert max(map(len, lines)) <= 110


def parsed(*words):
    return flags.parse(RECIPES, "tiny", words, "prog", "d")[1]


def test_the_rest_of_help_is_under_help_all_and_under_its_group(capsys):
    for words in (["--help-all"], ["--help", "checkpoint"]):
        with pytest.raises(SystemExit) as stop:
            parsed(*words)
        assert stop.value.code == 0
        assert "--checkpoint.keep INT\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    assert "--checkpoint.keep" not in text
    steps = RECIPES["tiny"]().training.steps
    assert f"--training.steps             Total number of optimiser steps ({steps})" in text


def test_choices_are_also_values_of_flags():
    short = parsed("--optimizer", "muon", "--model.moe.gate", "sqrt")
    assert short == parsed("optimizer:muon", "model.moe.gate:sqrt")
    assert (short.optimizer.name, short.model.moe.gate.name) == ("muon", "sqrt")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--steps 10", "--training.steps"),
        ("--lr 0.1", "--optimizer.learning_rate"),
        ("--depth 2", "--model.num_layers"),
        ("runs/pretrain/tiny", "--run.directory runs/pretrain/tiny"),
        ("--training.steps 3 runs/pretrain/tiny", "--run.directory runs/pretrain/tiny"),
    ],
)
def test_short_spellings_are_answered_in_one_line(words, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(*words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.endswith(f": did you mean {flag}?\n")


def with_warm_up(*words):
    def recipe():
        schedule = WarmupStableDecayConfig(warmup_steps=20, decay_fraction=0.4)
        return dataclasses.replace(RECIPES["tiny"](), schedule=schedule)

    return flags.parse({"recipe": recipe}, "recipe", words, "prog", "d")[1]


def test_few_steps_shorten_the_warm_up_of_the_recipe(capsys):
    assert with_warm_up("--training.steps", "50").schedule.warmup_steps == 20
    assert capsys.readouterr().err == ""
    config = with_warm_up("--training.steps", "10")
    config.schedule.build(10)
    assert (config.schedule.warmup_steps, config.schedule.decay_fraction) == (2, 0.4)
    assert capsys.readouterr().err == (
        "note: schedule.warmup_steps 20 -> 2, to fit training.steps=10\n"
    )


def test_an_explicit_warm_up_stays_and_the_decay_makes_way(capsys):
    config = with_warm_up("--training.steps", "10", "--schedule.warmup-steps", "8")
    config.schedule.build(10)
    assert (config.schedule.warmup_steps, config.schedule.decay_fraction) == (8, pytest.approx(0.2))
    assert "schedule.decay_fraction 0.4 -> 0.2, to fit" in capsys.readouterr().err
    both = ("--schedule.warmup_steps=8", "--schedule.decay_fraction", "0.4")
    for words in (("--schedule.warmup_steps", "10"), both):
        config = with_warm_up("--training.steps", "10", *words)
        with pytest.raises(ValueError, match="schedule.warmup_steps"):
            config.schedule.build(10)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 19, 20, 21, 33, 34])
def test_a_fitted_schedule_can_be_built(steps):
    for config in (
        CosineConfig(warmup_steps=20),
        WarmupStableDecayConfig(warmup_steps=20, decay_fraction=0.4),
        WarmupStableDecayConfig(warmup_steps=20, decay_fraction=1.0),
        WarmupStableDecayConfig(warmup_steps=20, decay_fraction=0.01),
    ):
        fitted = config.fit(steps)
        fitted.build(steps)
        assert fitted.fit(steps) is fitted


def test_help_of_a_config_shows_its_fields_with_their_texts():
    for config in (jaxmoe.ModelConfig, jaxmoe.MoEConfig, jaxmoe.ExecutionConfig):
        assert "\n\nFields:\n    " in config.__doc__
    assert "    num_layers: int = 4\n        Number of layers (L).\n" in jaxmoe.ModelConfig.__doc__


FIRST = {
    "finetune": (finetune.main, finetune._FIRST_FIELDS, {"training.batch_size": "24"}),
    "rl": (rl.main, rl._FIRST_FIELDS, {"training.sequence_length": "96", "rl.template": "plain"}),
    "serve": (serve.main, serve._FIRST_FIELDS, {"run.directory": "{model}"}),
}


@pytest.mark.parametrize("name", FIRST)
def test_ten_flags_of_a_job_are_first_with_the_values_of_the_model(name, tmp_path, capsys):
    main, fields, values = FIRST[name]
    training = dataclasses.replace(RECIPES["tiny"]().training, batch_size=24, sequence_length=96)
    data = ChatConfig(path=("a.jsonl",), template="plain")
    config = dataclasses.replace(RECIPES["tiny"](), training=training, data=data)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and len(fields) == 10
    lines = text.partition("First flags, with the values that hold:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^  --(\S+)(.*(?:\n     .*)*)", lines, re.MULTILINE)
    assert [flag for flag, _ in listed] == [*fields]
    shown = {flag: " ".join(about.split()) for flag, about in listed}
    for flag, value in values.items():
        assert shown[flag].endswith(f"({value.format(model=tmp_path)})")
    assert text.index("First flags") < 200
