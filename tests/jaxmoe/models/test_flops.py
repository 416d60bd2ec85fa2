# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations against counts by hand, product by product."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxmoe import ExecutionConfig, Transformer, init_params
from jaxmoe.execution import KernelsConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.flops import flops_per_token, matmul_parameters
from jaxmoe.scaling.initialize import parameter_table

# D = 8, N = 4 heads of H = 2 on M = 2, E = 4, K = 2, F = 3, V = 10; layer 0 is dense.
MODEL = ModelConfig(
    vocab_size=10,
    num_layers=3,
    embed_dim=8,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=2, is_gated=True),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=3, num_shared_experts=1),
    dense_layers=(0,),
    dense_dim=5,
)
ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 8 * 4  # q, k and v, o, gate
DENSE = 3 * 8 * 5
EXPERT = 3 * 8 * 3
MOE = 8 * 4 + 2 * EXPERT + EXPERT  # router, top_k of the experts, shared
HEAD = 8 * 10


def test_parameters_that_a_token_meets():
    wanted = 3 * ATTENTION + DENSE + 2 * MOE + HEAD
    assert matmul_parameters(MODEL, parameter_table(MODEL)) == wanted
    tied = dataclasses.replace(MODEL, has_tied_embeddings=True)
    assert matmul_parameters(tied, parameter_table(tied)) == wanted


def test_more_experts_cost_no_more_but_the_router():
    moe = dataclasses.replace(MODEL.moe, num_experts=16)
    larger = dataclasses.replace(MODEL, moe=moe)
    costs = [matmul_parameters(model, parameter_table(model)) for model in (MODEL, larger)]
    assert costs[1] - costs[0] == 2 * 8 * 12


@pytest.mark.parametrize(
    ("window", "seen"),
    [(None, 6), (4, 4), (100, 6)],  # of 12 positions a query sees half, or at most the window
)
def test_flops_per_token(window, seen):
    """Forward 2 per multiply-add, backward twice that; attention: q k^T and its product with v."""
    attention = dataclasses.replace(MODEL.attention, window=window)
    model = dataclasses.replace(MODEL, attention=attention)
    products = 3 * ATTENTION + DENSE + 2 * MOE + HEAD
    scores = 3 * (4 * 2 * seen) * 2  # layers, heads times width times keys, two products
    assert flops_per_token(model, parameter_table(model), 12) == 6 * (products + scores)


def test_flops_of_a_dense_model():
    model = dataclasses.replace(MODEL, moe=None, dense_layers=())
    products = 3 * (ATTENTION + DENSE) + HEAD
    assert matmul_parameters(model, parameter_table(model)) == products


def test_flops_equal_xla_cost_analysis():
    """A whole forward and backward pass; one layer, because XLA counts the body of a loop once."""
    model = ModelConfig(
        vocab_size=128,
        num_layers=1,
        embed_dim=64,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16),
        moe=None,
        dense_dim=128,
    )
    execution = ExecutionConfig(kernels=KernelsConfig(attention="reference"))
    batch, length = 2, 32

    def loss(params, tokens):
        logits = Transformer(model, execution=execution).apply({"params": params}, tokens).logits
        return jax.nn.logsumexp(logits, axis=-1).sum()

    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    counted = jax.jit(jax.grad(loss)).lower(params, tokens).compile().cost_analysis()["flops"]
    ours = batch * length * flops_per_token(model, parameter_table(model), length)
    # The oracle computes the masked half of the scores as well.
    masked = batch * length * 12 * 4 * 16 * (length / 2)
    # What is left is norms, rotations, softmax and activations.
    assert 1.0 <= counted / (ours + masked) <= 1.08


def test_flops_of_layers_that_are_left_out_are_not_counted():
    """Half of the longest scan: one of the two MoE layers."""
    table = parameter_table(MODEL)
    left_out = flops_per_token(MODEL, table, 12) - flops_per_token(MODEL, table, 12, left_out=0.5)
    assert left_out == 6 * (ATTENTION + MOE + (4 * 2 * 6) * 2)
