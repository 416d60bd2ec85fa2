# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that read what an earlier layer read, and scaled latents: formulas, meshes, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe.catalog import choice
from jaxmoe.contrib.family_layers.scaled_latent import ScaledLatentConfig
from jaxmoe.contrib.family_layers.shortcut import ShortcutDenseConfig
from jaxmoe.contrib.serving_lab.expert_slots import ExpertSlots
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.layers.feed_forwards.moe.config import SHORTCUT, MoEOptions
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, RoutingInputs, Stream, TokenInputs
from jaxmoe.models.config import LatentAttentionConfig, LayerConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.routing import SoftmaxGateConfig, ZeroComputationConfig
from jaxmoe.scaling.initialize import init_params
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device, values_of
from tests.support.models import TINY
from tests.support.tolerances import assert_close

ON_ONE = ExecutionConfig()
LATENT = {
    "num_heads": 4,
    "latent_dim": 12,
    "query_latent_dim": 8,
    "nope_dim": 6,
    "rope_dim": 4,
    "value_dim": 8,
}
MOE = dataclasses.replace(
    TINY.moe,
    num_shared_experts=1,
    gate=SoftmaxGateConfig(scale=1.7),
    zero_computation=ZeroComputationConfig(num_zero=0, num_copy=2, num_constant=0),
    options=MoEOptions(shared_dim=24, routed_input="shortcut"),
)
START = LayerConfig(feed_forward=ShortcutDenseConfig(hidden_dim=24))
MODEL = dataclasses.replace(
    TINY,
    num_layers=4,
    attention=ScaledLatentConfig(**LATENT),
    moe=MOE,
    layers=(START, LayerConfig()),
)
"""Two pairs of layers, as LongCat-Flash has them."""
INPUTS = {
    "token_mask": jnp.ones((2, 5), bool),
    "segment_ids": jnp.ones((2, 5), jnp.int32),
    "router_state": {},
}


def stream_of(seed):
    return jax.random.normal(jax.random.key(seed), (2, 5, MODEL.embed_dim))


def pair_of(params, x):
    """A pair of layers, half by half; the experts are a MoE layer without shared ones."""
    tokens = TokenInputs(token_mask=INPUTS["token_mask"])
    layer = LayerInputs({}, None, jnp.int32(0), jnp.int32(0))
    fed = []
    for kind, part in zip(MODEL.kinds[:2], params, strict=True):
        block = Block(kind.mixer, kind.feed_forward, MODEL.context, ON_ONE, False)
        mix = {"params": part}
        x = block.apply(mix, Stream(x), layer, tokens, method="mix")[0].x
        fed.append(rms_norm(x, part["feed_forward_norm"]["gain"], MODEL.norm_epsilon))
        dense = part["moe"]["shared"] if len(fed) == 2 else part["feed_forward"]
        x = x + FeedForward(MODEL.embed_dim, 24, ON_ONE).apply({"params": dense}, fed[-1])[0]
    alone = dataclasses.replace(MOE, num_shared_experts=0, options=None)
    routed = {name: part["moe"][name] for name in ("router", "experts")}
    experts = MoELayer(alone, MODEL.context, ON_ONE, False)
    return x + experts.apply({"params": routed}, fed[0], RoutingInputs(**INPUTS))[0]


def test_a_pair_equals_its_halves_one_by_one():
    model = dataclasses.replace(MODEL, num_layers=2)
    params = values_of(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(32, size=(2, 5)), jnp.int32)

    def by_halves(params):
        first = jax.tree.map(lambda leaf: leaf[0], params["shortcut_dense_blocks_0"])
        second = jax.tree.map(lambda leaf: leaf[0], params["moe_blocks_1"])
        return pair_of((first, second), params["embedding"]["weight"][tokens])

    def whole(params):
        return Transformer(model).apply({"params": params}, tokens, has_logits=False).hidden

    def normed(params):
        x = by_halves(params)
        return rms_norm(x, params["final_norm"]["gain"], model.norm_epsilon)

    weights = jnp.cos(jnp.arange(2 * 5 * 16.0)).reshape(2, 5, 16)
    results = [
        jax.jit(jax.value_and_grad(lambda params, run=run: jnp.sum(weights * run(params))))(params)
        for run in (whole, normed)
    ]
    assert_close(*results, "end_to_end")


def test_a_model_without_a_shortcut_is_refused_in_words():
    model = dataclasses.replace(MODEL, layers=())
    with pytest.raises(ValueError, match="routed_input=shortcut: no layer of the model carries"):
        init_params(model, jax.random.key(0))


def test_experts_in_slots_refuse_a_shortcut():
    with pytest.raises(ValueError, match="experts=slots:2: moe.options.routed_input is shortcut"):
        ExpertSlots(2).begin(MODEL, ON_ONE, {}, {})


def test_scales_of_latents_are_those_of_their_weights():
    """With q_b and the gains of the latents' norm multiplied it is latent attention, and its
    gradients are multiplied by the same factors."""
    scaled = ScaledLatentConfig(**LATENT)
    plain = LatentAttentionConfig(**LATENT)
    tokens = TokenInputs(token_mask=INPUTS["token_mask"])
    x = stream_of(1)
    build = scaled.build(MODEL.context, ON_ONE)
    params = nn.meta.unbox(build.init(jax.random.key(0), x, tokens, None))["params"]
    factors = jax.tree.map(lambda leaf: jnp.float32(1.0), params)
    factors |= {"q_b": jnp.float32((16 / 8) ** 0.5), "kv_norm": jnp.float32((16 / 12) ** 0.5)}
    products = jax.tree.map(jnp.multiply, params, factors)

    def loss_of(config):
        module = config.build(MODEL.context, ON_ONE)

        def loss(params):
            y = module.apply({"params": params}, x, tokens, None)[0]
            return jnp.sum(jnp.sin(3.0 * y))

        return jax.jit(jax.value_and_grad(loss))

    value, gradients = loss_of(scaled)(params)
    wanted, others = loss_of(plain)(products)
    assert_close(
        (value, gradients), (wanted, jax.tree.map(jnp.multiply, others, factors)), "matmul"
    )


def test_scales_need_a_latent_of_queries():
    with pytest.raises(ValueError, match="attention.query_latent_dim=None: the scale of queries"):
        ScaledLatentConfig(**LATENT | {"query_latent_dim": None})


def test_the_carried_array_is_the_input_of_the_feed_forward():
    config = choice("feed_forward", "shortcut_dense")(hidden_dim=24)
    layer = config.build(MODEL.context, ON_ONE, train=False)
    x = stream_of(2)
    params = nn.meta.unbox(layer.init(jax.random.key(0), x))
    y, outputs = layer.apply(params, x)
    np.testing.assert_array_equal(outputs.carry[SHORTCUT], x)
    np.testing.assert_array_equal(y, FeedForward(MODEL.embed_dim, 24, ON_ONE).apply(params, x)[0])


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("data4_tensor2", "fully_sharded"),
        ("replica2_data2_expert2", "data_parallel"),
        ("data2", "zero1"),
    ],
)
def test_a_mesh_changes_neither_loss_nor_gradients(mesh, rules):
    pair = dataclasses.replace(MODEL, num_layers=2)  # two amplify rounding to 3e-4 of a gradient
    assert_close(on_mesh(pair, mesh, rules), on_one_device(pair), "end_to_end")
