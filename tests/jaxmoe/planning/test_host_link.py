# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between devices and host memory, and their time, against numbers computed by hand."""

import dataclasses

import pytest

from jaxmoe.execution import OffloadConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.host_link import disk_bytes, host_traffic
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.step_time import predict_time
from sharding.mesh import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of

ONE = MeshConfig(data=1)
MODEL = ModelConfig(
    vocab_size=64,
    num_layers=4,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
    moe=None,
    dense_dim=32,
)
LAYERS = 4 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 8)
"""Attention, SwiGLU, the norms of both and those of queries and keys."""
OTHERS = 2 * 64 * 16 + 16
"""Embedding, head and the last norm."""
STREAM = 4 * 8 * 16 * 4
"""Bytes of the stream of four sequences of eight tokens."""


def bytes_of(mesh=ONE, accumulation=1, **fields):
    plan = plan_of(MODEL, mesh, batch_size=4, length=8, **fields)
    plan = dataclasses.replace(plan, accumulation=accumulation)
    found = {one.reason: (one.to_device, one.to_host) for one in host_traffic(plan)}
    return plan, found


def test_the_model_has_the_parameters_of_the_formulas():
    assert sum(row.size for row in plan_of(MODEL, ONE).table) == LAYERS + OTHERS


@pytest.mark.parametrize("parts, again", [(1, 0), (2, 2), (3, 4), (4, 4)])  # 4 layers in 2 or 4
def test_moments_come_and_go_once_and_a_loop_fetches_its_last_part_twice(parts, again):
    _, found = bytes_of(offload=OffloadConfig(parts=parts))
    extra = 8 * LAYERS / again if again else 0
    assert found == {"moments": (8 * (LAYERS + OTHERS) + extra, 8 * (LAYERS + OTHERS))}


def test_streamed_layers_by_hand():
    offload = OffloadConfig(parameters="host", parts=4)
    _, found = bytes_of(accumulation=2, offload=offload, remat="offload")
    layers = 4 * LAYERS
    assert found["layers"] == (2 * layers * 9 / 4, 0)
    # Two gradients and a sum leave; the sum is made of two arrays, and the norm reads it.
    assert found["gradients of layers"] == ((2 + 1) * layers, (2 + 1) * layers)
    assert found["update of layers"] == (2 * layers * 5 / 4, layers)
    assert found["inputs of layers"] == (2 * 4 * STREAM / 2, 2 * 4 * STREAM / 2)


def test_files_cost_the_link_and_the_disk():
    plan, found = bytes_of(offload=OffloadConfig(optimizer="files", parts=4))
    state = 8 * (LAYERS + OTHERS)
    assert found == {"moments": (state, state)} and disk_bytes(plan) == state
    chip = dataclasses.replace(CHIPS["v5e"], host_bandwidth=1e6, disk_bandwidth=1e5)
    time = predict_time(plan, chip)
    assert time.host == {"moments": pytest.approx(2 * state / 1e6)}
    assert time.disk == pytest.approx(state / 1e5)
    whole = predict_time(plan_of(MODEL, ONE, batch_size=4, length=8), chip)
    assert time.step == pytest.approx(whole.step + state / 1e5)
    memory = estimate_memory(plan, "cpu")
    assert (memory.disk, memory.host) == (2 * state, state * 3 / 4)
    assert memory.optimizer == 2 * 4  # two counters


def test_each_device_of_a_mesh_moves_its_shards():
    plan, found = bytes_of(MeshConfig(data=4), offload=OffloadConfig())
    whole = sum(row.size for row in plan.table if not any(row.spec))
    cut = LAYERS + OTHERS - whole
    assert 0 < whole < cut
    assert found == {"moments": (8 * (whole + cut / 4), 8 * (whole + cut / 4))}
