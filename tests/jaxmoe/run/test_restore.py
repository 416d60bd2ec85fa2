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
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import restore_run
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


def _saved(assembly: Assembly, manager: CheckpointManager, count: int = 3) -> int:
    """Save a state of step 3 and return its bytes."""
    state, position = assembly.new_state(), assembly.loader.position(3)
    state = dataclasses.replace(state, step=state.step + count)
    given = to_json(dataclasses.replace(assembly.plan.config, model=assembly.plan.model))
    assert manager.save(3, state, config=given, data=position) and manager.finish()
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
