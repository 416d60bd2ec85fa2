# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.layer_paths`: the tables, the files that it writes, and what it refuses."""

import json

import pytest

from experiments import layer_paths
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
