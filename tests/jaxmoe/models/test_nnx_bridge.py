# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The transformer inside a model of Flax NNX, by `flax.nnx.bridge`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from flax.nnx.bridge import variables

from jaxmoe import Transformer
from jaxmoe.declarations import Declaration, Declared
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig

MODEL = ModelConfig(
    vocab_size=12,
    num_layers=1,
    embed_dim=8,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=2, top_k=1, expert_dim=4),
)
TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)


def test_a_declared_parameter_keeps_its_declaration():
    declaration = Declaration(role="norm", axes=("embed",), shape=(3,), init="ones", matrix=None)
    box = Declared(value=jnp.arange(3.0), declaration=declaration)
    attributes = variables.linen_vars_to_nnx_attrs({"params": {"gain": box}})
    found = variables.nnx_attrs_to_linen_vars(attributes)["params"]["gain"]
    assert isinstance(found, Declared) and found.declaration == declaration
    np.testing.assert_array_equal(found.value, box.value)


@pytest.mark.slow
def test_it_computes_and_differentiates_as_in_linen():
    bridged = bridge.lazy_init(bridge.ToNNX(Transformer(MODEL), rngs=nnx.Rngs(0)), TOKENS)
    params = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))

    @nnx.jit
    def step(module):
        return nnx.value_and_grad(lambda module: jnp.mean(module(TOKENS).logits ** 2))(module)

    value, grads = step(bridged)
    logits = jax.jit(Transformer(MODEL).apply)({"params": params}, TOKENS).logits
    np.testing.assert_allclose(value, np.mean(np.square(logits)), rtol=1e-5)
    found = nnx.to_pure_dict(grads)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(found["head"]))
