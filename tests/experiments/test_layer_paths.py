# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.layer_paths`: the tables, the files that it writes, and what it refuses."""

import json
import pathlib

import pytest

from experiments import layer_paths, replay
from experiments.checkpoint import bitstack, convert
from experiments.checkpoint.convert import BitStackConfig, ConvertConfig
from experiments.evaluate import FinishedRunConfig
from experiments.layer_paths import LayerPathsConfig
from jaxmoe.run.config import PretrainConfig
from tests.experiments.test_depth import untrained  # noqa: F401  (a fixture)


@pytest.mark.slow
def test_layer_paths_writes_tables_a_summary_and_a_picture(untrained, capsys):  # noqa: F811
    arguments = ["--run.directory", str(untrained), "--batches", "1", "--epochs", "2"]
    assert layer_paths.main([*arguments, "--search.simulations", "6"]) == 0
    words = capsys.readouterr().out
    summary = json.loads((untrained / "layer_paths" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["sentence"] in words
    usual, found, other, routed = summary["paths"]
    assert found["loss"] <= usual["loss"] and found["either"] > 0.0
    assert usual["layers_run"] == other["layers_run"] == 3.0 and routed["number"] > 0
    assert len(summary["layers"]) == 3 and len(summary["router_losses"]) == 2
    assert (untrained / "plots" / "layer_paths.png").read_bytes()[:4] == b"\x89PNG"


def compare(run):
    return layer_paths._compare(LayerPathsConfig(run=run))


def cut(run):
    return bitstack._cut(run, 1, BitStackConfig(), pathlib.Path("to"))


def stack(run):
    return bitstack.stack_run(run, None, BitStackConfig(), pathlib.Path("to"))


def quantise(run):
    config = ConvertConfig(run=run, quantise="w8a8")
    return convert._to_few_bits(config, "w8a8", pathlib.Path("to"))


@pytest.mark.parametrize(
    ("module", "command"),
    [(layer_paths, compare), (bitstack, cut), (bitstack, stack), (convert, quantise)],
)
def test_the_model_below_an_adapter_may_have_moved(module, command, monkeypatch):
    def load_run(*_, initial=None, **__):
        raise ValueError(f"initial={initial}")

    monkeypatch.setattr(module, "load_run", load_run)
    for part in (bitstack, convert):
        monkeypatch.setattr(part, "saved_config", lambda _: PretrainConfig())
    with pytest.raises(ValueError, match="^initial=runs/moved$"):
        command(FinishedRunConfig(initial="runs/moved"))


def test_a_replay_with_a_moved_model_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        replay.main(["--run.initial", "runs/moved"])
    assert stopped.value.code == 2
    assert "run.initial=runs/moved: a step is replayed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batches", "0"], "batches=0 must be at least 1"),
        (["--epochs", "0"], "epochs=0 must be at least 1"),
        (["--search.budget", "3"], "search.budget=3.0 must lie between 1 and 2"),
        (["--run.directory", "nowhere"], "nowhere"),
    ],
)
def test_a_bad_configuration_is_refused(more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        layer_paths.main(more)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
