# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Damage in finished checkpoints: never silent, and the step before it is taken instead.

To add a kind of damage: a function in DAMAGE of tests/support/damage.py.
"""

import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    checksums,
    load_checkpoint,
    save_checkpoint,
)
from jaxmoe.fingerprints import fingerprints, shard_fingerprints
from tests.support.damage import DAMAGE, flip
from tests.support.meshes import mesh_named


def _state(seed):
    rng = np.random.default_rng(seed)
    arrays = {f"w{i}": rng.standard_normal((64, 32)).astype(np.float32) for i in range(6)}
    return arrays | {"step": np.int32(seed), "key": jax.random.key(seed)}


def _bits(tree):
    flat = dict(sorted(tree.items()))
    words = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in (flat[name] for name in flat)
    )
    return b"".join(np.asarray(x).tobytes() for x in words)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save_checkpoint(directory, _state(step), step=step, config={})
    return directory


def _targets():
    mesh = mesh_named("data8")

    def place(x):
        spec = PartitionSpec("data") if x.ndim == 2 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return [_state(0), jax.tree.map(place, _state(0))]


@pytest.mark.parametrize("content", [b"\xb2{}", b"{", b"", b"\x00" * 99], ids=repr)
def test_a_list_of_readers_that_is_no_text_is_damage_of_its_step(saved, tmp_path, content):
    """Orbax reads it of all steps at once, and a start must not end there."""
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    (copy / "2" / "_CHECKPOINT_METADATA").write_bytes(content)
    manager = CheckpointManager(copy)
    step, state = manager.restore_newest(_state(0))
    manager.close()
    assert step == 1 and _bits(state) == _bits(_state(1))


@pytest.mark.slow
@pytest.mark.trains
def test_no_damage_is_silent(saved, tmp_path, caplog):
    """200 faults, restored to two meshes in turn: always bits that were saved."""
    caplog.set_level(logging.WARNING, "jaxmoe")
    rng, targets = np.random.default_rng(0), _targets()
    wanted = {step: _bits(_state(step)) for step in (1, 2)}
    fell_back = 0
    for trial in range(200):
        copy = tmp_path / str(trial)
        shutil.copytree(saved, copy)
        files = sorted(p for p in (copy / "2").rglob("*") if p.is_file())
        sizes = np.asarray([p.stat().st_size for p in files], float)
        odds = sizes / sizes.sum() if trial % 2 else None
        path = files[rng.choice(np.flatnonzero(sizes), p=odds)]
        before = {p: p.read_bytes() for p in files}
        kind = DAMAGE[trial % len(DAMAGE)]
        kind(path, rng)
        is_whole = all(p.exists() and p.read_bytes() == data for p, data in before.items())
        caplog.clear()
        manager = CheckpointManager(copy)
        step, state = manager.restore_newest(targets[trial % 2])
        manager.close()
        assert _bits(state) == wanted[step], f"{kind.__name__} of {path}: silent damage"
        if step == 1:
            fell_back += 1
            assert not is_whole
            assert f"{copy}/2 is damaged: " in caplog.text
            assert str(path.relative_to(copy / "2")) in caplog.text
            assert len(caplog.text.splitlines()) < 30
            assert (copy / "damaged" / "2").is_dir() and not (copy / "2").exists()
        shutil.rmtree(copy)
    assert fell_back > 100


def _edit_manifest(step, change):
    """Leave complete files with other arrays, as a device that computed wrongly would."""
    path = step / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    checksums.write_list(step)


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_damage_before_the_files_were_written(copy):
    """Only the fingerprints can find data that changed between device and file."""
    _edit_manifest(copy / "2", lambda m: m["fingerprints"].update(w3="0" * 16, w1="1" * 16))
    text = f"{copy}/2 is damaged: 2 of 8 arrays have changed since they were saved: w1, w3"
    with pytest.raises(CheckpointDamagedError) as error:
        load_checkpoint(copy, step=2)
    assert str(error.value) == text
    for verify in ("files", "off"):
        assert _bits(load_checkpoint(copy, step=2, verify=verify)) == _bits(_state(2))
    assert _bits(load_checkpoint(copy)) == _bits(_state(1)), "the step before it"
    assert (copy / "2").is_dir(), "who reads leaves it where it is"


def test_a_damaged_file_is_named(copy, caplog):
    caplog.set_level(logging.WARNING, "jaxmoe")
    rng = np.random.default_rng(0)
    files = [p for p in (copy / "2" / "state").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    name, size = largest.relative_to(copy / "2"), largest.stat().st_size
    flip(largest, rng)
    text = f"{copy}/2 is damaged: {name}: its content has changed ({size} bytes)"
    manager = CheckpointManager(copy)
    assert manager.damage(2) == [f"{name}: its content has changed ({size} bytes)"]
    with pytest.raises(CheckpointDamagedError) as error:
        manager.restore_newest(_state(0), is_strict=True)
    assert str(error.value) == text and manager.steps() == [1, 2]
    step, state = manager.restore_newest(_state(0))
    assert (step, _bits(state)) == (1, _bits(_state(1)))
    assert f"{text}; the step before it is used" in caplog.text
    assert manager.steps() == [1] and manager.save(2, _state(5), config={}) and manager.finish()
    assert _bits(load_checkpoint(copy)) == _bits(_state(5)), "the step is written anew"
    manager.close()


def test_nothing_whole_is_left(copy):
    for step in ("1", "2"):
        os.truncate(copy / step / "manifest" / "metadata", 3)
    manager = CheckpointManager(copy)
    with pytest.raises(CheckpointError, match=r"all steps are damaged \(1, 2\): start"):
        manager.restore_newest(_state(0))
    manager.close()
    assert sorted(p.name for p in (copy / "damaged").iterdir()) == ["1", "2"]


def test_a_directory_with_the_number_of_another_step_is_damaged(copy):
    """Renamed, or exchanged with another: each file is whole, and the number is wrong."""
    manager = CheckpointManager(copy, is_writer=False)
    (copy / "2").rename(copy / "3")
    line = "manifest: of step 2, in the directory of step 3: renamed or exchanged"
    assert manager.damage(3) == [line] and manager.damage(1) == []
    with pytest.raises(CheckpointDamagedError, match=f"{copy}/3 is damaged: {line}"):
        load_checkpoint(copy, step=3, verify="off")
    step, state = manager.restore_newest(_state(0))
    assert (step, _bits(state)) == (1, _bits(_state(1)))
    (copy / "1").rename(copy / "2")
    (copy / "3").rename(copy / "1")
    with pytest.raises(CheckpointError, match=r"all steps are damaged \(1, 2\)"):
        manager.restore_newest(_state(0))
    manager.close()


def test_links_are_refused(copy, tmp_path):
    """A link could name any file of the machine."""
    file = next(p for p in (copy / "2" / "state").rglob("*") if p.is_file())
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    name = file.relative_to(copy / "2")
    with pytest.raises(
        CheckpointDamagedError, match=f"{name}: a link, which checkpoints do not contain"
    ):
        load_checkpoint(copy, step=2)


def test_a_checkpoint_without_its_list_or_its_fingerprints_is_damaged(copy):
    _edit_manifest(copy / "2", lambda m: (m.update(schema=1), m.pop("fingerprints")))
    (copy / "2" / "files.json").unlink()
    with pytest.raises(CheckpointDamagedError, match="files.json: missing"):
        load_checkpoint(copy, step=2)
    checksums.write_list(copy / "2")
    with pytest.raises(CheckpointDamagedError, match="2 is damaged: 8 of 8 arrays have changed"):
        load_checkpoint(copy, step=2)


def test_orbax_alone_would_not_notice(tmp_path):
    """The test of the tests: the same flips are silent without checksums and fingerprints."""
    rng, silent = np.random.default_rng(1), 0
    state = {name: x for name, x in _state(1).items() if name.startswith("w")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        for trial in range(10):
            copy = tmp_path / str(trial)
            shutil.copytree(tmp_path / "saved", copy)
            flip(max(copy.rglob("d/*"), key=lambda p: p.stat().st_size), rng)
            try:
                silent += _bits(checkpointer.restore(copy, state)) != _bits(state)
            except ValueError:  # the flip has hit the few bytes that say how the rest is packed
                continue
    assert silent >= 8


MESHES = ("data8", "data4_tensor2")


@pytest.mark.parametrize("mesh_name", MESHES)
def test_fingerprints_are_the_same_on_any_mesh(mesh_name):
    rng, mesh = np.random.default_rng(0), mesh_named(mesh_name)
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    state = {
        "matrix": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
        "both": jnp.asarray(rng.standard_normal((8, 3)), jnp.bfloat16),
        "codes": jnp.arange(-8, 8).astype(jnp.int4),
        "tiny": jnp.asarray(rng.standard_normal((8,)), jnp.float8_e4m3fn),
        "flags": jnp.asarray([True, False]),
        "count": jnp.int32(7),
        "key": jax.random.key(3),
    }
    specs = {"matrix": PartitionSpec(*axes[:2]), "both": PartitionSpec(tuple(axes))}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, PartitionSpec())))
        for name, x in state.items()
    }
    assert fingerprints(placed) == fingerprints(state)
    assert len(set(fingerprints(state).values())) == len(state)


def test_fingerprints_of_what_is_kept_in_the_memory_of_the_host():
    """As the optimiser's state with execution.offload.optimizer=host."""
    mesh, array = mesh_named("data8"), jnp.arange(64.0).reshape(8, 8)
    place = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    offloaded = {"x": jax.device_put(array, place), "count": jnp.int32(3)}
    assert fingerprints(offloaded) == fingerprints({"x": array, "count": jnp.int32(3)})


def test_an_empty_array_has_a_fingerprint():
    """Beside others on a mesh, where jax 0.11 crashed."""
    mesh = mesh_named("data8")
    state = {"none": jnp.zeros((0, 3)), "some": jnp.ones((8, 3))}
    specs = {"none": PartitionSpec(), "some": PartitionSpec("data")}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in state.items()
    }
    assert fingerprints(placed) == fingerprints(state)


def test_any_flipped_bit_changes_the_fingerprint():
    rng = np.random.default_rng(0)
    array = rng.standard_normal((16, 16)).astype(np.float32)
    before = fingerprints({"x": jnp.asarray(array)})["x"]
    for _ in range(64):
        flipped = array.copy()
        place = tuple(rng.integers(16, size=2))
        flipped.view(np.uint32)[place] ^= np.uint32(1 << int(rng.integers(32)))
        assert fingerprints({"x": jnp.asarray(flipped)})["x"] != before
    turned = fingerprints({"x": jnp.asarray(array.T.copy())})["x"]
    assert turned != before, "the same numbers at other places"


def test_a_replica_that_differs_is_found_with_its_device():
    mesh = mesh_named("data8")
    whole = NamedSharding(mesh, PartitionSpec())
    array = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    copies = [jax.device_put(array, device) for device in mesh.devices.flat]
    wrong = array.copy()
    wrong.view(np.uint32)[1, 2] ^= 1
    copies[5] = jax.device_put(wrong, mesh.devices.flat[5])
    replicas = jax.make_array_from_single_device_arrays(array.shape, whole, copies)
    shards = shard_fingerprints({"x": replicas})["x"]
    usual = shards[0].value
    odd = [shard.device for shard in shards if shard.value != usual]
    assert odd == [mesh.devices.flat[5].id]
