# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention with gates: those of the output matrix of latent attention, caches, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe import generate
from jaxmoe.contrib.linear_attention.gated_latent import GatedLatentConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import TokenInputs
from jaxmoe.models.config import LatentAttentionConfig
from jaxmoe.models.transformer import Transformer
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device, values_of
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

SIZES = {"num_heads": 4, "latent_dim": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MODEL = dataclasses.replace(TINY, num_layers=2, attention=GatedLatentConfig(**SIZES))


def test_the_output_is_a_sum_over_heads_times_their_gates():
    """Latent attention with the output matrix of one head after another, zeros for the others."""
    tokens = TokenInputs(token_mask=jnp.ones((2, 7), bool))
    x = jax.random.normal(jax.random.key(0), (2, 7, 16))
    layer = MODEL.attention.build(MODEL.context, ExecutionConfig())
    params = nn.meta.unbox(layer.init(jax.random.key(1), x, tokens, None))["params"]
    params = jax.tree.map(lambda x: 3.0 * x, params)
    plain = LatentAttentionConfig(**SIZES).build(MODEL.context, ExecutionConfig())

    def gated(params):
        return layer.apply({"params": params}, x, tokens, None)[0]

    def summed(params):
        gates = jax.nn.sigmoid(jnp.einsum("bsd,dn->bsn", x, params["gate"]))
        rest = {name: value for name, value in params.items() if name != "gate"}
        total = jnp.zeros_like(x)
        for head in range(4):
            mask = (jnp.arange(4) == head)[:, None, None]
            alone = rest | {"o": jnp.where(mask, params["o"], 0.0)}
            y = plain.apply({"params": alone}, x, tokens, None)[0]
            total += gates[..., head, None] * y
        return total

    def judged(function):
        return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(function(params)))))

    assert_close(judged(gated)(params), judged(summed)(params), "end_to_end")


def test_tokens_from_a_cache_are_those_of_whole_passes():
    params = values_of(MODEL)
    prompts = tokens_for(MODEL)[0][:2]
    greedy = {"num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
    tokens = generate(MODEL, params, prompts, **greedy)
    rows = jnp.concatenate([prompts, tokens], axis=1)
    logits = Transformer(MODEL).apply({"params": params}, rows).logits
    np.testing.assert_array_equal(logits[:, LENGTH - 1 : -1].argmax(-1), tokens)


@pytest.mark.slow
def test_a_mesh_changes_neither_loss_nor_gradients():
    mesh = on_mesh(MODEL, "data4_tensor2", "fully_sharded")
    assert_close(mesh, on_one_device(MODEL), "end_to_end")
