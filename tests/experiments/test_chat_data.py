# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations on the command line: inspect, train on answers, resume."""

import json
import pathlib

import numpy as np
import pytest

from experiments import data, pretrain
from jaxmoe.checkpoint.hook import CheckpointHook
from tests.experiments.test_own_data import SMALL
from tests.support.runs import logged_losses, saved_leaves


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"Say {n}", "completion": f"{n}!"} for n in range(60)]
    records += [{"messages": [{"role": "user", "content": "No answer"}]}]
    records += [{"prompt": "Count", "completion": " ".join(map(str, range(60)))}, {"text": "?"}]
    pathlib.Path("chats.jsonl").write_text("\n".join(map(json.dumps, records)))


WORDS = ("data:chat", "--data.path", "chats.jsonl", "--data.on_bad_record", "skip")
LONG = ("--training.sequence_length", "96", "--data.validation_fraction", "0.3")


def test_inspect_shows_the_masked_text_and_what_is_left_out(capsys, monkeypatch):
    inspect = ["inspect", *WORDS, *LONG, "--run.directory", "inspected"]
    assert data.main([*inspect, "--data.long_conversations", "truncate"]) == 0
    output = capsys.readouterr().out
    assert "61 conversations, " in output and "% of their tokens are trained" in output
    assert "left out: 1 records cannot be used\n" in output
    assert "left out: 1 conversations without a token to train on\n" in output
    assert "left out: 2 pieces of conversations that are longer than a row\n" in output
    assert "truncated: 1 conversations longer than 97 tokens\n" in output
    assert "\n  |<|im_start|>user\n  Say 0<|im_end|>\n  <|im_start|>assistant\n" in output
    assert "\n  [[0!<|im_end|>]]\n" in output and "\x1b" not in output
    summary = json.loads(pathlib.Path("inspected/summary.json").read_text())
    assert summary["weights"]["untrained"] == summary["weights"]["skipped"] == 1

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert data.main(inspect) == 0
    output = capsys.readouterr().out
    assert "\n  \x1b[32m0!<|im_end|>\x1b[0m\n" in output and "[[" not in output
    assert "cut: 1 conversations longer than 97 tokens\n" in output


@pytest.mark.slow
def test_resumed_training_on_conversations_is_bitwise(capsys, monkeypatch):
    words = [*WORDS, *SMALL, *LONG, "--run.directory"]
    assert pretrain.main([*words, "whole"]) == 0
    output = capsys.readouterr().out
    assert "data     chat: 61 conversations, " in output
    run = CheckpointHook.run

    def run_and_stop(self, step, state):
        run(self, step, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CheckpointHook, "run", run_and_stop)
        pretrain.main([*words, "parts"])
    assert pretrain.main([*words, "parts"]) == 0
    whole, parts = (saved_leaves(pathlib.Path(name), 4) for name in ("whole", "parts"))
    for name, leaf in whole.items():
        np.testing.assert_array_equal(leaf, parts[name])
    assert logged_losses(pathlib.Path("whole"))[4] == logged_losses(pathlib.Path("parts"))[4]
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*words, "parts", "--data.train_on", "all"])
    assert stop.value.code == 2
