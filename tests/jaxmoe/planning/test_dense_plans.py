# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of the dense models that were trained on Frontier (arXiv 2312.12705), in closed form."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.search import Space, enumerate_meshes, search, stages_of
from sharding.mesh import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of

LENGTH = 2048


def planned(layers, width, batch, devices, overlap=0.0):
    """Best mesh, and the share of the peak that its model FLOPs reach."""
    model = ModelConfig(
        vocab_size=51200,
        num_layers=layers,
        embed_dim=width,
        moe=None,
        dense_dim=8 * width // 3 // 256 * 256,
        attention=AttentionConfig(num_heads=width // 128, num_kv_heads=width // 128, head_dim=128),
    )
    plan = plan_of(
        model,
        MeshConfig(),
        batch_size=batch,
        length=LENGTH,
        compute="bfloat16",
        rules="zero1",
        remat="full",
        loss_chunk=512,
    )
    meshes = enumerate_meshes(devices, 1, [1, *stages_of(plan, devices)])
    dense = [mesh for mesh in meshes if mesh.expert == mesh.replica == 1]
    chip = dataclasses.replace(CHIPS["mi250x"], overlap=overlap)
    best = search(plan, dense, chip, space=Space(has_micro_batches=True)).fitting[0]
    flops = flops_per_token(model, plan.table, LENGTH) * plan.tokens
    return best, flops / devices / chip.flops / best.time.step


@pytest.mark.slow
def test_tensor_parallelism_stays_in_a_node_and_weak_scaling_is_flat():
    """22 and 175 billion parameters: at most the 8 dies of a node, the smaller at a higher rate."""
    small, small_rate = planned(48, 6144, 256, 128)
    wide, wide_rate = planned(48, 6144, 1024, 512)
    large, large_rate = planned(96, 12288, 640, 1024)
    assert max(one.mesh.tensor for one in (small, wide, large)) <= 8
    assert large.mesh.stage > 1 and small_rate > large_rate
    assert wide_rate / small_rate > 0.9


@pytest.mark.parametrize(
    "rows", [pytest.param(4, marks=pytest.mark.large), pytest.param(10, marks=pytest.mark.slow)]
)
def test_larger_models_reach_less_where_reductions_are_hidden(rows):
    """The measured order, 38.4, 36.1 and 32.0% of the peak, with equal rows for each die.

    Nothing hidden, 175 billion parameters come out last: its gradients of every micro-batch are
    reduced over slow links, or its pipeline has few micro-batches and idles.
    """
    sizes = {(48, 6144): 128, (96, 12288): 1024, (128, 25600): 2048}
    found = [planned(*size, rows * dies, dies, overlap=1.0) for size, dies in sizes.items()]
    small, medium, large = (rate for _, rate in found)
    assert small > medium > large > 0.3
    assert max(best.mesh.tensor for best, _ in found) <= 8
    assert all(best.time.hidden > 0 for best, _ in found)
    waiting = planned(96, 12288, rows * 1024, 1024)[1]
    assert waiting < 0.8 * medium
