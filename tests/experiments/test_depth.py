# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.depth`: the table, the files that it writes, and what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import depth
from experiments.doctor.devices import tiny_config
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.run.assemble import assemble
from jaxmoe.run.directory import RunDirectory


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run directory on all devices with the state before the first step."""
    path = tmp_path_factory.mktemp("depth") / "run"
    config = tiny_config(len(jax.devices()))
    model = dataclasses.replace(config.model, num_layers=3)
    evaluation = dataclasses.replace(config.evaluation, batches=2)
    config = dataclasses.replace(config, model=model, evaluation=evaluation)
    assembly, directory = assemble(config), RunDirectory(path)
    with directory.held():
        directory.check_config(config)
        save_checkpoint(
            directory.checkpoints_directory,
            assembly.new_state(),
            step=0,
            config=config,
            data=assembly.loader.position(0),
        )
    return path


@pytest.mark.slow
def test_depth_writes_a_table_a_summary_and_a_picture(untrained, capsys):
    """On the eight devices of the run, beside itself; then with sweeps."""
    arguments = ["--run.directory", str(untrained)]
    assert depth.main([*arguments, "--against", str(untrained)]) == 0
    words = capsys.readouterr().out
    assert "nearest there" in words
    summary = json.loads((untrained / "depth" / "summary.json").read_text())
    assert summary["status"] == "done" and len(summary["layers"]) == 3
    assert summary["sentence"] in words
    assert np.argmin(summary["map"]["error"], axis=1).tolist() == [0, 1, 2]
    assert (untrained / "plots" / "depth.png").read_bytes()[:4] == b"\x89PNG"
    assert depth.main([*arguments, "--sweeps", "3"]) == 0
    swept = json.loads((untrained / "depth" / "summary.json").read_text())
    losses = swept["sweeps"]
    errors = [abs(x - losses["usual"]) for x in losses["after"]]
    assert errors[2] < 1e-5 < errors[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batches", "0"], "batches=0 must be at least 1"),
        (["--sweeps", "-1"], "sweeps=-1 must be at least 0"),
        (["--run.directory", "nowhere"], "nowhere"),
    ],
)
def test_a_bad_configuration_is_refused(more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        depth.main(more)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
