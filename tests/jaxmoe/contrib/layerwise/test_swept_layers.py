# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Training with the loss after parallel sweeps: nearer to the exact output after one sweep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.catalog import choice
from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.contrib.layerwise.layer_parallel import sweep_streams
from jaxmoe.contrib.layerwise.swept_layers import SweptLayersConfig
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.tolerances import assert_close

LAYERS, ROWS, LENGTH, VOCAB = 4, 16, 16, 12
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
    moe=None,
    dense_dim=32,
)
ONE = ExecutionConfig()


def batch(seed):
    """Rows in which every token is the sum of the two before it: two layers at least."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    for place in range(2, LENGTH + 1):
        rows[:, place] = (rows[:, place - 1] + rows[:, place - 2]) % VOCAB
    weights = np.ones((ROWS, LENGTH), np.float32)
    return Batch(tokens=rows[:, :-1], targets=rows[:, 1:], loss_weights=weights)


def test_the_term_is_the_weighted_loss_after_the_sweeps():
    """As many sweeps as layers are exact, so that all draws are known with one sweep and with one
    layer."""
    model = dataclasses.replace(MODEL, num_layers=1)
    params = init_params(model, jax.random.key(0))
    given = {"train": True, "key": jax.random.key(1)}

    def loss(objective):
        return jax.jit(
            jax.value_and_grad(
                lambda params: forward_and_nll(
                    model, ONE, params, batch(0), objective=objective, **given
                )[0]
            )
        )(params)

    plain = loss(NextTokenConfig())
    both = loss(SweptLayersConfig(weight=0.5, sweeps=1))
    assert_close(both, jax.tree.map(lambda x: 1.5 * x, plain), kind="end_to_end")


def test_what_cannot_be_swept_is_refused():
    with pytest.raises(ValueError, match=r"objective.weight=0.0 must be above 0"):
        SweptLayersConfig(weight=0.0)
    with pytest.raises(ValueError, match=r"objective.sweeps=0 must be at least 1"):
        SweptLayersConfig(sweeps=0)
    optimizer = adamw(learning_rate=1e-2)
    options = {"execution": ONE, "objective": SweptLayersConfig()}
    with pytest.raises(ValueError, match="set training.gradients to backprop"):
        gradients = choice("gradients", "spsa")()
        make_train_step(MODEL, optimizer, gradients=gradients, clip=None, **options)
    with pytest.raises(ValueError, match="model.attention.is_causal=False"):
        attention = dataclasses.replace(MODEL.attention, is_causal=False)
        make_train_step(dataclasses.replace(MODEL, attention=attention), optimizer, **options)


@pytest.mark.slow
def test_a_regularised_model_is_nearer_to_its_exact_output_after_one_sweep():
    def distance(objective):
        """Largest probability that one sweep moves, mean over tokens; and the held-out nll."""
        optimizer = adamw(learning_rate=1e-2)
        step = make_train_step(MODEL, optimizer, execution=ONE, objective=objective)
        state = init_state(MODEL, optimizer, jax.random.key(0))
        for number in range(60):
            state, _ = step(state, batch(number + 1))
        held_out = batch(0)
        chain = Chain.of(MODEL, ONE, state.params)
        streams = sweep_streams(chain, jnp.asarray(held_out.tokens), None, LAYERS)
        first, exact = (jax.nn.softmax(chain.logits(x)) for x in (streams[0], streams[-1]))
        nll, _ = forward_and_nll(MODEL, ONE, state.params, held_out)
        return float(jnp.abs(first - exact).sum(-1).mean() / 2), float(nll) / (ROWS * LENGTH)

    plain, plain_nll = distance(NextTokenConfig())
    swept, swept_nll = distance(SweptLayersConfig(weight=0.5, sweeps=1))
    print(f"moved {plain:.4f} and {swept:.4f}, nll {plain_nll:.4f} and {swept_nll:.4f}")
    assert swept < 0.8 * plain
