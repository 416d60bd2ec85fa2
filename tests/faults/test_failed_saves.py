# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Failed saves: noticed at the next step and retried there, without losing a good step.

The limit on the size of files stands in for a full disk: it refuses every write, to root as well.
"""

import contextlib
import logging
import os
import pathlib
import resource
import time

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import CheckpointManager, SavesFailedError, load_checkpoint
from jaxmoe.checkpoint.commit import Commits
from jaxmoe.checkpoint.hook import CheckpointHook
from tests.support.full_disk import end_on_a_full_disk
from tests.support.runs import flags

LIMIT = 1 << 17
"""Largest file in bytes; captured output of a test stays below."""


def _state(step):
    # Random, so that it is as large in a file as in memory.
    return {"w": np.random.default_rng(step).standard_normal(LIMIT, np.float32)}


def _assert_holds(directory, step):
    np.testing.assert_array_equal(load_checkpoint(directory, step=step)["w"], _state(step)["w"])


@contextlib.contextmanager
def _full_disk(limit=LIMIT):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _wait(manager):
    """Wait for the background save, so that the next step can see its result."""
    until = time.monotonic() + 60
    while manager.is_saving():
        assert time.monotonic() < until
        time.sleep(0.01)


class Steps:
    """A loop with only the hook."""

    def __init__(self, manager, **given):
        self.step, self.manager, self.saves = 0, manager, []
        self.hook = CheckpointHook(
            manager,
            config={},
            position=lambda step: {"step": step},
            last_step=10**6,
            before=lambda: self.saves.append(self.step),
            **given,
        )

    def next(self):
        self.step += 1
        if self.hook.is_due(self.step):
            # The state is a TrainState to the loop, and any tree to the manager.
            getattr(CheckpointHook.run, "__wrapped__", CheckpointHook.run)(
                self.hook, self.step, _state(self.step)
            )
        _wait(self.manager)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_save_is_tried_again_at_the_next_step(tmp_path, caplog, failing):
    caplog.set_level(logging.WARNING, "jaxmoe")
    manager = CheckpointManager(tmp_path, keep=3)
    steps = Steps(manager, every=10)
    while steps.step < 19:
        steps.next()
    assert steps.saves == [10] and manager.is_owed() is False
    with _full_disk():
        for _ in range(failing):
            steps.next()
        assert manager.is_owed(), "one step after it failed"
    assert steps.saves == [10, *range(20, 20 + failing)], "once a step"
    assert manager.failures == failing
    assert caplog.text.count("was not saved, the run goes on") == failing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10"], "nothing is left of it"
    _assert_holds(tmp_path, 10)
    for _ in range(5):
        steps.next()
    assert steps.saves == [10, *range(20, 21 + failing)], "and no more once it is saved"
    assert manager.steps() == [10, 20 + failing] and manager.failures == 0
    _assert_holds(tmp_path, 20 + failing)
    manager.close()


@pytest.mark.parametrize("waits", [False, True], ids=("at closing", "before"))
@pytest.mark.parametrize("is_lazy", [False, True], ids=("blocking", "lazy"))
@pytest.mark.parametrize("limit", [0, 100, LIMIT])
def test_a_last_save_that_failed_is_not_raised_by_closing(tmp_path, caplog, limit, is_lazy, waits):
    """Each thread of a save may fail: the first error is logged, and the others belong to it."""
    manager = CheckpointManager(tmp_path)
    assert manager.save(1, _state(1), config={}) and manager.finish()
    with _full_disk(limit):
        manager.save(2, _state(2), config={}, is_lazy=is_lazy)
        assert not waits or not manager.finish()
        manager.close()
    assert caplog.text.count("was not saved, the run goes on") == 1
    _assert_holds(tmp_path, 1)


def test_too_many_failures_in_a_row_end_the_run(tmp_path):
    manager = CheckpointManager(tmp_path)
    steps = Steps(manager, every=1, max_failed=2)
    with _full_disk():
        steps.next(), steps.next()
        with pytest.raises(SavesFailedError, match=r"2 saves in a row.*max_failed_saves=2"):
            steps.next()
    assert steps.saves == [1, 2]
    manager.close()


def test_several_processes_agree_on_retrying_a_save(tmp_path, monkeypatch):
    """All ask at the same steps, and all save again when one has failed."""
    manager, asked = CheckpointManager(tmp_path), []
    hook = Steps(manager, every=100, agree_every=5).hook

    def agree(code):
        asked.append(code)
        return 1

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("jaxmoe.checkpoint.hook.agree", agree)
    due = [step for step in range(1, 13) if hook.is_due(step)]
    monkeypatch.undo()
    assert due == [5, 10] and asked == [0, 0]
    manager.close()


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_that_cannot_save_ends_with_its_own_code(tmp_path, capsys, caplog, monkeypatch):
    class Full:
        free = 0

    monkeypatch.setattr("jaxmoe.checkpoint.commit.shutil.disk_usage", lambda _: Full)
    more = ("--checkpoint.every", "2", "--checkpoint.safety.max_failed_saves", "3")
    assert pretrain.main(flags(tmp_path / "run", 9, *more)) == ExitCode.NOT_SAVED
    assert "3 saves in a row have failed (checkpoint.safety.max_failed_saves=3)" in caplog.text
    captured = capsys.readouterr()
    assert "not_saved at step 5" in captured.out, "steps 2, 3 and 4 failed"
    assert "the last state could not be saved" in captured.err


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_its_own_code(tmp_path):
    """Errors of all threads of the last save are said once, in words."""
    given = flags(tmp_path / "run", 4, "--checkpoint.every", "2")
    code, output = end_on_a_full_disk("experiments.pretrain", given)
    assert code == ExitCode.NOT_SAVED and "the last state could not be saved" in output
    assert "Traceback" not in output


# What is kept, and what is on the disk.


def _damage(step):
    files = [path for path in (step / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))


def test_damaged_steps_do_not_count_among_those_kept(tmp_path):
    """The last good step stays, however many newer ones are damaged."""
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2):
        assert manager.save(step, _state(step), config={}) and manager.finish()
    for step in (3, 4, 5):
        newest = manager.latest_step()
        _damage(tmp_path / str(newest))
        found = manager.restore_newest(_state(0))
        assert found is not None and found[0] == 1
        assert manager.save(step, _state(step), config={}) and manager.finish()
        assert manager.steps() == [1, step]
    manager.close()


def test_a_save_that_fails_deletes_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2):
        assert manager.save(step, _state(step), config={}) and manager.finish()
    with _full_disk():
        for step in (3, 4, 5):
            manager.save(step, _state(step), config={})
            assert not manager.finish()
    assert manager.steps() == [1, 2]
    for step in (1, 2):
        _assert_holds(tmp_path, step)
    manager.close()


def test_all_of_a_step_is_synced_before_it_counts_as_saved(tmp_path, monkeypatch):
    """Its files before the rename; the marks of the commit and both directories after it."""
    synced, fsync = [], os.fsync

    def noted(opened):
        synced.append(pathlib.Path(os.readlink(f"/proc/self/fd/{opened}")))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", noted)
    manager = CheckpointManager(tmp_path)
    assert manager.save(1, _state(1), config={})
    _wait(manager)
    step = tmp_path / "1"
    pending = {path for path in synced if "orbax-checkpoint-tmp" in str(path)}
    (root,) = {path for path in pending if path.parent == tmp_path}
    names = {path.relative_to(root).as_posix() for path in pending}
    committed = {path.relative_to(step).as_posix() for path in step.rglob("*")}
    assert committed - names <= {"commit_success.txt"} and "." in names
    assert "state/_METADATA" in names and "files.json" in names

    del synced[:]
    assert manager.finish()
    assert synced == [step / "commit_success.txt", step / "_CHECKPOINT_METADATA", step, tmp_path]
    manager.close()


def test_a_step_that_cannot_be_synced_is_not_acknowledged(tmp_path, monkeypatch, caplog):
    manager = CheckpointManager(tmp_path)
    assert manager.save(1, _state(1), config={})
    _wait(manager)

    def refuse(self):
        self.pending = None
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Commits, "done", refuse)
        assert not manager.finish()
    assert manager.is_owed() and "the disk is gone" in caplog.text
    manager.close()
