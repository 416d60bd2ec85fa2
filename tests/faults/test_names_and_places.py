# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Odd names of directories, files in the place of directories, steps without their commit."""

import io
import logging
import os
import pathlib
import shutil

import numpy as np
import pytest

from experiments import evaluate, finetune, pretrain
from experiments.checkpoint.resharding import ReshardConfig, rewrite
from experiments.checkpoint.verify import CheckpointsConfig
from experiments.cli.exit_codes import ExitCode
from experiments.cli.process import configure_logging
from jaxmoe.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    load_checkpoint,
    save_checkpoint,
)
from jaxmoe.checkpoint.commit import Commits
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.checkpoint.streaming import Streamed, open_stored, save_streamed
from jaxmoe.disk import replace_file
from jaxmoe.run.directory import RunDirectory

STATE = {"params": {"w": np.arange(6, dtype=np.float32)}}


def _saved(directory, *steps):
    for step in steps:
        save_checkpoint(directory, STATE, step=step, config={})
    return directory


@pytest.mark.parametrize("name", ["a[1]*?", "**", "a?[!x]", "%s {x} #", "~b"])
def test_checkpoints_in_a_directory_with_glob_characters(tmp_path, name):
    directory = _saved(tmp_path / name / "checkpoints", 1)
    np.testing.assert_array_equal(load_checkpoint(directory)["params"]["w"], STATE["params"]["w"])
    target = {"params": {"w": STATE["params"]["w"]}}
    np.testing.assert_array_equal(restore_part(directory, target)["params"]["w"], np.arange(6))
    layer = np.ones(2, np.float32)
    streamed = {"params/x": Streamed((3, 2), "float32", lambda index: layer, is_stacked=True)}
    save_streamed(tmp_path / name / "streamed", STATE, streamed, step=1, config={})
    _, arrays = open_stored(tmp_path / name / "streamed")
    np.testing.assert_array_equal(arrays["params/x"], np.ones((3, 2)))
    np.testing.assert_array_equal(
        load_checkpoint(tmp_path / name / "streamed")["params"]["x"], np.ones((3, 2))
    )


def test_a_name_longer_than_the_file_system_allows_is_refused(tmp_path):
    path = tmp_path / ("x" * 300)
    for use in ("check_free_of_runs", "config_json", "acquire"):
        with pytest.raises(ValueError, match="x is longer than the file system allows: shorten"):
            getattr(RunDirectory(path), use)()
    for is_writer in (True, False):
        with pytest.raises(CheckpointError, match="cannot be opened .File name too long.: change"):
            CheckpointManager(path, is_writer=is_writer)
    with pytest.raises(CheckpointError, match="cannot be opened .File name too long.: change"):
        CheckpointsConfig(directory=str(path)).open()


NO_TEXT = os.fsdecode(b"x\xff\xfe")


@pytest.mark.parametrize("place", ["named", "above"])
def test_a_directory_whose_name_is_not_utf8_is_refused_in_words(tmp_path, monkeypatch, place):
    """Before anything is written: a report names its run, and HTML cannot hold such a name."""
    inside = tmp_path / NO_TEXT
    inside.mkdir()
    path = inside if place == "named" else pathlib.Path("run")
    monkeypatch.chdir(tmp_path if place == "named" else inside)
    text = r"is not UTF-8 \(.*x\\udcff\\udcfe.*\), and the files of a run name it: rename"
    with pytest.raises(ValueError, match=f"^run.directory=.*{text}") as refused:
        RunDirectory(path)
    assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match=f"^directory=.*{text}"):
        CheckpointManager(path)
    with pytest.raises(ValueError, match=f"^directory=.*{text}"):
        load_checkpoint(path)
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (pretrain.main, ("tiny", "--run.directory", NO_TEXT)),
        (pretrain.main, ("resume", NO_TEXT)),
        (pretrain.main, ("--data.path", NO_TEXT)),
        (finetune.main, ("--checkpoint.initial.path", NO_TEXT)),
        (evaluate.main, ("--run.directory", NO_TEXT)),
    ],
)
def test_words_of_a_command_line_that_are_not_utf8_end_it_in_words(
    main, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    message = capsys.readouterr().err
    assert r"x\udcff\udcfe" in message and "UTF-8" in message and message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_control_characters_of_names_are_shown_escaped(monkeypatch, capsys):
    """A name can clear a terminal, or forge a line, in warnings and messages as in errors."""
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(stream)])
    messages = logging.getLogger("jaxmoe.messages")
    for field in ("handlers", "propagate", "level"):
        monkeypatch.setattr(messages, field, getattr(messages, field))
    configure_logging()
    name = "a\x1b[2J\rb"
    logging.getLogger("jaxmoe.anywhere").warning("%s: lost\nsecond line", name)
    messages.info("restored %s", name)
    assert stream.getvalue() == "WARNING: a\\x1b[2J\\rb: lost\nsecond line\n"
    assert capsys.readouterr().out == "restored a\\x1b[2J\\rb\n"


@pytest.mark.parametrize("name", ["", "trash", "damaged"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_the_place_of_a_directory_is_refused_before_the_first_save(
    tmp_path, name, is_link
):
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "missing") if is_link else path.write_text("")
    with pytest.raises(CheckpointError, match=f"{path} is not a directory, and checkpoints need"):
        CheckpointManager(tmp_path / "checkpoints")


@pytest.mark.parametrize("mark", ["_CHECKPOINT_METADATA", "commit_success.txt"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_step_without_its_commit_is_not_used(tmp_path, mark, verify, caplog):
    caplog.set_level(logging.WARNING, "jaxmoe")
    _saved(tmp_path, 1, 2)
    (tmp_path / "2" / mark).unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{mark}: missing, the step was not commit"):
        load_checkpoint(tmp_path, step=2, verify=verify)
    manager = CheckpointManager(tmp_path, verify=verify)
    found = manager.restore_newest(STATE)
    manager.close()
    assert found is not None and found[0] == 1
    assert f"{mark}: missing" in caplog.text and (tmp_path / "damaged" / "2").is_dir()


@pytest.mark.parametrize(
    ("state", "given", "text"),
    [
        (STATE, {"config": {"a": {1, 2}}}, "config cannot be saved as JSON .Object of type set"),
        (STATE, {"config": {}, "data": {"x": b""}}, "data cannot be saved as JSON .Object of type"),
        ({"a": "text", "b": {"c": 3}}, {"config": {}}, r"state.a .str., state.b.c .int.: not an"),
        ({"a": np.array([None])}, {"config": {}}, r"state.a .ndarray.: not an array of numbers"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_in_words(tmp_path, state, given, text):
    with pytest.raises(CheckpointError, match=f"^{text}"):
        save_checkpoint(tmp_path / "a", state, step=1, **given)
    with pytest.raises(CheckpointError, match=f"^{text}"):
        save_streamed(tmp_path / "b", state, {}, step=1, **given)


def test_the_next_start_removes_temporary_files_of_a_killed_one(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    kept = [tmp_path / ".mine.tmp", tmp_path / "router.npz.12.tmp", directory.router_file]
    killed = (directory.router_file, directory.plots_directory / "loss.png")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *paths: None)  # killed before the rename
        for path in killed:
            replace_file(path, b"half")
    assert list(tmp_path.rglob(".*.tmp"))
    for path in kept:
        path.write_text("")
    with directory.held():
        left = {path for path in tmp_path.rglob("*") if ".tmp" in path.name or path in kept}
    assert left == set(kept)


def test_reshard_completes_the_target_of_a_killed_one(tmp_path, monkeypatch):
    _saved(tmp_path / "run" / "checkpoints", 1)
    killed, before_commit = tmp_path / "killed", Commits.before_commit

    def copy_as_if_killed(self):
        before_commit(self)
        shutil.copytree(self._directory, killed)

    run = CheckpointsConfig(directory=str(tmp_path / "run"))
    with monkeypatch.context() as patched:
        patched.setattr(Commits, "before_commit", copy_as_if_killed)
        rewrite(ReshardConfig(run=run, to=str(tmp_path / "whole")))
    assert [path.suffix != "" for path in killed.iterdir()] == [True]  # only the uncommitted step
    with pytest.raises(CheckpointError, match="killed holds no checkpoints"):
        load_checkpoint(killed)
    assert rewrite(ReshardConfig(run=run, to=str(killed))).startswith(f"{killed}/1: 1 arrays")
    np.testing.assert_array_equal(load_checkpoint(killed)["params"]["w"], np.arange(6))
    assert [path.name for path in pathlib.Path(killed).iterdir()] == ["1"]
    with pytest.raises(CheckpointError, match="already has a checkpoint of step 1"):
        rewrite(ReshardConfig(run=run, to=str(killed)))
