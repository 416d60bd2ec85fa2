# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stress tests: 200 training steps in difficult settings stay finite.

All tokens at one expert from the first step; top-8 of 256 experts; top-1 of 96 experts. In the last
the load must also become even over the last 20 steps together: one batch has 21 tokens per expert
and is uneven by chance.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.data import LanguageMixtureConfig
from jaxmoe.data.loader import Loader
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.routing import METHODS, LossFreeConfig, SigmoidTopKConfig, SoftmaxGateConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step

# Not `trains`: of a model so small the compilation takes longer.
pytestmark = pytest.mark.slow

STEPS, ROWS, LENGTH, WINDOW = 200, 32, 64, 20
DATA = LanguageMixtureConfig(num_languages=8, symbols_per_language=16)
CAUSAL = [name for name, method in METHODS.items() if method.router.traits.is_causal]


def train(parts, *, num_experts, top_k, prepare=lambda params: params, rows=ROWS, length=LENGTH):
    """Return loss and load [L E] of every step; no step may be skipped."""
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_dim=16)
    moe = dataclasses.replace(moe, **parts)
    model = ModelConfig(
        vocab_size=128,
        num_layers=2,
        embed_dim=32,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
        moe=moe,
    )
    schedule = LinearConfig(warmup_steps=10).build(STEPS)
    optimizer = AdamWConfig(learning_rate=1e-2).build(parameter_table(model), schedule)
    state = init_state(model, optimizer, jax.random.key(0))
    state = dataclasses.replace(state, params=prepare(state.params))
    loader = Loader(DATA.build(0), batch_size=rows, sequence_length=length, seed=0)
    step = make_train_step(model, optimizer)
    losses, loads = [], []
    for number in range(STEPS):
        state, metrics = step(state, loader.batch(number))
        assert not metrics.is_skipped, f"step {number}"
        losses.append(float(metrics.loss))
        loads.append(np.asarray(metrics.load))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    return np.array(losses), np.array(loads)


def to_one_expert(params):
    """All activations share one large feature, and one expert reads it."""
    params = jax.tree.map(lambda leaf: leaf, params)
    table = params["embedding"]["weight"]
    params["embedding"]["weight"] = table.at[:, 0].set(20.0 * jnp.abs(table).max())
    router = params["moe_blocks_0"]["moe"].get("router", {})  # some have no parameters
    for name, leaf in router.items():
        if name == "weight":
            router[name] = leaf.at[:, 0, 3].set(20.0)
    return params


@pytest.mark.parametrize("method", CAUSAL)
def test_all_tokens_to_one_expert(method):
    parts = METHODS[method].parts()
    if parts["capacity"] is not None:
        parts["capacity"] = parts["capacity"].sized_for(rows_per_expert=8.0)
    _, loads = train(parts, num_experts=8, top_k=2, prepare=to_one_expert, rows=8, length=32)
    assert np.isfinite(loads).all() and math.isclose(loads[-1, 0].sum(), 1.0, rel_tol=1e-5)


@pytest.mark.large
@pytest.mark.parametrize("method", ["hyperp", "deepseek_v3"])
def test_256_experts_top_8(method):
    train(METHODS[method].parts(), num_experts=256, top_k=8, rows=8)


EVEN_96 = {
    "quantile": METHODS["quantile"].parts() | {"gate": SoftmaxGateConfig()},
    "loss_free of rate 0.01": {
        "router": SigmoidTopKConfig(bias=LossFreeConfig(rate=0.01)),
        "gate": SoftmaxGateConfig(),
        "balancers": (),
    },
}


@pytest.mark.large
@pytest.mark.parametrize("name", EVEN_96)
def test_96_experts_top_1(name):
    """Max violation below 1 and no dead expert, in both layers."""
    _, loads = train(EVEN_96[name], num_experts=96, top_k=1)
    window = loads[-WINDOW:].mean(0)
    assert (window.max(-1) * 96 - 1.0 < 1.0).all()
    assert (window > 0.0).all()
