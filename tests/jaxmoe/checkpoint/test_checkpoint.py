# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bitwise round trips over meshes, errors, full disks, killed processes."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import resource
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import (
    CheckpointError,
    CheckpointManager,
    checksums,
    load_checkpoint,
    save_checkpoint,
)
from jaxmoe.checkpoint.writing import run_to_the_end
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.state_tree import is_key
from jaxmoe.training.state import TrainState
from tests.support.meshes import mesh_named
from tests.support.models import TINY

OPTIMIZER = AdamWConfig().build(parameter_table(TINY), LinearConfig().build(10))


def _host_state(seed: int, router_state=None) -> TrainState:
    """Random numbers in every leaf, in the structure that training has."""
    rng = np.random.default_rng(seed)

    def normal():
        return parameter_table(TINY).tree(
            lambda row: jnp.asarray(rng.standard_normal(row.shape), jnp.float32)
        )

    params = normal()
    adam, *others = OPTIMIZER.init(params)
    adam = adam._replace(count=jnp.int32(seed), mu=normal(), nu=normal())
    if router_state is None:
        loads = jnp.asarray(rng.standard_normal((2, 4)), jnp.float32)
        router_state = {"loads": loads, "updates": jnp.full((2,), seed, jnp.int32)}
    return TrainState(
        step=jnp.int32(seed),
        params=params,
        opt_state=(adam, *others),
        router_state=router_state,
        rng=jax.random.key(seed),
        skipped=jnp.int32(2),
        skipped_in_a_row=jnp.int32(1),
    )


def _place(state: TrainState, mesh_name: str) -> TrainState:
    """The same state, parameters and moments fully sharded over a mesh."""
    mesh = mesh_named(mesh_name)
    # From the host: moving an array between devices compiles a program for each shape.
    state = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), state)
    whole = NamedSharding(mesh, PartitionSpec())
    spread = parameter_table(TINY).tree(lambda row: NamedSharding(mesh, row.spec))
    adam, *others = jax.device_put(state.opt_state, whole)
    adam = adam._replace(mu=jax.device_put(adam.mu, spread), nu=jax.device_put(adam.nu, spread))
    rest = jax.device_put(dataclasses.replace(state, params={}, opt_state=()), whole)
    params = jax.device_put(state.params, spread)
    return dataclasses.replace(rest, params=params, opt_state=(adam, *others))


def _assert_same(left, right):
    """Compare structure, dtypes and every bit; random keys by their data."""

    def compare(one, other):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

    jax.tree.map(compare, left, right)


def _layout(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _small(step: int, **arrays) -> dict:
    return {"w": np.full((3, 2), step, np.float32), "b": np.full((2,), step, np.int32)} | arrays


def _message(function, *arguments, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        function(*arguments, **options)
    return str(error.value)


def test_state_restores_bitwise_across_meshes(tmp_path):
    """8x1 -> 4x2 -> no mesh: the same bits, in the sharding of each target."""
    state = _host_state(7)
    save_checkpoint(tmp_path / "a", _place(state, "data8"), step=7, config=TINY)

    target = _place(_host_state(0), "data4_tensor2")
    second = load_checkpoint(tmp_path / "a", target=target)
    _assert_same(second, state)
    assert _layout(second) == _layout(target)
    save_checkpoint(tmp_path / "b", second, step=8, config=TINY)

    third = load_checkpoint(tmp_path / "b", target=_host_state(0))
    _assert_same(third, state)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(third)} == {1}

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), target
    )
    fourth = load_checkpoint(tmp_path / "b", target=shapes)
    _assert_same(fourth, state)
    assert _layout(fourth) == _layout(target)


def test_restore_without_target(tmp_path):
    """Nested dicts; empty branches are left out."""
    state = _host_state(3)
    save_checkpoint(tmp_path, state, step=1, config={})
    restored = load_checkpoint(tmp_path)
    wanted = serialization.to_state_dict(state)
    wanted["opt_state"] = {"0": wanted["opt_state"]["0"], "3": wanted["opt_state"]["3"]}
    assert wanted.pop("recent_norms") is None
    assert wanted.pop("parts") == {}
    _assert_same(restored, wanted)


@pytest.mark.parametrize("router_state", [{}, {"a": {}, "b": {"c": jnp.ones(2)}}])
def test_empty_branches_are_restored(tmp_path, router_state):
    state = _host_state(3, router_state)
    save_checkpoint(tmp_path, state, step=1, config={})
    _assert_same(load_checkpoint(tmp_path, target=_host_state(0, router_state)), state)


def test_every_dtype_is_restored(tmp_path):
    names = ("bfloat16", "float16", "float32", "int8", "int32", "uint8", "uint32", "bool")
    state = {name: jnp.asarray([0, 1, 1], name) for name in names}
    state |= {"scalar": jnp.float32(2.5), "keys": jax.random.split(jax.random.key(1), 3)}
    state |= {"nan": jnp.asarray([np.nan, np.inf, -0.0], jnp.float32)}
    save_checkpoint(tmp_path, state, step=0, config={})
    _assert_same(load_checkpoint(tmp_path), state)
    state |= {"other generator": jax.random.key(5, impl="rbg")}
    save_checkpoint(tmp_path, state, step=1, config={})
    _assert_same(load_checkpoint(tmp_path, target=state), state)


def test_manifest_describes_the_saved_state(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(4, _small(4), config={"a": 1}, data={"epoch": 2})
    assert manager.finish()
    manifest = manager.manifest(4)
    assert (manifest.step, manifest.config, manifest.data) == (4, {"a": 1}, {"epoch": 2})
    assert manifest.arrays == {
        "b": {"shape": [2], "dtype": "int32"},
        "w": {"shape": [3, 2], "dtype": "float32"},
    }
    assert manifest.versions["jax"] == jax.__version__
    manager.close()


def test_state_may_be_donated_after_save_returns(tmp_path):
    """The step donates its state while the save is still being written."""
    manager = CheckpointManager(tmp_path)
    state = {"w": jnp.full((1 << 20,), 1.0)}
    manager.save(1, state, config={})
    add = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for _ in range(5):
        state = add(state)
    manager.close()
    assert (np.asarray(load_checkpoint(tmp_path)["w"]) == 1.0).all()


def test_restore_to_another_state_lists_all_differences(tmp_path):
    save_checkpoint(tmp_path, _small(1, old=np.ones(2, np.float32)), step=1, config={})
    target = {
        "w": jnp.zeros((3, 4)),
        "b": jnp.zeros((2,), jnp.bfloat16),
        "old_": jnp.zeros(2),
        "else": jnp.zeros(1),
    }
    assert _message(load_checkpoint, tmp_path, target=target) == (
        f"{tmp_path}/1 holds another state than the target (5 arrays differ):\n"
        "  b: saved int32[2], wanted bfloat16[2]"
        " (cast only by restore_part with is_cast_allowed)\n"
        "  else: not in the checkpoint\n"
        "  old: in the checkpoint, not in the target\n"
        "  old_: not in the checkpoint (it has old)\n"
        "  w: saved float32[3,2], wanted float32[3,4]\n"
        "restore it with the model and optimizer it was saved with, or a part of it, or under other"
        " names (jaxmoe.checkpoint.restore.restore_part)"
    )
    message = _message(load_checkpoint, tmp_path, target={f"n{i}": jnp.ones(1) for i in range(30)})
    assert "(33 arrays differ)" in message and "  ...\n" in message
    assert len(message.splitlines()) == 23, "a long list is cut"


def test_missing_steps_are_refused(tmp_path):
    assert _message(load_checkpoint, tmp_path / "none") == (
        f"{tmp_path}/none holds no checkpoints: the directory does not exist"
    )
    assert not (tmp_path / "none").exists()
    assert _message(load_checkpoint, tmp_path) == f"{tmp_path} holds no checkpoints"
    for step in (3, 11):
        save_checkpoint(tmp_path, _small(step), step=step, config={})
    assert _message(load_checkpoint, tmp_path, step=4) == (
        f"{tmp_path} has no checkpoint of step 4 (has: 3, 11)"
    )
    np.testing.assert_array_equal(load_checkpoint(tmp_path)["w"], _small(11)["w"])
    np.testing.assert_array_equal(load_checkpoint(tmp_path, step=3)["w"], _small(3)["w"])


def test_existing_step_is_never_overwritten(tmp_path, caplog):
    save_checkpoint(tmp_path, _small(1), step=3, config={})
    assert _message(save_checkpoint, tmp_path, _small(2), step=3, config={}) == (
        f"{tmp_path} already has a checkpoint of step 3"
    )
    manager = CheckpointManager(tmp_path)
    assert manager.save(3, _small(2), config={}), "a run may ask twice, at its last step"
    state = _small(4, large=np.ones(1 << 23, np.float32))
    assert manager.save(4, state, config={}) and manager.save(4, state, config={})
    manager.close()
    assert not caplog.records and manager.steps() == [3, 4]
    np.testing.assert_array_equal(load_checkpoint(tmp_path, step=3)["w"], 1)


@pytest.mark.parametrize("name", ["a/b", "a.b", ""])
def test_ambiguous_names_are_refused(tmp_path, name):
    state = {"outer": {name: jnp.ones(1)}}
    text = f"the name {name!r} in ('outer', {name!r}) cannot be saved: names must not be empty, nor"
    with pytest.raises(ValueError) as error:
        save_checkpoint(tmp_path, state, step=1, config={})
    assert str(error.value) == f"{text} hold '/' or '.'"
    with pytest.raises(ValueError, match="a tree of named arrays, not a single array"):
        save_checkpoint(tmp_path, jnp.ones(1), step=1, config={})
    assert CheckpointManager(tmp_path, is_writer=False).steps() == []


def test_old_steps_are_deleted(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for step in range(1, 6):
        assert manager.save(step, _small(step), config={})
    assert manager.finish() and manager.steps() == [4, 5] and manager.latest_step() == 5
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]
    with pytest.raises(ValueError, match="keep=1 must be at least 2: the last may be"):
        CheckpointManager(tmp_path, keep=1)


def _edit_manifest(directory, **changes):
    path = directory / "manifest" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    checksums.write_list(directory)


def test_kept_steps_are_listed_once_by_a_restore(tmp_path, monkeypatch):
    """A list reads a file of every step, a thousandth of a second each."""
    state = {"w": jnp.arange(3.0)}
    for step in range(1, 4):
        save_checkpoint(tmp_path, state, step=step, config={})
    lists = []
    real = CheckpointManager.steps
    monkeypatch.setattr(CheckpointManager, "steps", lambda self: lists.append(1) or real(self))
    manager = CheckpointManager(tmp_path, is_writer=False)
    restored = manager.restore_newest(state)
    manager.close()
    assert restored is not None and restored[0] == 3 and len(lists) == 1


def test_newer_schema_is_refused(tmp_path):
    save_checkpoint(tmp_path, _small(1), step=1, config={})
    _edit_manifest(tmp_path / "1", schema=99)
    assert _message(load_checkpoint, tmp_path) == (
        f"{tmp_path}/1 has schema 99, this jaxmoe knows 3: install a newer jaxmoe"
    )
    _edit_manifest(tmp_path / "1", schema=None)
    assert _message(load_checkpoint, tmp_path) == (
        f"{tmp_path}/1 has no jaxmoe manifest: it was written by another tool"
    )


# Full disks. The run goes on, says so, and saves again when there is room.


@pytest.fixture
def manager(tmp_path, caplog):
    """Manager with steps 0 and 1, which keeps two steps."""
    caplog.set_level(logging.WARNING)
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (0, 1):
        manager.save(step, _small(step), config={})
    assert manager.finish()
    yield manager
    manager.close()


def _assert_goes_on(manager, directory):
    assert manager.steps() == [0, 1], "a failed save costs no older step"
    for step in (0, 1):
        np.testing.assert_array_equal(load_checkpoint(directory, step=step)["w"], step)
    # As a write of the failed save does that ends late.
    (directory / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True, exist_ok=True)
    assert manager.save(3, _small(3), config={}) and manager.finish()
    assert manager.steps() == [1, 3]
    np.testing.assert_array_equal(load_checkpoint(directory)["w"], 3)
    assert sorted(path.name for path in directory.iterdir()) == ["1", "3"]


def _nearly_full(path):
    return types.SimpleNamespace(free=1_000_000)


def _out_of_order(path):
    raise OSError  # without words


@pytest.mark.parametrize(
    ("disk_usage", "reason"),
    [(_nearly_full, "1.0 MB are free, about 4.8 MB are needed"), (_out_of_order, "OSError")],
)
def test_too_little_space_is_detected_before_writing(
    tmp_path, manager, caplog, monkeypatch, disk_usage, reason
):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", disk_usage)
        state = {"w": np.ones(1_000_000, np.float32)}
        assert not manager.save(2, state, config={})
        text = f"the checkpoint of step 2 was not saved, the run goes on: {reason}"
        assert [record.getMessage() for record in caplog.records] == [text]
        text = f"the checkpoint of step 2 was not saved in {tmp_path}"
        assert _message(save_checkpoint, tmp_path, state, step=2, config={}) == text
    _assert_goes_on(manager, tmp_path)


@contextlib.contextmanager
def _no_file_above(size: int):
    """The system refuses larger files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_that_fills_up_while_saving(tmp_path, manager, caplog):
    rng = np.random.default_rng(0)  # noise, which no compression makes small
    state = {f"w{i}": rng.standard_normal(100_000).astype(np.float32) for i in range(4)}
    with _no_file_above(50_000):
        is_saved = manager.save(2, state, config={}) and manager.finish()
    assert not is_saved
    assert "was not saved, the run goes on: " in caplog.text
    _assert_goes_on(manager, tmp_path)
    gc.collect()


def test_failed_writes_print_nothing_beside_the_warning(tmp_path, manager, monkeypatch, caplog):
    """All writes end before Orbax closes their event loop, which they would report to."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(str(found.exc_value)))
    rng = np.random.default_rng(0)
    state = {f"w{i}": rng.standard_normal(400_000, np.float32) for i in range(6)}
    state = jax.tree.map(jnp.asarray, state)
    with _no_file_above(50_000):
        for step in (2, 3):
            for is_lazy in (False, True):
                manager.save(step, state, config={}, is_lazy=is_lazy)
                assert not manager.finish()
    gc.collect()
    text = "was not saved, the run goes on"
    assert sum(text in record.getMessage() for record in caplog.records) == 4
    assert printed == []
    _assert_goes_on(manager, tmp_path)


def test_an_event_loop_is_closed_when_all_its_tasks_have_ended():
    ended = []

    async def write(number):
        await asyncio.sleep(0.01 * number)
        ended.append(number)
        raise OSError(number)

    async def save():
        await asyncio.gather(*map(write, range(4)))

    with pytest.raises(OSError, match="^0$"):
        run_to_the_end(save())
    assert ended == [0, 1, 2, 3]


def test_background_failure_is_returned_by_the_next_save(tmp_path, manager, caplog):
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(400_000).astype(np.float32)}
    with _no_file_above(50_000):
        results = [manager.save(2, state, config={}), manager.save(4, _small(4), config={})]
    assert False in results
    assert manager.finish() and manager.steps() == [1, 4]
    gc.collect()
