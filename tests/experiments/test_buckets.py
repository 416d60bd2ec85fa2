# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every command refuses an object store for its run in one sentence, before it writes anything."""

from __future__ import annotations

import importlib
import os

import pytest

import jaxmoe
from experiments import __main__ as commands
from experiments.cli.exit_codes import ExitCode
from jaxmoe.errors import ConfigurationError
from jaxmoe.run import Run
from jaxmoe.run.config import PretrainConfig

BUCKET = "gs://bucket/run"
IN_RUN = ("--run.directory", BUCKET)
LINES = {
    "bench": [("step", *IN_RUN)],
    "checkpoint": [
        *((name, *IN_RUN) for name in ("convert", "inspect", "reshard", "verify")),
        ("convert", "--to", BUCKET),
        ("convert", "--from_huggingface", BUCKET),
    ],
    "data": [("inspect", *IN_RUN)],
    "depth": [IN_RUN],
    "describe": [IN_RUN],
    "doctor": [IN_RUN, ("--links", *IN_RUN)],
    "ensemble": [("--runs", "a", "b", *IN_RUN)],
    "evaluate": [IN_RUN],
    "evaluate_tasks": [IN_RUN],
    "gates": [IN_RUN],
    "generate": [("--prompt", "a", *IN_RUN)],
    "launch": [
        IN_RUN,
        ("--command", f"python -m experiments.pretrain --run.directory {BUCKET}"),
        ("--command", f"python -m experiments.pretrain --run.directory={BUCKET}"),
    ],
    "finetune": [("--checkpoint.initial.path", BUCKET)],
    "layer_paths": [IN_RUN],
    "levels": [IN_RUN],
    "outer": [IN_RUN],
    "place": [IN_RUN],
    "plan": [IN_RUN],
    "precision": [IN_RUN],
    "pretrain": [
        ("tiny", *IN_RUN),
        ("resume", BUCKET),
        ("branch", BUCKET, "--run.name", "b"),
        ("tiny", "--checkpoint.initial.path", BUCKET),
    ],
    "replay": [IN_RUN],
    "resize": [("--mesh.data", "2", *IN_RUN)],
    "report": [(BUCKET,), IN_RUN],
    "rl": [("--checkpoint.initial.path", BUCKET)],
    "routers": [IN_RUN],
    "serving": [("advise", *IN_RUN), ("caches", *IN_RUN), ("load", *IN_RUN), ("simulate", *IN_RUN)],
    "serve": [IN_RUN],
    "transfer": [IN_RUN],
}


def test_every_command_has_a_line():
    assert LINES.keys() == commands._files().keys()


@pytest.mark.parametrize("command", LINES)
def test_a_bucket_is_refused_before_anything_is_written(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"experiments.{command}"
    module = importlib.import_module(name)
    main = getattr(module, "main", None) or importlib.import_module(f"{name}.__main__").main
    for line in LINES[command]:
        with pytest.raises(SystemExit) as exit_:
            main(line)
        printed = capsys.readouterr()
        assert exit_.value.code == ExitCode.BAD_CONFIGURATION and printed.out == "", line
        (message,) = printed.err.splitlines()
        assert f"={BUCKET} is not in a file system" in message, line
        assert f"copy it with `gcloud storage rsync --recursive runs/mine {BUCKET}`" in message
        assert os.listdir() == [], line


def test_the_launched_command_may_read_its_data_from_a_bucket():
    from experiments.cli.flags import check_local_paths
    from experiments.launch.config import LaunchConfig

    command = "python -m experiments.pretrain --data.path gs://bucket/d s3://b/e --data.path=gs://b"
    check_local_paths(LaunchConfig(command=command))


@pytest.mark.parametrize(
    "use",
    [
        lambda: Run(PretrainConfig(), directory="s3://bucket/run"),
        lambda: Run.open("s3://bucket/run"),
        lambda: jaxmoe.save_checkpoint("s3://bucket/run", {}, step=1, config={}),
        lambda: jaxmoe.load_checkpoint("s3://bucket/run"),
    ],
)
def test_the_library_refuses_a_bucket(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, ConfigurationError), match="`aws s3 sync runs/mine s3://buck"):
        use()
    assert os.listdir() == []
