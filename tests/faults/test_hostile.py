# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Malicious checkpoints are refused with a message, without imports or large allocations."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorstore as ts

from jaxmoe.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    bounds,
    checksums,
    load_checkpoint,
    save_checkpoint,
)
from jaxmoe.checkpoint.restore import restore_part

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _state(seed=0):
    rng = np.random.default_rng(seed)
    zeros = np.zeros((512, 512), np.float32)
    params = {"w": rng.standard_normal((64, 32)).astype(np.float32), "zeros": zeros}
    return {"params": params, "step": np.int32(3), "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint(directory, _state(), step=1, config={"a": 1})
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def _edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def _in_store(step, key, change):
    """Rewrite one value of the store, as TensorStore would."""
    base = {"driver": "file", "path": f"{step}/state/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    store.write(key, change(store.read(key).result().value)).result()


def _forged_reader(step):
    _edit(
        step / "_CHECKPOINT_METADATA",
        lambda data: data["item_handlers"].update(state="hostile_reader.Handler"),
    )


def _shape_in_store(step):
    def change(value):
        return json.dumps(json.loads(value) | {"shape": [1 << 20, 1 << 20]}).encode()

    _in_store(step, "params.w/.zarray", change)


def _shape_everywhere(step, shape=(1 << 28, 1 << 24)):
    def change(value):
        return json.dumps(json.loads(value) | {"shape": shape}).encode()

    _in_store(step, "params.w/.zarray", change)
    arrays = {"params/w": {"shape": shape, "dtype": "float32"}}
    _edit(step / "manifest" / "metadata", lambda data: data["arrays"].update(arrays))


def _shape_that_could_be(step):
    _shape_everywhere(step, (1 << 24, 1 << 20))


def _large_chunks(step):
    def change(value):
        return json.dumps(json.loads(value) | {"chunks": [1 << 20, 1 << 20]}).encode()

    _in_store(step, "params.w/.zarray", change)


def _bomb(step, blocks=1 << 15):
    """Return 4 GiB of zeros in 128 KiB: repeated blocks of one byte."""
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (1 << 3 | 1).to_bytes(3, "little") + b"\0"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + blocks * block + last
    _in_store(step, "params.w/0.0", lambda _: frame)


def _link(step):
    file = next(path for path in (step / "state").rglob("d/*"))
    file.rename(step.parent / "elsewhere")
    file.symlink_to(step.parent / "elsewhere")


def _pipe(step):
    os.mkfifo(step / "state" / "d" / "pipe")


def _deep(name):
    def write(step):
        (step / name).write_text('{"schema": 2, "arrays": ' + "[" * 100_000 + "]" * 100_000 + "}")

    write.__name__ = f"deep_{name}"
    return write


def _deep_list(step):
    text = "[" * 100_000 + "]" * 100_000
    (step / "files.json").write_text(json.dumps({"crc32": 0, "files": text}))


def _many_objects(step):
    (step / "state" / "_METADATA").write_text("[" + "[]," * 1_000_000 + "[]]")


def _large_text(step):
    with (step / "manifest" / "metadata").open("a") as file:
        file.write(" " * bounds.MAX_JSON_BYTES)


def _dotted(step):
    """Return two arrays with the same name in the store."""
    _edit(
        step / "manifest" / "metadata",
        lambda data: data["arrays"].update({"params.w": data["arrays"]["params/w"]}),
    )


def _dotted_in_metadata(step):
    def change(data):
        entry = dict(data["tree_metadata"]["('params', 'w')"])
        entry["key_metadata"] = [{"key": "params.w", "key_type": 2}]
        data["tree_metadata"]["('params.w',)"] = entry

    _edit(step / "state" / "_METADATA", change)


def _upwards(step):
    def change(data):
        data["arrays"]["params/../../../x"] = data["arrays"].pop("params/w")

    _edit(step / "manifest" / "metadata", change)


def _another_store(step):
    """Make Orbax read other files than those that were checked."""
    _edit(step / "state" / "_METADATA", lambda data: data.update(use_ocdbt=False))


def _more_files(step):
    (step / "state" / "d" / "more").write_bytes(b"")
    os.truncate(step / "state" / "d" / "more", 160 << 20)


def _no_table(step):
    _edit(step / "manifest" / "metadata", lambda data: data.update(arrays=[1, 2]))


def _no_config(step):
    _edit(step / "manifest" / "metadata", lambda data: data.update(config=3, command="rm"))


_DEEP = "more than 524288 objects and lists, or nested deeper than 64"
HOSTILE = {
    _forged_reader: "asks for the reader 'hostile_reader.Handler' of 'state'",
    _shape_in_store: "params/w: the store has <f4[1048576, 1048576], the manifest float32[64, 32]",
    _shape_everywhere: "params/w needs 18014398509481984 bytes",
    _large_chunks: "params/w: the store has chunks [1048576, 1048576] for [64, 32]",
    _bomb: "End of data expected",
    _link: ": a link, which checkpoints do not contain",
    _pipe: "state/d/pipe: neither a file nor a directory",
    _deep("manifest/metadata"): "manifest/metadata: " + _DEEP,
    _deep("_CHECKPOINT_METADATA"): "_CHECKPOINT_METADATA: " + _DEEP,
    _deep("state/_METADATA"): "state/_METADATA: " + _DEEP,
    _deep("state/_sharding"): "state/_sharding: " + _DEEP,
    _deep_list: "files.json: " + _DEEP,
    _many_objects: "state/_METADATA: " + _DEEP,
    _large_text: "bytes, at most 16777216 are allowed",
    _dotted: "'params.w' is not a valid name of an array",
    _dotted_in_metadata: "state/_METADATA: 'params.w' is not in the manifest",
    _upwards: "'params/../../../x' is not a valid name of an array",
    _another_store: "state/_METADATA: describes a store that jaxmoe does not write",
    _more_files: "and its arrays need 1056780",
    _no_table: "manifest/metadata: its arrays are not a JSON object",
    _no_config: "has an invalid manifest: see config, command",
}


def _forge(hostile, step):
    hostile(step)
    if hostile not in (_link, _pipe, _deep_list):
        checksums.write_list(step)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.__name__.strip("_"))
def test_malicious_checkpoint_is_refused(copy, hostile, monkeypatch, tmp_path):
    (tmp_path / "hostile_reader.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    _forge(hostile, copy / "1")
    words = HOSTILE[hostile]
    if hostile.__name__ == "deep__CHECKPOINT_METADATA":  # Orbax reads it of all steps at once
        words = "; move the step away"
    for verify in ("full", "off"):
        for target in (_state(), None):
            with pytest.raises(CheckpointDamagedError) as error:
                load_checkpoint(copy, step=1, target=target, verify=verify)
            assert words in str(error.value) and len(str(error.value)) < 1000
    with pytest.raises(CheckpointError):
        restore_part(copy, {"params": _state()["params"]})
    assert "hostile_reader" not in sys.modules


def test_valid_checkpoint_is_not_refused(saved):
    manager = CheckpointManager(saved, is_writer=False)
    assert manager.damage(1) == []
    manager.close()
    np.testing.assert_array_equal(load_checkpoint(saved)["params"]["w"], _state()["params"]["w"])


def test_more_than_the_memory_needs_a_target(saved, monkeypatch):
    """A valid checkpoint of a larger machine, or a very large forged one."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    with pytest.raises(CheckpointError, match="this host has 1000000: restore it to a target"):
        load_checkpoint(saved)
    assert int(load_checkpoint(saved, target=_state())["step"]) == 3


_VICTIM = """
import resource, sys
import jax, numpy as np
from jaxmoe.checkpoint import CheckpointError, load_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

honest, *hostile = sys.argv[1:]
target = load_checkpoint(honest)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(target) if hasattr(leaf, "nbytes"))
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
for directory in hostile:
    for wanted in (target, None):
        before = peak()
        try:
            load_checkpoint(directory, target=wanted)
            print("loaded", directory)
        except CheckpointError as error:
            grown = peak() - before
            verdict = "refused" if grown < 2 * size + 200e6 else "grown"
            print(verdict, grown, repr(str(error))[-200:])
"""


@pytest.mark.slow
def test_nothing_large_is_allocated(saved, tmp_path):
    """Peak memory of a process that opens them, whose whole target has 1 MB."""
    kinds = (_bomb, _shape_in_store, _shape_that_could_be, _large_chunks, _many_objects)
    for kind in kinds:
        shutil.copytree(saved, tmp_path / kind.__name__)
        _forge(kind, tmp_path / kind.__name__ / "1")
    command = [sys.executable, "-c", _VICTIM, saved, *(tmp_path / k.__name__ for k in kinds)]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2 * len(kinds), done.stdout + done.stderr
    assert all(line.startswith("refused ") for line in lines), done.stdout
