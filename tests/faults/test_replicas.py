# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Silent corruption of one replica is found with device and array, and never saved."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.fingerprints import ReplicasDifferError, fingerprints
from jaxmoe.run import trainer
from jaxmoe.training import loop
from tests.support.meshes import mesh_named
from tests.support.runs import flags


def _flip_on(array: jax.Array, device: jax.Device, rng: np.random.Generator) -> jax.Array:
    """Return the array with one random bit flipped on one device."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            words = data.reshape(-1).view(np.uint32)
            words[rng.integers(words.size)] ^= np.uint32(1 << int(rng.integers(32)))
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _state():
    """Arrays replicated over 8 devices, over 2 of 4 pieces, and over none."""
    mesh, rng = mesh_named("data4_tensor2"), np.random.default_rng(0)
    specs = {
        "whole": PartitionSpec(),
        "pieces": PartitionSpec("data"),
        "moments": PartitionSpec(None, "tensor"),
        "cut": PartitionSpec("data", "tensor"),
    }
    return {
        name: jax.device_put(
            rng.standard_normal((8, 6)).astype(np.float32), NamedSharding(mesh, spec)
        )
        for name, spec in specs.items()
    }


def test_every_flipped_bit_of_a_replica_is_found():
    """100 of 100, with array and device (of two that differ, both); none in clean states."""
    rng, state = np.random.default_rng(0), _state()
    clean = fingerprints(state)
    for _ in range(50):
        assert fingerprints(state) == clean
    for trial in range(100):
        name = ("whole", "pieces", "moments")[trial % 3]
        device = jax.devices()[rng.integers(8)]
        with pytest.raises(ReplicasDifferError) as error:
            fingerprints(state | {name: _flip_on(state[name], device, rng)})
        text = str(error.value)
        assert text.endswith(f"holds other bits than its replicas, in 1 of 4 arrays: {name}")
        devices = text.removeprefix("device ").partition(":")[0].split(" and ")
        assert str(device.id) in devices and len(devices) == (2 if name == "pieces" else 1)


def test_what_no_other_device_holds_cannot_be_compared():
    state = _state()
    flipped = _flip_on(state["cut"], jax.devices()[3], np.random.default_rng(0))
    assert fingerprints(state | {"cut": flipped}) != fingerprints(state)


def test_corrupt_replica_is_never_saved(tmp_path):
    state = _state()
    state["whole"] = _flip_on(state["whole"], jax.devices()[5], np.random.default_rng(0))
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ReplicasDifferError, match="^device 5: holds other bits than its replicas"):
        manager.save(1, state, config={})
    manager.close()
    assert manager.steps() == []


@pytest.mark.slow
@pytest.mark.parametrize(("compared", "steps"), [("3", (3,)), ("0", (5, 6))])
def test_a_run_on_such_a_device_ends(tmp_path, caplog, capsys, monkeypatch, compared, steps):
    """It names it, keeps the checkpoint before it, and has its own exit code.

    Found by a comparison at the step, or by the fingerprints of the lazy save of step 4.
    """
    plain = loop.Loop

    def flipping(state, step_function, *arguments, **options):
        def step_and_flip(state, batch):
            state, metrics = step_function(state, batch)
            if int(state.step) == 3:
                embedding = state.params["embedding"]["weight"]
                flipped = _flip_on(embedding, jax.devices()[1], np.random.default_rng(0))
                state.params["embedding"]["weight"] = flipped
            return state, metrics

        return plain(state, step_and_flip, *arguments, **options)

    monkeypatch.setattr(trainer, "Loop", flipping)
    mesh = ("--execution.mesh.data", "8", "--execution.rules", "data_parallel")
    saving = ("--checkpoint.every", "2", "--checkpoint.safety.compare_replicas", compared)
    command = flags(tmp_path / "run", 6, *mesh, *saving, "--tracking.sample_length", "0")
    assert pretrain.main(command) == ExitCode.CORRUPTED
    assert "device 1: holds other bits than its replicas, in 1 of " in caplog.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["checkpoint_step"]) == ("corrupted", 2)
    assert summary["steps"] in steps
    assert f"corrupted at step {summary['steps']}" in capsys.readouterr().out
