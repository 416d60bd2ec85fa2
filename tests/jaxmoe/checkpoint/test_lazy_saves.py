# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lazy saves hold the same bits as blocking ones, whatever the next step does to the state."""

import contextlib
import json
import logging
import resource
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointManager, capture, load_checkpoint, writing
from jaxmoe.fingerprints import ReplicasDifferError
from jaxmoe.state_tree import pack
from tests.support.meshes import mesh_named
from tests.support.runs import ROOT


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "cut": rng.standard_normal((8, 16), np.float32),
        "whole": rng.standard_normal((4,), np.float32),
        "moments": rng.standard_normal((6, 8)).astype(jnp.bfloat16),
        "count": np.int32(3),
    }


def _state(mesh_name: str | None) -> dict[str, jax.Array]:
    """Arrays cut over a mesh, replicated, and a random key; on one device without a mesh."""
    values = _values() | {"key": jax.random.key(7)}
    if mesh_name is None:
        return {name: jnp.asarray(value) for name, value in values.items()}
    specs = {"cut": PartitionSpec("data", "tensor"), "moments": PartitionSpec(None, "tensor")}
    mesh = mesh_named(mesh_name)
    return {
        name: jax.device_put(value, NamedSharding(mesh, specs.get(name, PartitionSpec())))
        for name, value in values.items()
    }


def _assert_holds(directory, step):
    restored = load_checkpoint(directory, step=step)
    for name, value in _values().items():
        assert np.asarray(restored[name]).tobytes() == value.tobytes(), name


@contextlib.contextmanager
def _held_back(monkeypatch):
    """Keep lazy saves waiting before their first read of the copy."""
    begin, may_go = writing.begin_fingerprints, threading.Event()

    def wait(state):
        assert may_go.wait(60)
        return begin(state)

    with monkeypatch.context() as patched:
        patched.setattr(writing, "begin_fingerprints", wait)
        try:
            yield
        finally:
            may_go.set()


def _overwrite(state):
    """Donate a state to a step that changes every element, and wait for it."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    return jax.block_until_ready(step({k: x for k, x in state.items() if k != "key"}))


@pytest.mark.parametrize("mesh_name", [None, "data4_tensor2"])
def test_lazy_and_blocking_saves_are_the_same_checkpoint(tmp_path, mesh_name):
    state, texts = _state(mesh_name), []
    for is_lazy in (False, True):
        manager = CheckpointManager(tmp_path / str(is_lazy))
        assert manager.save(1, state, config={"a": 1}, data={"b": 2}, is_lazy=is_lazy)
        assert manager.finish()
        manager.close()
        step = tmp_path / str(is_lazy) / "1"
        _assert_holds(step.parent, 1)
        whole = json.loads((step / "state" / "_METADATA").read_text())
        texts.append(
            (
                json.loads((step / "manifest" / "metadata").read_text()),
                whole,
                json.loads((step / "state" / "_sharding").read_text()),
            )
        )
    assert texts[0] == texts[1]
    assert len(texts[0][0]["fingerprints"]) == len(state)


@pytest.mark.parametrize("mesh_name", [None, "data4_tensor2"])
def test_a_step_after_the_capture_cannot_alter_what_is_written(tmp_path, monkeypatch, mesh_name):
    """The step that donates the state ends before the save has read anything."""
    manager, state = CheckpointManager(tmp_path), _state(mesh_name)
    state["host"] = np.arange(5.0)
    with _held_back(monkeypatch):
        assert manager.save(1, state, config={}, is_lazy=True)
        after = _overwrite({k: x for k, x in state.items() if k != "host"})
        state["host"][:] = 0
        assert state["cut"].is_deleted() and np.asarray(after["cut"])[0, 0] == -1
        assert manager.is_saving() and manager.steps() == []
    assert manager.finish() and not manager.is_saving()
    manager.close()
    _assert_holds(tmp_path, 1)
    np.testing.assert_array_equal(load_checkpoint(tmp_path, step=1)["host"], np.arange(5.0))


def test_a_capture_by_reference_would_be_noticed(tmp_path, monkeypatch, caplog):
    """What the test above would find if the copy were none."""
    monkeypatch.setattr(writing, "copy_state", lambda state: state)
    manager, state = CheckpointManager(tmp_path), _state(None)
    with _held_back(monkeypatch):
        assert manager.save(1, state, config={}, is_lazy=True)
        _overwrite(state)
    assert not manager.finish() and "deleted" in caplog.text
    manager.close()


def test_copies_have_their_own_memory_and_the_same_places():
    for mesh_name in (None, "data4_tensor2"):
        state = pack(_state(mesh_name))
        copies = capture.copy_state(state)
        for name, array in state.items():
            assert copies[name].sharding == array.sharding
            for one, other in zip(
                array.addressable_shards, copies[name].addressable_shards, strict=True
            ):
                pointers = [x.data.unsafe_buffer_pointer() for x in (one, other)]
                assert pointers[0] != pointers[1]


def _flip_a_bit(array: jax.Array) -> jax.Array:
    """Return a replicated array with one bit flipped on device 5."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        data.view(np.uint32)[0] ^= shard.device.id == 5
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def test_replicas_that_differ_end_the_run_at_the_next_save(tmp_path, caplog):
    manager, state = CheckpointManager(tmp_path), _state("data4_tensor2")
    assert manager.save(1, state, config={}, is_lazy=True) and manager.finish()
    odd = state | {"whole": _flip_a_bit(state["whole"])}
    assert manager.save(2, odd, config={}, is_lazy=True)
    assert not manager.finish() and manager.is_owed()
    assert "device 5: holds other bits than its replicas" in caplog.text
    for _ in range(2):
        with pytest.raises(ReplicasDifferError, match="^device 5: holds other bits"):
            manager.save(3, state, config={}, is_lazy=True)
    assert manager.steps() == [1]
    manager.close()


def test_a_lazy_save_that_fails_is_owed(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "jaxmoe")
    manager = CheckpointManager(tmp_path)
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 17, np.float32))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, hard))
    try:
        assert manager.save(1, state, config={}, is_lazy=True), "it is not known yet"
        assert not manager.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.is_owed() and manager.failures == 1 and manager.steps() == []
    assert "the checkpoint of step 1 was not saved, the run goes on" in caplog.text
    assert manager.save(1, state, config={}, is_lazy=True) and manager.finish()
    assert not manager.is_owed() and manager.steps() == [1]
    manager.close()


def test_without_memory_for_a_second_state_a_save_is_written(tmp_path, monkeypatch, caplog):
    """It is one warning, and the same checkpoint; no writer keeps memory that a step donates."""
    stats = {"bytes_limit": 2000, "peak_bytes_in_use": 1990}
    monkeypatch.setattr(capture, "_stats", lambda device: stats)
    manager, state = CheckpointManager(tmp_path), _state("data4_tensor2")
    copies = []
    monkeypatch.setattr(writing, "copy_state", copies.append)
    for step, is_lazy in ((1, True), (2, True), (3, False)):
        assert manager.save(step, state, config={}, is_lazy=is_lazy) and not manager.is_saving()
        _assert_holds(tmp_path, step)
    manager.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert copies == [] and message == (
        "saves wait until the state is written: 0.0 MB of device memory are free at the peak of"
        " a step, and a copy of the state needs 0.0 MB"
    )
    stats["bytes_limit"] = 10_000
    assert capture.reason_against(pack(state)) == ""


def test_memory_of_a_save_is_returned_once_when_it_has_ended(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(writing, "return_memory", lambda: calls.append(1))
    manager, state = CheckpointManager(tmp_path), {"x": jnp.arange(8.0)}
    for step in (1, 2):
        assert manager.save(step, state, config={}, is_lazy=step == 1)
    assert len(calls) == 1, "of the first"
    assert manager.finish() and manager.finish() and len(calls) == 2
    manager.close()
    assert len(calls) == 2


def test_arrays_of_a_cpu_are_not_copied_where_the_host_is_full(monkeypatch):
    state = {"x": jnp.zeros(1000, jnp.float32)}
    for left, reason in (
        (4000, ""),
        (None, ""),
        (
            3000,
            "0.0 MB of host memory are free at the peak of a step, and a copy of the state needs"
            " 0.0 MB",
        ),
    ):
        monkeypatch.setattr(capture, "memory_left", lambda left=left: left)
        assert capture.reason_against(state) == reason


def test_arrays_in_host_memory_are_not_copied():
    (device,) = jax.devices()[:1]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = min(kinds - {device.default_memory().kind})
    placed = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    array = jax.device_put(np.ones(3, np.float32), placed)
    assert capture.reason_against({"x": array}) == f"arrays are in {kind} memory"


_KILLED = """
import os, signal, sys, threading
import jax, jax.numpy as jnp
from jaxmoe.checkpoint import CheckpointManager, writing
manager = CheckpointManager(sys.argv[1])
assert manager.save(1, {"w": jnp.arange(8.0)}, config={}, is_lazy=True) and manager.finish()
reached, give = threading.Event(), manager._writer._give
def hold(*given):
    if sys.argv[2] == "writing":
        give(*given)
    reached.set()
    threading.Event().wait()
manager._writer._give = hold
assert manager.save(2, {"w": jnp.arange(8.0) + 1}, config={}, is_lazy=True)
assert reached.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["copying", "writing"])
def test_kill_during_a_lazy_save_leaves_the_previous_checkpoint(tmp_path, where):
    ended = subprocess.run([sys.executable, "-c", _KILLED, tmp_path, where], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    manager = CheckpointManager(tmp_path)
    newest = manager.steps()[-1]
    assert newest == 1 or where == "writing", "it may have been committed just before"
    np.testing.assert_array_equal(manager.restore(newest, None)["w"], np.arange(8.0) + newest - 1)
    assert manager.restore(1, None)["w"][0] == 0
    manager.close()
