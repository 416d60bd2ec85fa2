# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What gathered experts and their gradients take on a TPU, by hand."""

import dataclasses

import pytest

from jaxmoe.models.config import MoEConfig
from jaxmoe.planning.memory import estimate_memory
from sharding.mesh import MeshConfig
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

EXPERTS, HIDDEN = 8, 128
WHOLE, PART = MeshConfig(data=8), MeshConfig(data=4, expert=2)


def _experts(width, mesh, remat, compute="bfloat16"):
    """Return the bytes of gathered experts and of gradients, without activations, over those of one
    matrix in the dtype of products."""
    model = dataclasses.replace(
        WIDE, embed_dim=width, moe=MoEConfig(num_experts=EXPERTS, top_k=2, expert_dim=HIDDEN)
    )
    fields = {"compute": compute, "remat": remat, "rules": "fully_sharded"}
    plan = plan_of(model, mesh, batch_size=8, length=64, **fields)
    itemsize = 2 if compute == "bfloat16" else 4
    activations = 64 * 2 * (4 * width + 4 * HIDDEN) * itemsize
    matrix = EXPERTS * width * HIDDEN * itemsize
    return (estimate_memory(plan, "tpu").experts - activations) / matrix


@pytest.mark.parametrize("remat", ["full", "attention"])
def test_a_gradient_that_is_summed_whole_lies_beside_the_gathered_matrices(remat):
    """In float32, in bfloat16 on its way, and once more as it is summed: four of a matrix."""
    assert _experts(1024, WHOLE, remat) == pytest.approx(3 + 4)
    assert _experts(1024, WHOLE, remat, "float32") == pytest.approx(3 + 1)


@pytest.mark.parametrize("remat", ["kernels", "dots", "none"])
def test_hidden_units_that_are_kept_save_one_matrix_beside_a_whole_sum(remat):
    assert _experts(1024, WHOLE, remat) == pytest.approx(2 + 4)
    assert _experts(1024, PART, remat) == pytest.approx(3)


@pytest.mark.parametrize(
    ("width", "compute", "matrices"),
    [(1024, "bfloat16", 3), (64, "bfloat16", 3), (32, "bfloat16", 7), (32, "float32", 3)],
)
def test_a_gradient_is_scattered_as_it_is_summed_where_parts_are_whole_tiles(
    width, compute, matrices
):
    """Over four of eight devices: 16 columns in bfloat16 and 8 in float32 are a tile."""
    assert _experts(width, PART, "full", compute) == pytest.approx(matrices)
