# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a command line: as the first word it does what the flag does, in every command."""

import json

import pytest

from experiments import evaluate, finetune, generate, report, serve
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli import flags
from experiments.cli.model import DEMO, INITIAL, RUN, check_model, value_of, with_model
from experiments.evaluate_tasks import __main__ as evaluate_tasks
from experiments.recipes.tiny import tiny
from experiments.rl import __main__ as rl
from jaxmoe.configs import to_json
from tests.support.huggingface_directories import write_model

COMMANDS = {
    "finetune": (finetune.main, INITIAL),
    "rl": (rl.main, INITIAL),
    "evaluate": (evaluate.main, RUN),
    "generate": (generate.main, RUN),
    "serve": (serve.main, RUN),
    "evaluate_tasks": (evaluate_tasks.main, RUN),
    "checkpoint convert": (lambda words: checkpoint.main(["convert", *words]), RUN),
    "checkpoint inspect": (lambda words: checkpoint.main(["inspect", *words]), RUN),
    "checkpoint reshard": (lambda words: checkpoint.main(["reshard", *words]), RUN),
    "checkpoint verify": (lambda words: checkpoint.main(["verify", *words]), RUN),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands run: the demo's run and another, each with a config alone."""
    monkeypatch.chdir(tmp_path)
    for path in (DEMO, "runs/finetune/mine"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text(json.dumps(to_json(tiny())))
    return tmp_path


def test_a_tilde_of_the_first_word_is_the_home_directory(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "runs"))
    assert with_model(["~/finetune/mine"]) == [RUN, str(folder / "runs" / "finetune" / "mine")]


def ended(main, words, capsys):
    """Exit code and standard error of a command that ends before it computes anything."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_word_is_the_value_of_the_flag(name, folder, capsys, monkeypatch):
    main, flag = COMMANDS[name]
    seen = []

    def parse_flags(config, argv, *arguments, **options):
        del config, arguments, options
        seen.append(list(argv))
        raise SystemExit(0)

    monkeypatch.setattr(flags, "parse_flags", parse_flags)
    for words in ([DEMO, "--x", "1"], [flag, DEMO, "--x", "1"], [f"{flag}={DEMO}", "--x", "1"]):
        assert ended(main, words, capsys) == (0, "")
    assert seen == [[flag, DEMO, "--x", "1"]] * 2 + [[f"{flag}={DEMO}", "--x", "1"]]
    assert ended(main, ["--x", "1"], capsys) == (
        0,
        f"note: no model is named as the first word: {DEMO}, the run of `make demo`, is taken\n",
    )
    assert seen[3] == [flag, DEMO, "--x", "1"]
    assert ended(main, ["--help"], capsys) == (0, "") and seen[4] == ["--help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_is_named_twice_or_is_none_is_refused_in_words(name, folder, capsys):
    main, flag = COMMANDS[name]
    twice = f"the model is named twice, as the first word, {DEMO}, and by {flag} x: leave one"
    code, message = ended(main, [DEMO, flag, "x"], capsys)
    assert code == 2 and twice in message
    code, message = ended(main, ["mine"], capsys)
    assert code == 2 and "there is no model 'mine': did you mean runs/finetune/mine?" in message
    assert "OWNER/NAME" in message and f"runs here: runs/finetune/mine, {DEMO}" in message


def test_words_that_are_no_model(folder):
    with pytest.raises(ValueError, match="config.json is a file: name the directory"):
        check_model(f"{DEMO}/config.json")
    with pytest.raises(ValueError, match="no model 'runs/pretrain/tina': did you mean .*tiny'"):
        check_model("runs/pretrain/tina")
    for word in (DEMO, "allenai/OLMoE-1B-7B-0924"):
        check_model(word)
    words = ["data:files", "--data.path", "x"]
    assert with_model(words, INITIAL) == [INITIAL, DEMO, *words]


def test_without_runs_the_demo_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert with_model(["--length", "3"]) == ["--length", "3"]
    with pytest.raises(ValueError, match=f"There are no runs here: `make demo` makes {DEMO}"):
        check_model("tiny")
    code, message = ended(rl.main, ["--rl.group", "2"], capsys)
    assert code == 2 and "name the model to train as the first word" in message


def test_a_model_of_another_library_is_what_convert_makes_a_run_of(folder, capsys):
    _ = write_model(folder / "model")
    convert = COMMANDS["checkpoint convert"][0]
    code, message = ended(convert, ["model"], capsys)
    assert code == 2 and "--from_huggingface needs --to RUN" in message
    code, message = ended(convert, ["model", "--quantise", "w4a8"], capsys)
    assert code == 2 and "--quantise and --from_huggingface exclude each other" in message


def test_a_model_behind_a_flag_is_answered_with_its_place(folder, capsys):
    code, message = ended(generate.main, ["--length", "3", DEMO], capsys)
    assert code == 2 and "a model is the first word, jaxmoe generate" in message


def test_a_report_without_runs_is_of_the_demo(folder, capsys):
    code, message = ended(report.main, [], capsys)
    assert code == 2 and message.startswith("note: no model is named")
    assert f"{DEMO} has no steps yet" in message
    code, message = ended(report.main, [DEMO, "mine"], capsys)
    assert code == 2 and "did you mean runs/finetune/mine?" in message


def test_the_last_value_of_a_flag_in_both_spellings():
    assert value_of("--a.b_c", ["--a.b-c", "1", "--a.b_c=2", "3"]) == "2"
    assert value_of("--a", ["--b", "--a"]) is None
