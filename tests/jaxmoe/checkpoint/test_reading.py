# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reading in several processes: all see the same steps and errors, without barriers in Orbax.

Processes are played one after the other; real ones restore in tests/faults/test_rollback.py.
"""

import errno
import inspect
import os
import types

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.multihost import multihost

from jaxmoe.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    checksums,
    reading,
)
from jaxmoe.checkpoint import manager as room
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.run import hooks


def _state(step):
    return {"w": np.full(100, step, np.float32)}


@pytest.fixture
def manager(tmp_path):
    """Steps 1 and 2."""
    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (1, 2):
        assert manager.save(step, _state(step), config={}) and manager.finish()
    yield manager
    manager.close()


@pytest.fixture
def played(monkeypatch):
    """`played(function)`: what each of two processes returns or raises, the first one first."""
    sent, at = [], {}

    def share(values, is_source):
        if is_source:
            sent.append(values)
        at["read"] += 1
        return sent[at["read"] - 1]

    def run(function):
        found = []
        sent.clear()
        for index in range(2):
            at["read"] = 0
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            try:
                found.append(function(index))
            except CheckpointError as error:
                found.append((type(error), str(error)))
        return found

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(reading, "share", share)
    return run


def test_first_process_lists_the_steps(played):
    assert played(lambda index: reading.shared_steps(lambda: [[1, 2], [1]][index])) == [[1, 2]] * 2
    assert played(lambda index: reading.shared_steps(list)) == [[], []]


@pytest.mark.parametrize("kind", [None, CheckpointError, CheckpointDamagedError])
def test_first_process_reads_the_manifest(played, kind):
    """Its errors are raised on all processes."""
    manifest = CheckpointManifest(step=3, arrays={"w": {"shape": [2]}}, config={}, data={"a": [1]})

    def read(index):
        assert index == 0, "the other does not open it"
        if kind is not None:
            raise kind("so it is")
        return manifest

    expected = manifest if kind is None else (kind, "so it is")
    assert played(lambda index: reading.shared_manifest(lambda: read(index))) == [expected] * 2


def test_stale_listing_of_another_process_is_ignored(manager, monkeypatch):
    monkeypatch.setattr(room, "shared_steps", lambda find: [1])
    assert manager.restore_newest(_state(0))[0] == 1
    monkeypatch.setattr(manager, "_has", lambda step: step <= 3)
    assert manager.save(3, _state(3), config={}) and manager.finish()
    assert manager.steps() == [1, 2], "the first process has it already"


def test_restore_has_no_barrier_inside_orbax(manager, monkeypatch):
    met = []

    def meet(name, processes, **more):
        if "restore" in name:
            met.append(processes)

    monkeypatch.setattr(multihost, "sync_global_processes", meet)
    np.testing.assert_array_equal(manager.restore(1, _state(0))["w"], 1)
    restore_part(manager.directory, _state(0))
    assert met == [{0}, {0}]


def test_bad_sector_is_reported_as_damage(manager, monkeypatch, caplog):
    measure = checksums._measure

    def failing(path, *more):
        if f"{os.sep}2{os.sep}" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return measure(path, *more)

    monkeypatch.setattr(checksums, "_measure", failing)
    assert manager.restore_newest(_state(0))[0] == 1
    assert "cannot be read (Input/output error)" in caplog.text
    assert manager.steps() == [1]


@pytest.mark.parametrize("is_wrong_elsewhere", [False, True])
def test_failed_last_save_is_retried_by_all_processes(monkeypatch, is_wrong_elsewhere):
    saved = []
    monkeypatch.setattr(hooks, "agree", lambda code: int(code or is_wrong_elsewhere))
    checkpoints = types.SimpleNamespace(finish=lambda: True, latest_step=lambda: 5)
    saving = types.SimpleNamespace(saved_step=5, save=lambda step, state: saved.append(step))
    monkeypatch.setattr(hooks, "has_arrays", lambda state: True)
    save_last = inspect.unwrap(hooks.save_last)  # plain objects will do
    assert save_last("done", 5, {}, saving, checkpoints) is not is_wrong_elsewhere
    assert saved == ([5, 5] if is_wrong_elsewhere else [])
