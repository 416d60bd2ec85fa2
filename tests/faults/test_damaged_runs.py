# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run resumes from the previous checkpoint after the newest one was damaged."""

import json
import pathlib

import numpy as np
import pytest

from experiments import evaluate, pretrain
from experiments.cli.flags import ExitCode
from tests.support.runs import flags, logged_losses, saved_leaves


def _damage(step: pathlib.Path) -> None:
    files = [path for path in (step / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.slow
def test_resume_from_the_checkpoint_before_a_damaged_one_is_bitwise(tmp_path, capsys, caplog):
    """Bitwise as without the damage; a strict start stops and gives the reason."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    command = flags(run, 6, "--checkpoint.every", "2", "--tracking.sample_length", "0")
    assert pretrain.main(command) == ExitCode.DONE
    wanted, losses = saved_leaves(run, 6), logged_losses(run)

    _damage(checkpoints / "6")
    assert evaluate.main(["--run.directory", str(run)]) == ExitCode.DONE
    assert "step=4 " in capsys.readouterr().out, "who reads uses the one before it"
    try:
        pretrain.main([*command, "--checkpoint.safety.on_damage", "stop"])
    except SystemExit as stopped:
        assert stopped.code == ExitCode.BAD_CONFIGURATION
    assert f"error: {checkpoints}/6 is damaged: state/" in capsys.readouterr().err
    assert (checkpoints / "6").is_dir()

    assert pretrain.main(command) == ExitCode.DONE
    assert "continuing after step 4" in capsys.readouterr().out
    assert f"{checkpoints}/6 is damaged: " in caplog.text
    assert (checkpoints / "damaged" / "6").is_dir()
    for path, leaf in saved_leaves(run, 6).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
    assert logged_losses(run) == losses

    (checkpoints / "6").rename(checkpoints / "spare")
    (checkpoints / "4").rename(checkpoints / "6")
    (checkpoints / "spare").rename(checkpoints / "4")
    capsys.readouterr()
    assert evaluate.main(["--run.directory", str(run)]) == ExitCode.DONE
    assert "step=2 " in capsys.readouterr().out, "neither 4 nor 6 is what its name says"
    assert pretrain.main(command) == ExitCode.DONE
    assert "continuing after step 2" in capsys.readouterr().out
    for path, leaf in saved_leaves(run, 6).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
    assert json.loads((run / "summary.json").read_text())["checkpoint_step"] == 6


@pytest.mark.slow
def test_a_changed_digit_of_the_config_is_named_and_refused(tmp_path, capsys):
    """With the value on the command line the run goes on, and records it."""
    run = tmp_path / "run"
    command = flags(run, 4, "--tracking.sample_length", "0", "--optimizer.learning_rate", "0.005")
    assert pretrain.main(command) == ExitCode.DONE
    config, files = run / "config.json", _files(run)
    text = config.read_text()
    assert text.count('"learning_rate": 0.005') == 1
    config.write_text(text.replace('"learning_rate": 0.005', '"learning_rate": 0.007'))
    more = ["resume", str(run)]
    with pytest.raises(SystemExit) as stopped:
        pretrain.main(more)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    said = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.005 in the checkpoint, 0.007 in config.json" in said
    assert f"resume {run} --optimizer.learning_rate 0.005" in said
    assert _files(run) == files, "a refused start leaves the run as it is"
    longer = [*more, "--training.steps", "5", "--optimizer.learning_rate", "0.007"]
    assert pretrain.main(longer) == ExitCode.DONE
    assert pretrain.main(more) == ExitCode.DONE, "the lineage says who changed it"


def _files(run: pathlib.Path) -> list[str]:
    paths = (path for path in run.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if not path.name.startswith("run."))
