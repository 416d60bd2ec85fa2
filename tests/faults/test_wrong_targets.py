# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Targets that differ from the checkpoint are refused with name, both values and a hint.

To add a mismatch: a row in WRONG.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointError, CheckpointManager, load_checkpoint, save_checkpoint
from tests.support.meshes import mesh_named
from tests.support.models import TINY

E, V, D, F = 4, 32, 16, 10  # of TINY


def _state():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    params = {
        "embedding": {"weight": normal(V, D)},
        "experts": {"up": normal(2, E, D, F)},
        "attention": {"query": normal(2, D, 24)},
        "norm": {"scale": normal(D)},
    }
    opt_state = {"0": {"mu": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(3)}}
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(7)}


def _with(path, value):
    """Return the state with one array replaced or removed."""
    state = _state()
    *parents, name = path.split("/")
    branch = state
    for parent in parents:
        branch = branch[parent]
    branch.pop(name)
    if value is not None:
        branch[name] = value
    return state


def _renamed():
    state = _state()
    state["params"]["attention"]["queries"] = state["params"]["attention"].pop("query")
    return state


CAST = "(cast only by restore_part with is_cast_allowed)"
WRONG = {
    "missing": (
        _state() | {"ema": jnp.zeros(3)},
        "ema: not in the checkpoint",
    ),
    "extra": (
        _with("params/norm/scale", None),
        "params/norm/scale: in the checkpoint, not in the target",
    ),
    "renamed": (
        _renamed(),
        "params/attention/queries: not in the checkpoint (it has params/attention/query)",
    ),
    "transposed": (
        _with("params/embedding/weight", jnp.zeros((D, V))),
        "params/embedding/weight: saved float32[32,16], wanted float32[16,32] (transposed)",
    ),
    "rank": (
        _with("params/norm/scale", jnp.zeros((1, D))),
        "params/norm/scale: saved float32[16], wanted float32[1,16] (another number of dimensions)",
    ),
    "experts": (
        _with("params/experts/up", jnp.zeros((2, 8, D, F))),
        "params/experts/up: saved float32[2,4,16,10], wanted float32[2,8,16,10]"
        " (another number of experts: 4, and 8 here)",
    ),
    "vocabulary": (
        _with("params/embedding/weight", jnp.zeros((48, D))),
        "params/embedding/weight: saved float32[32,16], wanted float32[48,16]"
        " (another vocabulary: 32, and 48 here)",
    ),
    "bfloat16": (
        _with("params/norm/scale", jnp.zeros(D, jnp.bfloat16)),
        f"params/norm/scale: saved float32[16], wanted bfloat16[16] {CAST}",
    ),
    "int8": (
        _with("params/norm/scale", jnp.zeros(D, jnp.int8)),
        f"params/norm/scale: saved float32[16], wanted int8[16] {CAST}",
    ),
    "step": (
        _with("step", jnp.float32(0)),
        f"step: saved int32[], wanted float32[] {CAST}",
    ),
    "optimizer": (
        _with("opt_state", None),
        "opt_state/0/count: in the checkpoint, not in the target",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint(directory, _state(), step=7, config=TINY)
    return directory


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_target_is_refused_with_a_hint(saved, kind):
    target, words = WRONG[kind]
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(saved, target=target)
    assert f"{saved}/7 holds another state than the target" in str(error.value)
    assert f"  {words}\n" in str(error.value)
    assert "jaxmoe.checkpoint.restore.restore_part" in str(error.value)


def test_missing_step_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 6 \(has: 7\)"):
        load_checkpoint(saved, step=6, target=_state())


@pytest.mark.parametrize("name", ["x.y", "a/b", "", "..", "../x", "/"])
def test_names_that_a_store_could_take_for_a_path_are_not_saved(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be saved: names must not be empty, nor hold"):
        save_checkpoint(tmp_path, {"params": {name: jnp.ones(1)}}, step=1, config={})


def test_an_array_beside_the_mesh_is_named_before_a_second_process_would_hang(tmp_path):
    spec = NamedSharding(mesh_named("data8"), PartitionSpec())
    state = jax.device_put(_state(), spec) | {"step": jnp.int32(3)}
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"^state\.step: not a global array on the mesh"):
        manager.save(3, state, config={})
    assert manager.save(3, jax.device_put(state, spec), config={}) and manager.finish()
    manager.close()
