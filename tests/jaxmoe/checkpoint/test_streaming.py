# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written and read layer by layer equal those of the manager."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    load_checkpoint,
    save_checkpoint,
    writing,
)
from jaxmoe.checkpoint.streaming import Streamed, open_stored, save_streamed
from jaxmoe.fingerprints import RunningFingerprint, fingerprints

RNG = np.random.default_rng(0)
ARRAYS = {
    "params/blocks/w": RNG.normal(size=(3, 5, 7)).astype(np.float32),
    "params/blocks/gain": RNG.normal(size=(3, 7)).astype(ml_dtypes.bfloat16),
    "params/head": RNG.normal(size=(7, 11)).astype(np.float32),
    "router_state/bias": RNG.normal(size=(2, 3)).astype(np.float32),
}
STACKED = ("params/blocks/w", "params/blocks/gain")


def state():
    """The arrays that are in memory."""
    return {"step": jnp.full((), 4, jnp.int32), "rng": jax.random.key(3), "opt_state": {}}


def streamed(**changes):
    """The streamed arrays, each with the layers that were read."""
    asked: dict[str, list] = {path: [] for path in ARRAYS}

    def of(path, array):
        def read(layer):
            asked[path].append(layer)
            return array if layer is None else array[layer]

        return Streamed(array.shape, str(array.dtype), read, path in STACKED)

    return {path: of(path, array) for path, array in (ARRAYS | changes).items()}, asked


def nested():
    """The same state as one tree."""
    return {
        **state(),
        "params": {
            "blocks": {"w": ARRAYS["params/blocks/w"], "gain": ARRAYS["params/blocks/gain"]},
            "head": ARRAYS["params/head"],
        },
        "router_state": {"bias": ARRAYS["router_state/bias"]},
    }


@pytest.fixture
def saved(tmp_path):
    arrays, asked = streamed()
    save_streamed(tmp_path, state(), arrays, step=4, config={"a": 1}, data={"seed": 2})
    assert asked["params/blocks/w"] == [0, 1, 2] and asked["params/head"] == [None]
    return tmp_path


def test_manager_reads_a_streamed_checkpoint(saved, tmp_path):
    found = load_checkpoint(saved)
    for path, array in ARRAYS.items():
        leaf = found
        for name in path.split("/"):
            leaf = leaf[name]
        assert leaf.dtype == array.dtype
        np.testing.assert_array_equal(leaf, array)
    save_checkpoint(tmp_path / "other", nested(), step=4, config={"a": 1}, data={"seed": 2})
    ours, its = (
        CheckpointManager(place, is_writer=False).manifest(4)
        for place in (saved, tmp_path / "other")
    )
    assert ours == its


def test_stored_layers_are_read_alone(saved):
    step, arrays = open_stored(saved)
    assert step == 4 and arrays.keys() == ARRAYS.keys() | {"step"}  # keys are left out
    for path in STACKED:
        assert arrays[path].shape == ARRAYS[path].shape
        np.testing.assert_array_equal(arrays[path][2], ARRAYS[path][2])
        chunks = arrays[path]._file().chunk_layout.read_chunk.shape
        assert chunks == (1, *ARRAYS[path].shape[1:])
    np.testing.assert_array_equal(np.asarray(arrays["params/head"]), ARRAYS["params/head"])


def test_manager_stores_large_stacks_by_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_LARGE", 100)
    save_checkpoint(tmp_path, nested(), step=1, config={})
    _, arrays = open_stored(tmp_path, 1)
    assert arrays["params/blocks/w"]._file().chunk_layout.read_chunk.shape == (1, 5, 7)
    assert arrays["params/head"]._file().chunk_layout.read_chunk.shape == (7, 11)
    np.testing.assert_array_equal(arrays["params/blocks/w"][1], ARRAYS["params/blocks/w"][1])
    leaf = load_checkpoint(tmp_path)["params"]["blocks"]["w"]
    np.testing.assert_array_equal(leaf, ARRAYS["params/blocks/w"])


def test_running_fingerprint_equals_the_whole(monkeypatch):
    import jaxmoe.fingerprints as room

    monkeypatch.setattr(room, "_BLOCK", 60)
    for array in ARRAYS.values():
        running = RunningFingerprint(array.shape)
        for layer in (1, 0, *range(2, len(array))):
            running.add(array[layer][None], layer)
        assert running.value == fingerprints({"x": array})["x"]
        whole = RunningFingerprint(array.shape)
        whole.add(array)
        assert whole.value == running.value


def test_streamed_layer_of_another_shape_is_refused(saved, tmp_path):
    arrays, _ = streamed()
    with pytest.raises(CheckpointError, match="already has a checkpoint of step 4"):
        save_streamed(saved, state(), arrays, step=4, config={})
    wrong = {**arrays, "params/head": Streamed((7, 12), "float32", lambda _: ARRAYS["params/head"])}
    with pytest.raises(CheckpointError, match=r"params/head: found \[7, 11\], expected \[7, 12\]"):
        save_streamed(tmp_path / "new", state(), wrong, step=1, config={})
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5"):
        open_stored(saved, 5)
    files = [path for path in (saved / "4" / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(bytes(content))
    with pytest.raises(CheckpointDamagedError, match="its content has changed"):
        open_stored(saved, 4)
