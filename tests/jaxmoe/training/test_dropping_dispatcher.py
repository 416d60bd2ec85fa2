# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a dispatcher drops in a model is in the statistics."""

import jax
import numpy as np

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllDroppingConfig
from tests.support.meshes import mesh_of
from tests.support.models import WIDE, WIDE_LENGTH, tokens_for


def test_drops_are_in_the_statistics():
    """Half a share of room for each pair of devices: at least half of what is sent stays behind."""
    dispatcher = AllToAllDroppingConfig(capacity_factor=0.5)
    execution = ExecutionConfig(mesh=MeshConfig(data=2, expert=4), dispatcher=dispatcher)
    mesh, table = mesh_of(execution), parameter_table(WIDE, rules=execution.axis_rules)
    places = table.tree(lambda row: jax.sharding.NamedSharding(mesh, row.spec))
    params = jax.device_put(init_params(WIDE, jax.random.key(0)), places)
    tokens = {"tokens": np.asarray(tokens_for(WIDE, length=WIDE_LENGTH)[0])}
    with jax.set_mesh(mesh):
        model = Transformer(WIDE, execution)
        apply = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens).statistics)
        statistics = apply(params, global_batch(tokens, mesh)["tokens"])
    counts, kept = np.asarray(statistics.counts), np.asarray(statistics.kept)
    assert (counts >= kept).all() and (kept >= 0).all()
    sent = tokens["tokens"].size * WIDE.moe.top_k
    assert counts.sum(-1).tolist() == [sent] * len(counts)
    assert (kept.sum(-1) <= sent / 2).all() and (kept.sum(-1) > 0).all()
