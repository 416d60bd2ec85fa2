# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes by granularity and sparsity. The tables of the ladder are in test_presets.py."""

import re

import pytest

from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.models.presets import ladder
from jaxmoe.models.sizing import (
    BASE_PARAMETERS,
    BASE_TOKENS,
    dense_parameters,
    moe_sizes,
    training_tokens,
)
from jaxmoe.routing import METHODS
from jaxmoe.routing.composition import RoutingWarning
from jaxmoe.scaling import HYPERP_BASE
from jaxmoe.scaling.initialize import parameter_table


def refusal(text):
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize("has_shared_expert", [True, False])
@pytest.mark.parametrize("granularity", [3, 8])
@pytest.mark.parametrize("sparsity", [1, 8])
def test_active_and_total_parameters(granularity, sparsity, has_shared_expert):
    """Active SwiGLU parameters equal the dense model's; the total is `sparsity` times that."""
    sizes = moe_sizes(
        96, granularity=granularity, sparsity=sparsity, has_shared_expert=has_shared_expert
    )
    moe = MoEConfig(**sizes)
    assert moe.num_shared_experts == has_shared_expert
    assert moe.top_k + moe.num_shared_experts == granularity
    assert (moe.num_experts + moe.num_shared_experts) == sparsity * granularity
    model = ModelConfig(num_layers=2, embed_dim=16, dense_dim=96, moe=moe)
    table = parameter_table(model)
    left_out = ("router", "norm")
    small = sum(row.size for row in table if row.declaration.role in left_out)
    active = table.active(moe.top_k, moe.num_experts)
    assert active - small == dense_parameters(model)
    assert table.total - active == 2 * (sparsity - 1) * 3 * 16 * 96


def test_a_granularity_of_2_leaves_the_router_without_a_gradient():
    sizes = moe_sizes(64, granularity=2, sparsity=8)
    assert sizes == {"num_experts": 15, "top_k": 1, "expert_dim": 32, "num_shared_experts": 1}
    with pytest.warns(RoutingWarning, match="gives the router no gradient"):
        MoEConfig(**sizes, **METHODS["hyperp"].parts())


def test_base_equals_ladder_depth_8():
    assert dense_parameters(ladder(8)) == BASE_PARAMETERS
    assert training_tokens(ladder(8)) == BASE_TOKENS == HYPERP_BASE.tokens
    assert BASE_TOKENS / BASE_PARAMETERS == pytest.approx(50, rel=1e-3)
    assert (HYPERP_BASE.num_layers, HYPERP_BASE.embed_dim) == (8, ladder(8).embed_dim)


def test_sizes_that_do_not_divide_are_refused():
    with refusal(
        "granularity=7 must divide model.dense_dim=96, for an expert has dense_dim / granularity"
        " hidden units: choose granularity=6, or a dense_dim that is a multiple of 7"
    ):
        moe_sizes(96, granularity=7, sparsity=2)


def test_granularity_1_with_shared_expert_is_refused():
    with refusal(
        "granularity=1 with a shared expert leaves none to be routed: choose granularity of 3 or"
        " more, or has_shared_expert=False"
    ):
        moe_sizes(96, granularity=1, sparsity=2)
    with refusal("granularity=0 and sparsity=2 must both be at least 1"):
        moe_sizes(96, granularity=0, sparsity=2)
