# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Files on the command line: train, resume, evaluate, inspect, and errors."""

import contextlib
import json

import numpy as np
import pytest

from experiments import data, evaluate, generate, pretrain
from experiments.cli import flags as cli
from experiments.recipes import RECIPES
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.data import ChatConfig, FilesConfig, HuggingFaceConfig, MixtureConfig
from jaxmoe.data.tokenizer import FileConfig, TrainedConfig
from jaxmoe.training.feed import LoaderFeed

SMALL = (
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "16",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "16",
    "--model.moe.expert_dim",
    "16",
    "--model.moe.num_experts",
    "4",
    "--training.steps",
    "4",
    "--training.batch_size",
    "8",
    "--training.sequence_length",
    "16",
    "--schedule.warmup_steps",
    "2",
    "--evaluation.batches",
    "1",
    "--checkpoint.every",
    "2",
    "--tracking.trackers",
    "--tracking.sample_length",
    "0",
)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts = [f"document {i} " + "word " * (i % 7) for i in range(300)]
    (tmp_path / "docs").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "docs" / f"{i}.txt").write_text(text)
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def _parsed(*words):
    return cli.parse(RECIPES, "tiny", words, "prog", "about")[1].data


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--data.path docs more.jsonl", FilesConfig(path=("docs", "more.jsonl"))),
        ("--data.path=docs", FilesConfig(path=("docs",))),
        ("--training.steps 300 data:files --data.path docs", FilesConfig(path=("docs",))),
        ("--data.mix a=0.7:x b=0.3:y", MixtureConfig(mix=("a=0.7:x", "b=0.3:y"))),
        (
            "--data.packing concatenate --data.mix a=1:x",
            MixtureConfig(mix=("a=1:x",), packing="concatenate"),
        ),
        (
            "--data.path gs://b/x --data.path gs://b/y s3://c/z",
            FilesConfig(path=("gs://b/y", "s3://c/z")),
        ),
        ("--data.mix a=1:x b=1:y --data.mix c=1:z", MixtureConfig(mix=("c=1:z",))),
        ("--data.dataset org/x", HuggingFaceConfig(dataset="org/x")),
        ("data:chat --data.path c.jsonl", ChatConfig(path=("c.jsonl",))),
        (
            "--data.path c.jsonl --data.train_on last --data.template plain",
            ChatConfig(path=("c.jsonl",), train_on="last", template="plain"),
        ),
        (
            "data.tokenizer:trained --data.path gs://b/x --data.tokenizer.vocab-size 300",
            FilesConfig(path=("gs://b/x",), tokenizer=TrainedConfig(vocab_size=300)),
        ),
        (
            "--data.tokenizer.path t.json --data.path x",
            FilesConfig(path=("x",), tokenizer=FileConfig(path="t.json")),
        ),
    ],
)
def test_data_flag_selects_the_source_that_has_it(words, expected):
    assert _parsed(*words.split()) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--data.path x --data.mix a=1:y",
            "--data.mix belongs to data:mixture; --data.path belongs to data:files or data:chat; "
            "choose one",
        ),
        (
            "data:corpus --data.path x",
            "--data.path belongs to data:files or data:chat; data:corpus is chosen: leave out one",
        ),
        (
            "--data.order 3",
            "--data.order belongs to data:markov or data:language_mixture; say which",
        ),
        (
            "--data.path x --data.tokenizer.vocab_size 300",
            "--data.tokenizer.vocab_size belongs to data.tokenizer:trained or"
            " data.tokenizer:ids; say",
        ),
    ],
)
def test_ambiguous_data_flags_are_refused(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        _parsed(*words.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_help_lists_data_flags(capsys):
    with pytest.raises(SystemExit):
        _parsed("--help")
    output = " ".join(capsys.readouterr().out.split())
    assert "a flag that only one NAME has chooses it" in output
    assert "data:corpus | files | mixture | huggingface" in output


def _batches(monkeypatch):
    """The tokens of every training step, as they reach the device."""
    seen = {}
    batches = LoaderFeed.batches

    def watched(self, first_step):
        with contextlib.closing(batches(self, first_step)) as made:
            for number, batch in enumerate(made, start=first_step):
                seen[number] = np.asarray(batch.tokens).copy()
                yield batch

    monkeypatch.setattr(LoaderFeed, "batches", watched)
    return seen


@pytest.mark.large
def test_train_resume_evaluate_and_generate(tmp_path, monkeypatch, capsys):
    seen = _batches(monkeypatch)
    words = ("--data.path", "docs/*.txt", "more.jsonl", *SMALL, "--run.directory")
    assert pretrain.main([*words, "whole"]) == 0
    whole = dict(seen)
    output = capsys.readouterr().out
    assert "data     files: 600 documents" in output and "context counts" in output
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["eval_bits_per_byte"] > summary["eval_bits_per_token"]  # ends take bits as well
    assert summary["data"]["train"]["num_files"] == 301

    # The same in two parts: stopped at its checkpoint of step 2, continued by the same command.
    run = CheckpointHook.run

    def run_and_stop(self, step, state):
        run(self, step, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointHook, "run", run_and_stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main([*words, "parts"])
    monkeypatch.setattr(CheckpointHook, "run", run)
    seen.clear()
    assert pretrain.main([*words, "parts", "--data.cache", "elsewhere"]) == 0  # the same rows
    assert sorted(seen) == [2, 3]
    for step, tokens in seen.items():
        np.testing.assert_array_equal(tokens, whole[step])
    parts = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert parts["final_loss"] == summary["final_loss"]

    capsys.readouterr()
    assert evaluate.main(["--run.directory", "whole"]) == 0
    assert f"eval/bits_per_byte={summary['eval_bits_per_byte']!r}" in capsys.readouterr().out
    assert generate.main(["--run.directory", "whole", "--prompt", "word", "--length", "4"]) == 0
    assert "--- prompt\nword\n--- continued\n" in capsys.readouterr().out

    (tmp_path / "docs" / "0.txt").write_text("something else")
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*words, "parts"])
    assert stop.value.code == 2
    assert "source.train.sha256:" in capsys.readouterr().err


def _refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*words, *SMALL, "--run.directory", "run"])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_data_that_does_not_fit_is_refused_before_compiling(tmp_path, capsys):
    text = _refused(capsys, "--data.path", "docs", "data.tokenizer:ids")
    assert "holds text, and data.tokenizer:ids reads token ids only" in text
    text = _refused(
        capsys, "--data.path", "docs", "data.tokenizer:trained", "--model.vocab_size", "100"
    )
    assert "model.vocab_size=100 is smaller than the vocabulary of the data" in text
    assert "give --model.vocab_size 550" in text
    assert "data.path=nowhere matches no file" in _refused(capsys, "--data.path", "nowhere")
    text = _refused(capsys, "--data.path", "docs/1?.txt")
    assert "split has" in text and "batch_size=8 must be at most that" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.path http://h/x.txt", "data.path=http://h/x.txt begins with http://, which"),
        ("--data.path /dev/zero", "data.path=/dev/zero is a character device: expected"),
        ("--data.path docs --data.cache=", "data.cache='' must be a local directory"),
        (
            "--data.path docs data.tokenizer:file --data.tokenizer.path deep.json",
            "nested deeper than",
        ),
        (
            "--data.path docs data.tokenizer:ids --data.tokenizer.vocab_size 4294967296",
            "data.tokenizer.vocab_size=4294967296 must be at most 2147483648",
        ),
    ],
)
def test_hostile_data_flags_end_in_one_sentence(tmp_path, capsys, words, message):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        data.main(["inspect", *words.split(), "--run.directory", str(tmp_path / "cache" / "run")])
    error = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and message in error and "Traceback" not in error
    assert set(tmp_path.iterdir()) - set(before) <= {tmp_path / "cache"}


def test_inspect_command_lists_contents(tmp_path, capsys):
    words = ["inspect", "--data.path", "docs", "--training.sequence_length", "64"]
    assert data.main([*words, "--run.name", "mine"]) == 0
    output = capsys.readouterr().out
    assert "packing efficiency 0." in output and "tokens in a document (train)" in output
    assert "| document" in output and "word |\n" in output and "(padding)" in output
    summary = json.loads((tmp_path / "runs" / "data" / "mine" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["train"]["documents"] > 250
    assert 0.8 < summary["train"]["packing_efficiency"] <= 1
    mix = ("inspect", "--data.mix", "docs=0.5:docs", "lines=0.5:more.jsonl")
    assert data.main([*mix, "--training.sequence_length", "64", "--run.directory", "mix"]) == 0
    output = capsys.readouterr().out
    assert "part docs\ntrain      documents " in output
    assert "tokens in a document (lines train)" in output and "word |\n" in output
    parts = json.loads((tmp_path / "mix" / "summary.json").read_text())["parts"]
    assert parts["docs"]["train"] == summary["train"] and parts["lines"]["validation"]["rows"]
    assert data.main(["inspect", "markov", "--run.directory", "other"]) == 0
    assert "unlimited rows" in capsys.readouterr().out


def test_inspect_refuses_a_training_run_directory(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        data.main(["inspect", "markov", "--run.directory", "run"])
    assert stop.value.code == 2
    assert "holds a run, whose summary.json would be lost" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["look"], ["--data.path", "x"]])
def test_unknown_data_command_is_refused(capsys, words):
    with pytest.raises(SystemExit) as stop:
        data.main(words)
    assert stop.value.code == 2
    assert "jaxmoe data has one command, inspect" in capsys.readouterr().err
