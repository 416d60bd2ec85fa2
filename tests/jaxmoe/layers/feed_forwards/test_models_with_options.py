# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose layers have options: trained, decoded with a cache, counted, planned, refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.configs import from_json, to_json
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import (
    ClampedSwiGLUConfig,
    DenseConfig,
    GeGLUConfig,
    MoEConfig,
    ReLUSquaredConfig,
)
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import LayerConfig, ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.transformer import Transformer
from jaxmoe.planning.memory import least_memory
from jaxmoe.planning.sizes import Sizes
from jaxmoe.routing import SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of
from tests.support.model_options import moe_fields
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.one_step import batch, params_of, step_once
from tests.support.tolerances import assert_close

D, E, K, F, SHARED = TINY.embed_dim, TINY.moe.num_experts, TINY.moe.top_k, TINY.moe.expert_dim, 6
GATED = dataclasses.replace(
    TINY.moe,
    activation=ClampedSwiGLUConfig(limit=0.5),
    router=SoftmaxTopKConfig(logit_bias=LogitBiasConfig()),
    num_shared_experts=1,
    options=MoEOptions(shared_dim=SHARED, has_shared_gate=True, has_expert_bias=True),
)
UNGATED = dataclasses.replace(GATED, activation=ReLUSquaredConfig())
MODELS = {
    "gated": dataclasses.replace(TINY, moe=GATED),
    "ungated": dataclasses.replace(TINY, moe=UNGATED),
}
"""Two MoE layers with every option."""


def dense_model(activation):
    layer = LayerConfig(feed_forward=DenseConfig(hidden_dim=12, activation=activation))
    return dataclasses.replace(TINY, moe=None, layers=(layer,))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "replica2_data2_expert2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_moves_every_parameter(name, mesh):
    """And the step of eight devices is that of one."""
    model = MODELS[name]
    step = step_once(model, batch(), mesh=mesh)
    assert np.isfinite(step["loss"])
    for path, gradient in jax.tree_util.tree_leaves_with_path(step["gradient"]):
        assert np.abs(gradient).max() > 0.0, jax.tree_util.keystr(path)
    if mesh is not None:
        alone = step_once(model, batch())
        assert_close(step["gradient"], alone["gradient"], "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "dense"])
def test_cached_logits_equal_the_whole_forward(name):
    """A prompt of three tokens, then one after the other."""
    model = dense_model(GeGLUConfig()) if name == "dense" else MODELS[name]
    execution = ExecutionConfig()
    params = jax.tree.map(lambda leaf: leaf + 0.1, params_of(model))
    tokens, _ = tokens_for(model)

    @jax.jit
    def run(tokens, positions, cache):
        output = Transformer(model, execution).apply(
            {"params": params}, tokens, positions=positions, cache=cache
        )
        return output.logits, output.cache

    cache = initial_cache(model, execution, batch=len(tokens), length=LENGTH)
    logits = []
    for first, last in [(0, 3), *((i, i + 1) for i in range(3, LENGTH))]:
        part = tokens[:, first:last]
        positions = jnp.arange(first, last, dtype=jnp.int32)[None]
        found, cache = run(part, jnp.broadcast_to(positions, part.shape), cache)
        logits.append(found)
    whole = jax.jit(lambda t: Transformer(model, execution).apply({"params": params}, t).logits)
    assert_close(jnp.concatenate(logits, axis=1), whole(tokens), "end_to_end")


def sizes_below(model, name):
    rows = [row for row in parameter_table(model) if f"/{name}" in row.path]
    return sum(row.size for row in rows)


@pytest.mark.parametrize(("name", "parts"), [("gated", 2), ("ungated", 1)])
def test_parameters_and_flops_equal_counts_by_hand(name, parts):
    """Matrices count 2 FLOPs per value forward and 4 backward, biases none."""
    model = MODELS[name]
    experts = E * (parts + 1) * D * F
    biases = E * (parts * F + D)
    shared = (parts + 1) * D * SHARED
    assert sizes_below(model, "moe/") == 2 * (experts + biases + shared + D + D * E + E)
    flops = [flops_per_token(m, parameter_table(m), LENGTH) for m in (model, TINY)]
    ours = K * (parts + 1) * D * F + shared + D
    assert flops[0] - flops[1] == 6 * 2 * (ours - K * 3 * D * F)


def test_a_dense_layer_without_a_gate_has_two_thirds_of_the_parameters():
    sizes = [
        sizes_below(dense_model(activation), "feed_forward/")
        for activation in (GeGLUConfig(), ReLUSquaredConfig())
    ]
    assert sizes == [2 * 3 * D * 12, 2 * 2 * D * 12]


def test_plans_keep_one_array_of_hidden_units_where_there_is_no_gate():
    """With remat `kernels` a layer keeps the first product of its experts: 2 F values of a row, or
    F, in each of two layers."""
    plans = [
        plan_of(MODELS[name], MeshConfig(), batch_size=8, length=LENGTH, remat="kernels")
        for name in MODELS
    ]
    saved = [least_memory(Sizes.of(plan), "cpu").saved for plan in plans]
    assert saved[0] - saved[1] == 2 * 8 * LENGTH * K * F * 4


@pytest.mark.parametrize("name", MODELS)
def test_configs_survive_json(name):
    assert from_json(ModelConfig, to_json(MODELS[name])) == MODELS[name]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shared_scale": 0.5}, "moe.options.shared_scale=0.5 is about shared experts, and"),
        ({"shared_scale": 0.0}, "moe.options.shared_scale=0.0 must be above 0"),
        ({"shared_dim": 8}, "moe.options.shared_dim=8 is about shared experts, and"),
        ({"has_shared_gate": True}, "moe.options.has_shared_gate=True is about shared experts"),
        ({"shared_dim": 0, "num_shared_experts": 1}, "moe.options.shared_dim=0 must be at least 1"),
    ],
)
def test_a_shared_branch_that_is_not_there_is_refused(fields, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        MoEConfig(**moe_fields(**fields))


def test_the_shared_branch_has_the_units_of_its_experts_or_those_it_is_given():
    assert MoEConfig().num_shared_units == 0
    assert MoEConfig(num_shared_experts=2, expert_dim=24).num_shared_units == 48
    moe = MoEConfig(num_shared_experts=2, expert_dim=24, options=MoEOptions(shared_dim=20))
    assert moe.num_shared_units == moe.sizes.shared_dim == 20
