# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots in memory: the part of a lost host is rebuilt from the others, without checkpoints."""

import dataclasses
import itertools
import json
import logging
import shlex
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.cli import flags as cli
from experiments.cli.flags import ExitCode
from experiments.launch import __main__ as launch
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.checkpoint import CheckpointManager, checksums
from jaxmoe.contrib.elastic.move import move_state, move_through_hosts
from jaxmoe.contrib.survival.pieces import num_words, pack_words, pieces_of, place_words
from jaxmoe.contrib.survival.snapshot_store import SnapshotStore
from jaxmoe.contrib.survival.snapshots import Snapshots, open_snapshots
from jaxmoe.data import DataError, SkippedRows
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.run.assemble import assemble
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.restore import Continuation
from jaxmoe.run.supervision import library_supervision
from sharding import MeshConfig, make_mesh
from tests.support.runs import ROOT, flags, logged_losses, saved_leaves

CONFIG = {"model": "small"}


def _state(seed=0, data=4, tensor=2, shape=(16, 6)):
    """Arrays sharded over all, some and no devices, of every element width, and a key."""
    devices = jax.devices()[: data * tensor]
    key, mesh = jax.random.key(seed), make_mesh(MeshConfig(data=data, tensor=tensor), devices)
    bits = jax.random.bits(key, shape, jnp.uint32)
    arrays = {
        "cut": (bits.view(jnp.float32), PartitionSpec("data", "tensor")),
        "pieces": (bits[:, :5].astype(jnp.uint8), PartitionSpec("data")),
        "half": (bits.astype(jnp.bfloat16), PartitionSpec(("data", "tensor"))),
        "flags": (bits[:7, 0] % 2 == 0, PartitionSpec()),
        "step": (jnp.int32(seed), PartitionSpec()),
        "key": (jax.random.key(seed + 1), PartitionSpec()),
    }
    return {n: jax.device_put(a, NamedSharding(mesh, spec)) for n, (a, spec) in arrays.items()}


def _is_same(found, wanted):
    def check(one, other):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

    jax.tree.map(check, found, wanted)


def _store(directory, run="run", processes=4):
    """One process that stands for several with two devices each."""
    own = {process: directory / f"process{process}" for process in range(processes)}
    per_process = jax.device_count() // processes
    last = processes - 1  # has the devices that are left, where their number does not divide
    process_of = lambda device: min(device.id // per_process, last)  # noqa: E731
    return SnapshotStore(own, run=run, process_of=process_of)


def _save(store, *steps):
    for step in steps:
        store.save(step, _state(step), config=CONFIG, data={"step": step})
    store.finish()


def _restore(store, **given):
    found = store.restore_newest(_state(), **given)
    assert found is not None
    return found


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_each_part_is_packed_once(processes):
    state = _state()
    devices = np.asarray(jax.devices()).reshape(processes, -1).tolist()
    pieces = pieces_of(state, devices)
    for own in pieces:
        assert len({(piece.path, piece.index) for piece in own}) == len(own)
        assert all(before.stop == after.start for before, after in itertools.pairwise(own))
    everywhere = 8 + 4 + 8  # bytes of flags (whole words), step, key
    cut = 16 * 6 * 4 + 16 * 5 * (2 if processes == 8 else 1) + 16 * 6 * 2
    assert 4 * sum(map(num_words, pieces)) == cut + processes * everywhere
    words = [pack_words(state, own, num_words(own) + 3) for own in pieces]
    _is_same(place_words(zip(pieces, words, strict=True), _state(1)), state)


@pytest.mark.parametrize("lost", [None, 0, 1, 2, 3])
def test_lost_host_is_rebuilt_from_parity(tmp_path, lost):
    _save(_store(tmp_path), 3, 6, 9)
    assert sorted(path.name for path in (tmp_path / "process1").iterdir()) == ["6", "9"]
    if lost is not None:
        shutil.rmtree(tmp_path / f"process{lost}")
    found = _restore(_store(tmp_path))
    assert (found.step, found.rebuilt) == (9, lost)
    _is_same(found.state, _state(9))
    how = "" if lost is None else f" (process {lost} rebuilt from parity)"
    assert found.words == f"step 9 from snapshots in memory{how}"
    # What was rebuilt is there again, so that the next loss finds all of it.
    other = ((lost or 0) + 1) % 4
    shutil.rmtree(tmp_path / f"process{other}")
    again = _restore(_store(tmp_path))
    assert again.rebuilt == other
    _is_same(again.state, _state(9))


# Processes and mesh that saved, those that restore, and the saved part that each of these finds.
MOVES = {
    "another mesh": ((4, 4, 2), (4, 8, 1), (0, 1, 2, 3)),
    "another mesh, one lost": ((4, 4, 2), (4, 2, 4), (0, 1, None, 3)),
    "four to three": ((4, 4, 2), (3, 3, 2), (0, 1, 2)),
    "four to three, the first lost": ((4, 4, 2), (3, 6, 1), (1, 2, 3)),
    "four to three, in another order": ((4, 8, 1), (3, 2, 3), (3, 0, 2)),
    "two to four": ((2, 4, 2), (4, 8, 1), (0, 1, None, None)),
    "two to four, one lost": ((2, 8, 1), (4, 4, 2), (None, 1, None, None)),
    "one to two": ((1, 2, 4), (2, 4, 2), (0, None)),
    "two to one, one lost": ((2, 4, 2), (1, 1, 4), (1,)),
}


def _moved(tmp_path, name):
    """The state that another layout finds, and the state that was saved."""
    (saved, *mesh), (processes, *other), parts = MOVES[name]
    store, wide = _store(tmp_path / "saved", processes=saved), {"shape": (48, 12)}
    for step in (3, 6):
        state = _state(step, *mesh, **wide)
        store.save(step, state, config=CONFIG, data={"step": step})
    store.finish()
    for process, part in enumerate(parts):
        if part is not None:
            shutil.copytree(
                tmp_path / "saved" / f"process{part}", tmp_path / "found" / f"process{process}"
            )
    found = _store(tmp_path / "found", processes=processes).restore_newest(
        _state(0, *other, **wide)
    )
    return found, _state(6, *other, **wide)


@pytest.mark.parametrize("name", MOVES)
def test_snapshots_restore_on_another_mesh_or_other_processes(tmp_path, name):
    """Arrays are bit-equal; a lost part is rebuilt from the parity of those that saved."""
    (saved, *_), _, parts = MOVES[name]
    lost = next((part for part in range(saved) if part not in parts), None)
    found, wanted = _moved(tmp_path, name)
    assert (found.step, found.rebuilt, found.saved_by) == (6, lost, saved)
    _is_same(found.state, wanted)
    assert f"step 6 from snapshots in memory of {saved} processes on another mesh" in found.words


@pytest.mark.parametrize("move", [move_state, move_through_hosts])
def test_a_state_moves_between_meshes_bit_for_bit(move):
    """Eight devices of two processes; then six of them, three of each; without storage."""
    wide, chosen = {"shape": (48, 12)}, [0, 1, 2, 4, 5, 6]
    state, target = _state(5, 4, 2, **wide), _state(0, 3, 2, **wide)
    mesh = make_mesh(MeshConfig(data=3, tensor=2), [jax.devices()[i] for i in chosen])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)
        ),
        target,
    )
    wanted = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), state, target)
    given = [lambda device: device.id // 4] if move is move_through_hosts else []
    _is_same(move(jax.tree.leaves(state), target, *given), wanted)


def test_two_lost_parts_are_not_restored_on_another_mesh(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(MOVES, "too many lost", ((4, 4, 2), (2, 4, 1), (0, 3)))
    found, _ = _moved(tmp_path, "too many lost")
    assert found is None
    assert "step 6: 2 of 4 processes (1, 2) have lost their snapshots" in caplog.text


@pytest.mark.parametrize("file", ["words.npy", "parity.npy", "manifest.json", "files.json"])
def test_damaged_snapshot_counts_as_lost(tmp_path, caplog, file):
    _save(_store(tmp_path), 3)
    path = tmp_path / "process2" / "3" / file
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    found = _restore(_store(tmp_path))
    assert (found.step, found.rebuilt) == (3, 2)
    _is_same(found.state, _state(3))
    assert f"the snapshot {path.parent} is not used: files.json: the list" in caplog.text or (
        f"the snapshot {path.parent} is not used: {file}: its content has changed" in caplog.text
    )


def test_newest_restorable_snapshot_is_used(tmp_path, caplog):
    """Two lost: the step before; that lost twice as well: none, and why."""
    _save(_store(tmp_path), 3, 6)
    for process in (1, 3):
        shutil.rmtree(tmp_path / f"process{process}" / "6")
    assert _store(tmp_path).restore_newest(_state(), at_least=4) is None
    assert "no snapshot in memory of 4 processes is used: step 6: 2 of 4 processes (1, 3)" in (
        caplog.text
    )
    found = _restore(_store(tmp_path), at_least=3)
    assert (found.step, found.rebuilt) == (3, None)
    _is_same(found.state, _state(3))


def test_corrupt_snapshot_is_never_restored(tmp_path, caplog):
    """Where checksums match and the words do not, the fingerprints differ."""
    _save(_store(tmp_path), 3, 6)
    step = tmp_path / "process0" / "6"
    words = np.load(step / "words.npy")
    words[3] ^= 1
    np.save(step / "words.npy", words)
    checksums.write_list(step)
    found = _restore(_store(tmp_path))
    assert found.step == 3
    _is_same(found.state, _state(3))
    caplog.clear()
    assert _store(tmp_path).restore_newest(_state(), at_least=4) is None
    assert "step 6: the snapshot of step 6 in memory is damaged: 1 of 6 arrays" in caplog.text


def test_snapshots_of_another_run_or_state_are_ignored(tmp_path, caplog):
    _save(_store(tmp_path), 3)
    assert _store(tmp_path, run="other").restore_newest(_state()) is None
    assert "it is of another run, or of another config" in caplog.text
    caplog.clear()
    other = {name: leaf for name, leaf in _state(data=8, tensor=1).items() if name != "half"}
    assert _store(tmp_path).restore_newest(other) is None
    assert "half: in the checkpoint, not in the target" in caplog.text


def test_a_single_process_keeps_a_snapshot_without_parity(tmp_path):
    _save(_store(tmp_path, processes=1), 4)
    found = _restore(_store(tmp_path, processes=1))
    assert (found.step, found.rebuilt) == (4, None)


def test_the_first_start_is_silent_and_keep_only_forgets(tmp_path, caplog):
    store = _store(tmp_path)
    with caplog.at_level(logging.INFO):
        assert store.restore_newest(_state()) is None
    assert not caplog.records
    _save(store, 3, 6)
    store.keep_only(3)
    assert _restore(store).step == 3
    store.keep_only(None)
    assert store.restore_newest(_state()) is None


def test_the_data_position_is_checked(tmp_path):
    _save(_store(tmp_path), 3)

    def check(manifest):
        assert (manifest.step, manifest.config, manifest.data) == (3, CONFIG, {"step": 3})
        raise DataError("other data")

    with pytest.raises(DataError, match="other data"):
        _store(tmp_path).restore_newest(_state(), check=check)


def test_full_memory_is_reported_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    store, usage = _store(tmp_path), shutil.disk_usage(tmp_path)
    _save(store, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    _save(store, 6)
    assert "the snapshot of step 6 was not kept by process 0, the run goes on: 0.0 MB are free" in (
        caplog.text
    )
    assert not list(tmp_path.glob("*/*.pending"))
    assert _restore(_store(tmp_path)).step == 3


def test_torn_writes_are_never_used(tmp_path):
    _save(_store(tmp_path), 3)
    torn = tmp_path / "process1" / "6.pending"
    shutil.copytree(tmp_path / "process1" / "3", torn)
    store = _store(tmp_path)
    assert not torn.exists()
    assert _restore(store).step == 3
    manifest = json.loads((tmp_path / "process1" / "3" / "manifest.json").read_text())
    assert manifest["run"] == "run" and len(manifest["manifest"]["fingerprints"]) == 6


@pytest.fixture
def supervision():
    with library_supervision(ProcessesConfig()) as entered:
        yield entered


def test_a_snapshot_wins_where_it_is_as_new_as_the_checkpoints(
    tmp_path, monkeypatch, caplog, supervision
):
    given = flags(tmp_path / "run", 9, "--snapshots.every", "2")
    _, config = cli.parse(RECIPES, DEFAULT, given, "pretrain", "")
    assembly, directory = assemble(config), RunDirectory(tmp_path / "run")
    monkeypatch.delenv(SNAPSHOTS, raising=False)
    assert open_snapshots(assembly, directory) is None
    assert "the part snapshots keeps nothing: start the run with" in caplog.text
    monkeypatch.setenv(SNAPSHOTS, str(tmp_path / "memory"))
    state = assembly.new_state()
    snapshots = Snapshots(2, directory)
    assert snapshots.prepare(assembly) is assembly
    store = snapshots._store
    assert store is not None
    checkpoints = CheckpointManager(tmp_path / "checkpoints")

    def begin():
        continuation = Continuation(assembly.loader, SkippedRows())
        found = continuation.restore_or_start(assembly, checkpoints, sources=snapshots.sources())
        snapshots.restore(found)
        return found

    def restore():
        store.finish()
        assert checkpoints.finish()
        found = begin()
        _is_same(found.state, _at(state, found.step))
        return found.step, found.origin

    def save(saver, step):
        saver.save(step, _at(state, step), config={}, data=assembly.loader.position(step))

    assert restore() == (0, None)
    save(checkpoints, 2)
    assert restore() == (2, f"step 2 from {tmp_path}/checkpoints")
    save(store, 2)
    assert restore() == (2, "step 2 from snapshots in memory")
    save(store, 4)
    save(checkpoints, 6)
    assert restore()[0] == 6
    assert list((tmp_path / "memory").iterdir()) == [], "what is older is of no use"
    store.save(8, state, config={}, data=assembly.loader.position(8) | {"seed": 9})
    store.finish()
    with pytest.raises(DataError, match="seed: 9 in the checkpoint, 0 now"):
        begin()
    checkpoints.close()


def _at(state, step):
    counter = jax.device_put(jnp.int32(step), state.step.sharding)
    return dataclasses.replace(state, step=counter)


# In the first start process 2 spoils the checkpoint of step 5, loses its memory and is killed; in
# the second process 1, when its memory and that of process 3 are lost. All of them note what Python
# opens of the checkpoints before their first step.
VICTIM = """
import os, pathlib, shutil, signal, sys, time

directory = pathlib.Path(sys.argv[sys.argv.index("--run.directory") + 1])
checkpoints, memory = directory / "checkpoints", pathlib.Path(os.environ["JAXMOE_SNAPSHOTS"])
marks = [directory.with_suffix(f".killed{kill}") for kill in range(2)]
start = sum(mark.exists() for mark in marks)
opened = open(directory.with_suffix(f".opened{start}"), "a", buffering=1)
is_starting = True

def note(event, arguments):
    if event == "open" and is_starting and str(arguments[0]).startswith(f"{checkpoints}{os.sep}"):
        opened.write(f"{pathlib.Path(arguments[0]).relative_to(checkpoints)}\\n")

sys.addaudithook(note)

from experiments import pretrain
from jaxmoe.run.reporter import Reporter

trained = Reporter.log_steps

def wait(checkpoint, snapshot):
    needed = [memory.with_name(f"process{i}") / snapshot for i in range(4)]
    while not all(path.exists() for path in (checkpoints / checkpoint, *needed)):
        time.sleep(0.01)

def kill(*lost):
    for process in lost:
        shutil.rmtree(memory.with_name(process))
    marks[start].touch()
    os.kill(os.getpid(), signal.SIGKILL)

def trained_and_killed(self, report):
    global is_starting
    is_starting = False
    trained(self, report)
    step = report.steps[-1]
    if (start, memory.name) == (0, "process2") and step >= 7:
        wait("5", "6")
        for path in (checkpoints / "5").rglob("*"):
            if path.is_file():
                path.write_bytes(b"spoilt")
        kill("process2")
    if (start, memory.name) == (1, "process1") and step >= 13:
        wait("10", "12")
        kill("process1", "process3")

Reporter.log_steps = trained_and_killed
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)  # four times four processes, one after the other
def test_a_lost_host_of_four_is_restored_without_the_checkpoints(tmp_path, monkeypatch, capsys):
    """One memory is gone and the checkpoint is damaged; then two memories are gone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(  # sixteen processes compile
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    )
    victim = tmp_path / "victim.py"
    victim.write_text(VICTIM)
    more = (
        "--execution.mesh.data",
        "4",
        "--tracking.print_every",
        "1",
        "--evaluation.batches",
        "1",
    )
    kept = ("--checkpoint.every", "5", "--snapshots.every", "3")
    starts, printed = {}, {}
    for name, script in {"alone": ["-m", "experiments.pretrain"], "lost": [str(victim)]}.items():
        given = flags(tmp_path / name, 14, *more, *(kept if name == "lost" else ()))
        experts = given.index("--model.moe.expert_dim")
        # What the state is of does not matter; dense, it compiles in half the time.
        given = [*given[:experts], *given[experts + 2 :], "model.moe:none"]
        command = shlex.join([sys.executable, *script, *given])
        launched = ["--run.directory", str(tmp_path / f"launch-{name}"), "--command", command]
        memory = ["--snapshots", str(tmp_path)]
        code = launch.main(["--supervise", "--processes", "4", *memory, *launched])
        printed[name] = capsys.readouterr().out
        assert code == ExitCode.DONE, printed[name]
        summary = json.loads((tmp_path / f"launch-{name}" / "summary.json").read_text())
        starts[name] = [start["cause"] for start in summary["starts"]]
    killed = [f"process {process} was killed by SIGKILL" for process in (2, 1)]
    assert starts == {"alone": ["done"], "lost": [*killed, "done"]}
    assert not list(tmp_path.glob("jaxmoe-*")), "all of the memory is given back"

    assert "restored step 6 from snapshots in memory (process 2 rebuilt from p" in printed["lost"]
    # Orbax looks at the times of the steps when it lists them; this one is spoilt like the rest.
    assert set((tmp_path / "lost.opened1").read_text().split()) <= {"5/_CHECKPOINT_METADATA"}
    why = "no snapshot in memory of 4 processes is used: step 12: 2 of 4 processes (1, 3) have lost"
    assert why in printed["lost"]
    origin = f"step 10 from {tmp_path}/lost/checkpoints"
    assert f"restored {origin}\n" in printed["lost"]
    assert json.loads((tmp_path / "lost" / "summary.json").read_text())["restored_from"] == origin
    assert len(set((tmp_path / "lost.opened2").read_text().split())) > 5, "opening is noted"

    assert logged_losses(tmp_path / "lost") == logged_losses(tmp_path / "alone")
    wanted = saved_leaves(tmp_path / "alone", 14)
    for path, leaf in saved_leaves(tmp_path / "lost", 14).items():
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
