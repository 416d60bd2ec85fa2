# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that lacks an optional part is read, and the part starts as zeros."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointError, CheckpointManager, load_checkpoint, save_checkpoint
from jaxmoe.training.state import TrainState
from tests.support.meshes import mesh_named


def _state(**given) -> TrainState:
    return TrainState(
        step=jnp.int32(4),
        params={"w": jnp.arange(4.0)},
        opt_state={},
        router_state={},
        rng=jax.random.key(0),
        skipped=jnp.int32(1),
        skipped_in_a_row=jnp.int32(0),
        **given,
    )


def test_a_checkpoint_without_an_optional_part_is_read(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "jaxmoe")
    save_checkpoint(tmp_path, _state(), step=4, config={})
    whole = NamedSharding(mesh_named("data8"), PartitionSpec())
    target = jax.device_put(_state(parts={"layer_norms": jnp.ones(3)}), whole)
    manager = CheckpointManager(tmp_path)
    step, state = manager.restore_newest(target)
    manager.close()
    assert step == 4 and "4 has no parts/layer_norms (gradient norms of the layers" in caplog.text
    np.testing.assert_array_equal(state.parts["layer_norms"], np.zeros(3))
    assert state.parts["layer_norms"].sharding == whole
    np.testing.assert_array_equal(state.params["w"], np.arange(4.0))
    other = dataclasses.replace(target, params={"v": jnp.zeros(2)})
    with pytest.raises(CheckpointError, match="params/v: not in the checkpoint"):
        load_checkpoint(tmp_path, step=4, target=other)
    other = dataclasses.replace(target, recent_norms=jnp.zeros(3))
    with pytest.raises(CheckpointError, match="recent_norms: not in the checkpoint"):
        load_checkpoint(tmp_path, step=4, target=other)
