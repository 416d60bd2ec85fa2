# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shardings of trees, and global arrays from the rows of a process."""

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.axes import BATCH_AXES
from sharding.distributed import agree, global_batch
from sharding.mesh import named_shardings
from tests.support.meshes import MESHES, mesh_named


def test_named_shardings():
    mesh = mesh_named("data4_tensor2")
    tree = {"a": PartitionSpec("data", "tensor"), "b": [PartitionSpec()]}
    wanted = {"a": NamedSharding(mesh, tree["a"]), "b": [NamedSharding(mesh, PartitionSpec())]}
    assert named_shardings(tree, mesh) == wanted


@pytest.mark.parametrize("name", MESHES)
def test_global_batch_holds_the_rows_in_order(name):
    mesh = mesh_named(name)
    rows = {"tokens": np.arange(16, dtype=np.int32).reshape(8, 2), "weight": np.ones(8, np.float32)}
    batch = global_batch(rows, mesh)
    assert batch["tokens"].sharding.spec == PartitionSpec(BATCH_AXES, None)
    assert batch["weight"].sharding.spec == PartitionSpec(BATCH_AXES)
    np.testing.assert_array_equal(batch["tokens"], rows["tokens"])
    parts = {str(shard.index) for shard in batch["tokens"].addressable_shards}
    assert len(parts) == mesh.shape["replica"] * mesh.shape["data"] * mesh.shape["expert"]


def test_one_process_agrees_with_itself():
    assert agree(75) == 75
