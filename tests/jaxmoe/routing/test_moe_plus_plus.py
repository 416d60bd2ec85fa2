# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MoE++: experts without computation, gating residuals, heterogeneous balance and capacity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe import computation
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.feed_forwards.moe.zero_computation import apply_zero_computation
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.models.config import MoEConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.routing import (
    CapacityConfig,
    HeterogeneousBalanceConfig,
    MoEPlusPlusConfig,
    RouterStatistics,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    ZeroComputationConfig,
)
from jaxmoe.routing.capacity import limit
from jaxmoe.scaling.initialize import init_params
from sharding.assignments import Assignments
from tests.support.models import BATCH, LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

WIDTH, TOKENS = 5, 7
FREE = ZeroComputationConfig(num_zero=1, num_copy=1, num_constant=2)
LAYER = MoEConfig(
    num_experts=4,
    top_k=2,
    expert_dim=10,
    router=MoEPlusPlusConfig(),
    gate=SoftmaxGateConfig(),
    balancers=(HeterogeneousBalanceConfig(),),
    zero_computation=FREE,
)
ZERO, COPY, CONSTANT = 4, 5, 6
MODEL = dataclasses.replace(TINY, moe=LAYER)


def free_output(expert, gate, mix=None, x=None):
    """Return the output of tokens that are all sent to one expert."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.float32) if x is None else x
    constants = jnp.asarray(rng.normal(size=(2, WIDTH)), jnp.float32)
    mix = jnp.zeros((WIDTH, 2, 2)) if mix is None else mix
    ids = jnp.tile(jnp.asarray([expert, LAYER.num_routed], jnp.int32), TOKENS)
    assignments = Assignments(
        token_ids=jnp.repeat(jnp.arange(TOKENS, dtype=jnp.int32), 2),
        expert_ids=ids,
        gates=jnp.tile(jnp.asarray([gate, 0.0], jnp.float32), TOKENS),
        top_k=2,
    )
    y = apply_zero_computation(x, assignments, {"constants": constants, "mix": mix}, FREE, 4)
    return np.asarray(y), np.asarray(x), np.asarray(constants)


def test_zero_gives_nothing_and_copy_gives_its_input_exactly():
    y, x, _ = free_output(ZERO, 0.7)
    assert not y.any()
    y, x, _ = free_output(COPY, 0.7)
    np.testing.assert_array_equal(y, np.float32(0.7) * x)
    y, _, _ = free_output(0, 0.7)  # an expert that computes is not served here
    assert not y.any()


def test_constant_without_weights_is_half_input_half_vector():
    for number in (0, 1):
        y, x, constants = free_output(CONSTANT + number, 0.6)
        assert_close(y, 0.6 * (0.5 * x + 0.5 * constants[number]), "elementwise")


def test_constant_mixes_by_its_own_softmax():
    mix = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, 2, 2)), jnp.float32)
    y, x, constants = free_output(CONSTANT + 1, 0.6, mix)
    logits = x @ np.asarray(mix)[:, 1]
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert_close(y, 0.6 * (shares[:, :1] * x + shares[:, 1:] * constants[1]), "matmul")


def test_experts_without_computation_are_not_dispatched(monkeypatch):
    """Only rows of experts that compute are dispatched; statistics contain all."""
    handed = {}

    def recorded(x, assignments, experts, weights, *, num_experts, **given):
        handed["ids"], handed["gates"] = assignments.expert_ids, assignments.gates
        return jnp.zeros_like(x), jnp.zeros((num_experts,))

    monkeypatch.setattr(computation, "expert_parallel", recorded)
    layer = MoELayer(LAYER, MODEL.context, ExecutionConfig(), train=True)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(BATCH, LENGTH, 16)), jnp.float32)
    mask = jnp.ones((BATCH, LENGTH), bool)
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    weights = jax.tree.map(lambda leaf: leaf[0], init_params(MODEL, jax.random.key(0)))
    moe = weights["moe_blocks_0"]["moe"] if "moe_blocks_0" in weights else None
    assert moe is not None

    @jax.jit
    def run(moe, x):
        _, outputs = layer.apply({"params": moe}, x, routing)
        return outputs.statistics.counts, handed["ids"], handed["gates"]

    counts, ids, gates = (np.asarray(array) for array in run(moe, x))
    assert counts.sum() == BATCH * LENGTH * LAYER.top_k and counts[LAYER.num_experts :].sum() > 0
    wanted = counts[: LAYER.num_experts]
    assert np.bincount(ids, minlength=5)[:4].tolist() == wanted.tolist()
    assert ids.max() <= LAYER.num_experts
    assert not gates[ids == LAYER.num_experts].any()


def forward(model, params):
    tokens, _ = tokens_for(model)
    return jax.jit(Transformer(model).apply)({"params": params}, tokens)


def test_zero_residual_is_softmax_topk():
    """W_g starts at 0, where the router is softmax top-k."""
    params = init_params(MODEL, jax.random.key(0))
    router = params["moe_blocks_0"]["moe"]["router"]
    assert router["residual"].shape == (2, 8, 8) and not router["residual"].any()
    plain = dataclasses.replace(MODEL, moe=dataclasses.replace(LAYER, router=SoftmaxTopKConfig()))
    without = jax.tree.map(lambda leaf: leaf, params)
    del without["moe_blocks_0"]["moe"]["router"]["residual"]
    assert_close(forward(MODEL, params).logits, forward(plain, without).logits, "elementwise")


def test_residual_adds_the_logits_of_the_previous_layer():
    """It changes the second layer only, and its gradient comes from the second alone."""
    params = init_params(MODEL, jax.random.key(0))
    tokens, _ = tokens_for(MODEL)

    def statistics(residual):
        moved = jax.tree.map(lambda leaf: leaf, params)
        moved["moe_blocks_0"]["moe"]["router"]["residual"] = residual
        return Transformer(MODEL).apply({"params": moved}, tokens).statistics

    def loss(residual):
        found = statistics(residual)
        return jnp.sum(found.prob_sum**2), found

    slope_of, zero = jax.jit(jax.grad(loss, has_aux=True)), jnp.zeros((2, 8, 8))
    _, changed = slope_of(zero + jnp.eye(8)[None])
    slope, plain = slope_of(zero)
    assert_close(changed.prob_sum[0], plain.prob_sum[0], "elementwise")
    assert np.abs(changed.prob_sum[1] - plain.prob_sum[1]).max() > 1e-3
    assert not np.asarray(slope[0]).any() and np.abs(slope[1]).max() > 0.0


def test_heterogeneous_loss_has_its_minimum_at_the_target_share():
    """Descent on the loss alone: experts that compute end with tau E / (tau E + Z) of the load."""
    computing, free, tau = 16, 4, 0.75
    balancer = HeterogeneousBalanceConfig(coefficient=1.0, computing_share=tau)

    def loss(logits):
        """Return the loss of a router whose loads equal its probabilities."""
        probs = jax.nn.softmax(logits)
        zero = jnp.zeros(())
        statistics = RouterStatistics(
            num_tokens=jnp.ones(()),
            counts=probs,
            kept=probs,
            prob_sum=probs,
            z_sum=zero,
            entropy_sum=zero,
        )
        return balancer.loss(statistics, num_free=free)

    logits = jnp.asarray(np.random.default_rng(3).normal(size=computing + free), jnp.float32)
    step = jax.jit(lambda z: z - 1.0 * jax.grad(loss)(z))
    for _ in range(3000):
        logits = step(logits)
    shares = np.asarray(jax.nn.softmax(logits))
    wanted = tau * computing / (tau * computing + free)
    assert shares[:computing].sum() == pytest.approx(wanted, abs=1e-3)
    assert wanted == 0.75
    assert loss(jnp.zeros(computing + free)) == pytest.approx(1.0, abs=1e-6)


def test_heterogeneous_loss_without_free_experts_is_load_balance():
    logits = np.random.default_rng(4).normal(size=(24, 6))
    counts = np.bincount(logits.argmax(-1), minlength=6)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    zero = jnp.zeros(())
    statistics = RouterStatistics(
        num_tokens=jnp.float32(24.0),
        counts=jnp.asarray(counts, jnp.float32),
        kept=jnp.asarray(counts, jnp.float32),
        prob_sum=jnp.asarray(probs.sum(0), jnp.float32),
        z_sum=zero,
        entropy_sum=zero,
    )
    for share in (0.3, 1.0):
        balancer = HeterogeneousBalanceConfig(coefficient=1.0, computing_share=share)
        wanted = 6 * np.sum(counts / 24 * probs.mean(0))
        assert_close(balancer.loss(statistics), wanted, "matmul")


def test_heterogeneous_capacity():
    """Limits of both kinds, whose sum over experts is the factor times all assignments."""
    config = CapacityConfig(factor=1.0, computing_share=0.5)
    length, top_k, computing, free = 120, 2, 4, 2
    rows = config.rows(length, top_k, computing, num_free=free)
    free_rows = config.free_rows(length, top_k, computing, free)
    assert (rows, free_rows) == (30, 60)
    assert computing * rows + free * free_rows == length * top_k
    ids = np.stack([np.zeros(length, int), np.full(length, 4)], axis=1)
    assignments = Assignments(
        token_ids=jnp.repeat(jnp.arange(length, dtype=jnp.int32), top_k),
        expert_ids=jnp.asarray(ids.ravel(), jnp.int32),
        gates=jnp.full((length * top_k,), 0.5, jnp.float32),
        top_k=top_k,
    )
    kept = limit(assignments, config, sequence_length=length, num_experts=computing, num_free=free)
    counts = np.bincount(np.asarray(kept.expert_ids), minlength=7)
    assert counts.tolist() == [30, 0, 0, 0, 60, 0, 150]


def test_sizes_without_any_are_refused():
    with pytest.raises(ValueError, match="^zero_computation without any expert"):
        ZeroComputationConfig(num_zero=0, num_copy=0, num_constant=0)
    with pytest.raises(ValueError, match="zero_computation.num_copy=-1 must be 0 or more"):
        ZeroComputationConfig(num_copy=-1)
