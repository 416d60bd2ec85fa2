# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of heads: token by token, in caches, on meshes; and what JetMoE adds beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe import generate
from jaxmoe.contrib.family_layers.expert_heads import ExpertHeadsConfig
from jaxmoe.contrib.family_layers.output_bias import BiasedMoEConfig, LayerRmsNormConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import MoEConfig
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import RoutingInputs, TokenInputs
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device, values_of
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

HEADS = ExpertHeadsConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    top_k=2,
    qk_norm="none",
    positions="none",
    options=AttentionOptions(has_output_bias=True),
)
MOE = BiasedMoEConfig(num_experts=4, top_k=2, expert_dim=12)
MODEL = dataclasses.replace(
    TINY, num_layers=2, attention=HEADS, moe=MOE, norm=LayerRmsNormConfig(layer_epsilon=1e-3)
)


def by_token(params, x):
    """Return the output, one token, expert and head after the other."""
    logits = x @ params["router"]
    keys, values = (jnp.einsum("bsd,dmh->bsmh", x, params[name]) for name in "kv")
    rows = []
    for row in range(x.shape[0]):
        for place in range(x.shape[1]):
            order = jnp.argsort(-logits[row, place])[: HEADS.top_k]
            gates = jax.nn.softmax(logits[row, place][order])
            y = params["o_bias"]
            for gate, expert in zip(gates, order, strict=True):
                q = jnp.einsum("d,dmh->mh", x[row, place], params["q"][expert])
                for head in range(HEADS.num_kv_heads):
                    seen = keys[row, : place + 1, head] @ q[head] / jnp.sqrt(6.0)
                    out = jax.nn.softmax(seen) @ values[row, : place + 1, head]
                    y = y + gate * (out @ params["o"][expert, head])
            rows.append(y)
    return jnp.stack(rows).reshape(x.shape)


def test_value_and_gradient_equal_a_loop_over_tokens_and_experts():
    tokens = TokenInputs(token_mask=jnp.ones((2, 4), bool))
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    layer = HEADS.build(MODEL.context, ExecutionConfig())
    params = nn.meta.unbox(layer.init(jax.random.key(1), x, tokens, None))["params"]
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    assert params["q"].shape == (5, 16, 2, 6) and params["o"].shape == (5, 2, 6, 16)

    def judged(function):
        def number(params, x):
            return jnp.sum(jnp.sin(function(params, x)))

        return jax.jit(jax.value_and_grad(number, (0, 1)))(params, x)

    ours = judged(lambda params, x: layer.apply({"params": params}, x, tokens, None)[0])
    with jax.numpy_rank_promotion("allow"):
        assert_close(ours, judged(by_token), "end_to_end")


def test_tokens_from_a_cache_are_those_of_whole_passes():
    params = values_of(MODEL)
    prompts = tokens_for(MODEL)[0][:2]
    greedy = {"num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
    tokens = generate(MODEL, params, prompts, **greedy)
    rows = jnp.concatenate([prompts, tokens], axis=1)
    logits = Transformer(MODEL).apply({"params": params}, rows).logits
    np.testing.assert_array_equal(logits[:, LENGTH - 1 : -1].argmax(-1), tokens)


def test_a_token_meets_the_projections_of_its_experts_alone():
    rows = {row.path: row for row in parameter_table(MODEL)}
    for path in rows:
        if path.endswith(("attention/q", "attention/o")):
            assert rows[path].declaration.share == HEADS.top_k / HEADS.num_experts
    (stack,) = MODEL.stacks
    names = {f"{stack.path}/attention/{name}" for name in ("q", "k", "v", "o", "router")}
    size = sum(row.size for path, row in rows.items() if path in names)
    assert size == 2 * HEADS.projection_parameters(MODEL.embed_dim)


def test_a_bias_is_added_to_the_output_of_experts():
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    mask = jnp.ones((2, 4), bool)
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    fields = {field.name: getattr(MOE, field.name) for field in dataclasses.fields(MoEConfig)}
    layers = [
        moe.build(MODEL.context, ExecutionConfig(), train=False)
        for moe in (MOE, MoEConfig(**fields))
    ]
    params = nn.meta.unbox(layers[0].init(jax.random.key(1), x, routing))["params"]
    bias = jnp.linspace(-1.0, 1.0, 16)
    rest = {name: value for name, value in params.items() if name != "bias"}
    assert rest.keys() == {"router", "experts"} and not params["bias"].any()
    biased = layers[0].apply({"params": rest | {"bias": bias}}, x, routing)[0]
    plain = layers[1].apply({"params": rest}, x, routing)[0]
    assert_close(biased, plain + bias[None, None], "matmul")


def test_norms_of_layers_have_an_epsilon_of_their_own():
    norm = LayerRmsNormConfig(layer_epsilon=0.5)
    x = jnp.linspace(-1.0, 1.0, 6)
    weights = {"params": {"gain": jnp.ones(6)}}
    for name, epsilon in (("attention_norm", 0.5), ("final_norm", 1e-6), (None, 1e-6)):
        y = norm.build(6, 1e-6, name=name).apply(weights, x)
        assert_close(y, rms_norm(x, jnp.ones(6), epsilon), "matmul")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_heads": 6}, "num_heads=6 must be attention.top_k=2 times attention.num_kv_heads=2"),
        ({"num_experts": 1}, "attention.top_k=2 must not exceed attention.num_experts=1"),
        ({"is_gated": True}, "are not for expert_heads, whose only bias is that of the output"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(HEADS, **fields)


def test_weights_in_few_bits_are_refused():
    with pytest.raises(ValueError, match="precision.weights=w8a16 is not for expert_heads"):
        HEADS.check_precision(PrecisionPolicy(weights="w8a16"))
    with pytest.raises(ValueError, match="norm.layer_epsilon=0.0 must be above 0"):
        LayerRmsNormConfig(layer_epsilon=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data4_tensor2", "data2"])
def test_a_mesh_changes_neither_loss_nor_gradients(mesh):
    rules = "fully_sharded" if mesh == "data4_tensor2" else "zero1"
    assert_close(on_mesh(MODEL, mesh, rules), on_one_device(MODEL), "end_to_end")
