# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A saved state is restored into shapes: the devices never hold a second state for it."""

from __future__ import annotations

import dataclasses
import gc

import jax
import pytest

from jaxmoe.adapters import LoraConfig
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointsLostError
from jaxmoe.configs import to_json
from jaxmoe.contrib.slow_links import DiLoCoConfig, OneBitAdamConfig, StreamingConfig
from jaxmoe.data import SkippedRows
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import CheckpointConfig, InitialConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import restore_run
from jaxmoe.run.provenance.warm_start import initial_state, with_initial_step
from jaxmoe.run.restore import Continuation
from sharding import MeshConfig
from tests.jaxmoe.run.test_run import config

WORKERS = ExecutionConfig(mesh=MeshConfig(replica=2, data=4))
ADAPTED = dataclasses.replace(
    config(),
    model=dataclasses.replace(config().model, adapter=LoraConfig(rank=2)),
    execution=ExecutionConfig(precision=PrecisionPolicy(weights="w8a16")),
)
CONFIGS = {
    "one batch": config(),
    "host memory": dataclasses.replace(
        config(), execution=ExecutionConfig(offload=OffloadConfig(), telemetry="brief")
    ),
    "diloco": dataclasses.replace(config(), execution=WORKERS, replicas=DiLoCoConfig(every=2)),
    "streaming": dataclasses.replace(
        config(), execution=WORKERS, replicas=StreamingConfig(every=2, fragments=2)
    ),
    "one-bit Adam": dataclasses.replace(config(), execution=WORKERS, replicas=OneBitAdamConfig()),
    "rounded base": ADAPTED,
}


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def _bytes_of(state) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.fixture
def peaks(monkeypatch):
    """Live bytes at each read of a state from checkpoints."""
    found, read = [], CheckpointManager._read

    def watched(self, *arguments):
        found.append(_live_bytes())
        return read(self, *arguments)

    monkeypatch.setattr(CheckpointManager, "_read", watched)
    return found


def _saved(assembly: Assembly, manager: CheckpointManager, count: int = 3, *, step: int = 3) -> int:
    """Save a state as that of a step and return its bytes."""
    state, position = assembly.new_state(), assembly.loader.position(step)
    state = dataclasses.replace(state, step=state.step + count)
    given = to_json(dataclasses.replace(assembly.plan.config, model=assembly.plan.model))
    assert manager.save(step, state, config=given, data=position) and manager.finish()
    return _bytes_of(state)


def test_a_resume_holds_one_state_and_none_before_it_is_read(tmp_path, peaks):
    assembly = assemble(config())
    manager = CheckpointManager(tmp_path / "checkpoints")
    size, before = _saved(assembly, manager), _live_bytes()
    start = Continuation(assembly.loader, SkippedRows()).restore_or_start(assembly, manager)
    assert start.step == 3 and len(peaks) == 1
    assert peaks[0] - before < size / 10, "a state is drawn to be read into"
    assert _live_bytes() - before < 1.1 * size, "a second state is kept"
    manager.close()


def test_a_run_that_is_opened_holds_one_state(tmp_path, peaks):
    directory, assembly = RunDirectory(tmp_path / "run"), assemble(config())
    manager = CheckpointManager(directory.checkpoints_directory)
    size, before = _saved(assembly, manager), _live_bytes()
    manager.close()
    _, state, step = restore_run(config(), directory, None)
    assert step == 3 and len(peaks) == 1
    assert peaks[0] - before < size / 10
    assert _bytes_of(state) == size and _live_bytes() - before < 1.1 * size


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shapes_to_restore_to_are_those_of_a_new_state(name):
    assembly = assemble(CONFIGS[name])
    shapes, state = assembly.state_shapes(), assembly.new_state()
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    pairs = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(state), strict=True)
    for (path, shape), leaf in pairs:
        where = jax.tree_util.keystr(path)
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype), where
        assert shape.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), where


def test_a_state_of_another_step_than_its_checkpoint_is_damaged(tmp_path, caplog):
    """Whole files, and manifest and directory that agree, do not prove which state it is."""
    assembly = assemble(config())
    manager = CheckpointManager(tmp_path / "checkpoints")
    _saved(assembly, manager, count=2)
    with pytest.raises(CheckpointsLostError, match=r"all steps are damaged \(3\)"):
        Continuation(assembly.loader, SkippedRows()).restore_or_start(assembly, manager)
    assert "checkpoints/3 is damaged: it holds the state of step 2" in caplog.text
    manager.close()


def test_a_manifest_that_cannot_be_read_is_passed_over_where_a_run_is_opened(tmp_path, caplog):
    directory, assembly = RunDirectory(tmp_path / "run"), assemble(config())
    manager = CheckpointManager(directory.checkpoints_directory)
    _saved(assembly, manager)
    _saved(assembly, manager, 4, step=4)
    manager.close()
    manifest = directory.checkpoints_directory / "4" / "manifest" / "metadata"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    _, state, step = restore_run(config(), directory, None)
    assert step == int(state.step) == 3 and "the step before it is used" in caplog.text


def _begun_with(place, **changes):
    initial = CheckpointConfig(initial=InitialConfig(path=str(place)))
    return dataclasses.replace(config(), checkpoint=initial, **changes)


def test_a_run_goes_on_with_the_step_that_it_began_with(tmp_path):
    """Also where the other run has trained on, which an adapter and a KL penalty read again."""
    assembly = assemble(config())
    manager = CheckpointManager(tmp_path / "checkpoints")
    _saved(assembly, manager)
    begun = with_initial_step(_begun_with(tmp_path), None)
    assert begun.checkpoint.initial.step == 3
    _saved(assembly, manager, 4, step=4)
    manager.close()
    assert with_initial_step(_begun_with(tmp_path), to_json(begun)) == begun
    assert with_initial_step(_begun_with(tmp_path), None).checkpoint.initial.step == 4
    # A run that began with no other has none to go on with.
    assert with_initial_step(_begun_with(tmp_path), to_json(config())) == _begun_with(tmp_path)


def test_parameters_that_a_model_leaves_behind_are_named(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path / "checkpoints")
    _saved(assemble(config()), manager)
    manager.close()
    lines = []
    monkeypatch.setattr("jaxmoe.run.provenance.warm_start.say", lines.append)
    whole = assemble(_begun_with(tmp_path))
    initial_state(whole, whole.new_state())
    assert len(lines) == 1
    model = config().model
    attention = dataclasses.replace(model.attention, qk_norm="none")
    less = assemble(_begun_with(tmp_path, model=dataclasses.replace(model, attention=attention)))
    initial_state(less, less.new_state())
    assert "q_norm" in lines[-1] and "k_norm" in lines[-1] and "left behind" in lines[-1]
