# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: loss and gradient are those of GRPO with loops, and have its properties."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.contrib.rl.advantages import answer_weights, group_advantages, k3
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.optim import adamw
from jaxmoe.routing import METHODS, LoadBalanceConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training import OBJECTIVES
from jaxmoe.training.cross_entropy import token_nll
from jaxmoe.training.loss import forward_and_nll, token_log_probs
from jaxmoe.training.objective import TokenGiven
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, make_mesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import RingConfig

GROUPS, SIZE, PROMPT, LONGEST, VOCAB = 3, 4, 2, 5, 7
ROWS, LENGTH = GROUPS * SIZE, PROMPT + LONGEST
VARIANTS = [*itertools.product(("grpo", "dr_grpo", "rloo"), ("sequence", "token", "constant"))]


def grpo(log_probs, old, reference, rewards, lengths, variant, beta, low=0.2, high=0.3):
    """Loss and its gradient in the log-probabilities of the answers' tokens, with loops."""
    advantage, aggregation = variant
    loss, gradient = 0.0, np.zeros_like(log_probs)
    for row in range(ROWS):
        group = [float(rewards[i]) for i in range(ROWS) if i // SIZE == row // SIZE]
        mean = sum(group) / SIZE
        spread = (sum((reward - mean) ** 2 for reward in group) / (SIZE - 1)) ** 0.5
        a = rewards[row] - mean
        if advantage == "grpo":
            a /= spread + 1e-6
        if advantage == "rloo":
            a = rewards[row] - (sum(group) - rewards[row]) / (SIZE - 1)
        if aggregation == "sequence":
            factor = 1 / (ROWS * lengths[row])
        else:
            factor = 1 / (sum(lengths) if aggregation == "token" else ROWS * LONGEST)
        for s in range(lengths[row]):
            r = np.exp(log_probs[row, s] - old[row, s])
            kept = min(max(r, 1 - low), 1 + high)
            further = reference[row, s] - log_probs[row, s]
            loss += factor * (-min(r * a, kept * a) + beta * (np.exp(further) - further - 1))
            is_held = (a >= 0 and r > 1 + high) or (a < 0 and r < 1 - low)
            slope = 0.0 if is_held else -a * r
            gradient[row, s] = factor * (slope + beta * (1 - np.exp(further)))
    return loss, gradient


def on_rows(answers, lengths):
    """Numbers of answers [B longest] at their places in rows [B S], 0 elsewhere."""
    rows = np.zeros((ROWS, LENGTH), np.float32)
    for row, length in enumerate(lengths):
        rows[row, PROMPT - 1 : PROMPT - 1 + length] = answers[row, :length]
    return rows


@pytest.fixture(scope="module")
def drawn():
    """Answers with log-probabilities of three models, rewards, and rows."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST + 1, ROWS)
    rewards = rng.integers(0, 3, ROWS) / 2
    logits = jnp.asarray(rng.normal(size=(ROWS, LENGTH, VOCAB)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32)
    log_probs = np.asarray(-token_nll(logits, targets), np.float64)
    own = log_probs[:, PROMPT - 1 : PROMPT - 1 + LONGEST]
    old, reference = (own + rng.normal(scale=0.3, size=own.shape) for _ in range(2))
    return lengths, rewards, logits, targets, own, old, reference


def loss_of(objective, logits, targets, lengths, rewards, old, reference):
    """Loss of a step from logits, as the library composes it."""
    advantages = group_advantages(rewards.reshape(GROUPS, SIZE), objective.advantage).reshape(-1)
    weights = answer_weights(lengths.astype(float), objective.aggregation, LONGEST)
    ones = np.ones((ROWS, LONGEST))
    extra: Any = {
        "advantages": on_rows(ones * advantages[:, None], lengths),
        "old_log_probs": on_rows(old, lengths),
    }
    if objective.beta:
        extra["reference_log_probs"] = on_rows(reference, lengths)
    weights = on_rows(ones * weights[:, None], lengths)
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    batch = Batch(tokens=tokens, targets=tokens, loss_weights=weights, extra=extra)
    given = TokenGiven(weights=jnp.asarray(weights), extra=jax.tree.map(jnp.asarray, extra))
    losses = objective.token_loss(token_nll(logits, targets), given)
    return jnp.sum(losses) / objective.num_tokens(batch)


@pytest.mark.rows(1)
@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_loss_and_gradient_equal_grpo_with_loops(variant, drawn):
    lengths, rewards, logits, targets, own, old, reference = drawn
    objective = PolicyGradientConfig(
        advantage=variant[0], aggregation=variant[1], beta=0.1, clip_high=0.3
    )
    given = (targets, lengths, rewards, old, reference)
    value, gradient = jax.value_and_grad(lambda z: loss_of(objective, z, *given))(logits)
    wanted, slopes = grpo(own, old, reference, rewards, lengths, variant, 0.1)
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)
    _, chain = jax.vjp(lambda z: -token_nll(z, targets), logits)
    np.testing.assert_allclose(
        gradient, chain(jnp.asarray(on_rows(slopes, lengths)))[0], rtol=1e-4, atol=1e-7
    )


def test_at_ratio_one_the_gradient_is_reinforce_with_a_baseline(drawn):
    lengths, rewards, logits, targets, own, _, reference = drawn
    objective = PolicyGradientConfig(advantage="dr_grpo", aggregation="token")
    given = (targets, lengths, rewards, own, reference)
    gradient = jax.grad(lambda z: loss_of(objective, z, *given))(logits)

    def reinforce(z):
        baseline = rewards - rewards.reshape(GROUPS, SIZE).mean(1).repeat(SIZE)
        weights = on_rows(np.ones((ROWS, LONGEST)) * baseline[:, None], lengths)
        return jnp.sum(token_nll(z, targets) * weights) / float(lengths.sum())

    np.testing.assert_allclose(gradient, jax.grad(reinforce)(logits), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_have_no_advantage(reward):
    for name in ("grpo", "dr_grpo", "rloo"):
        np.testing.assert_array_equal(group_advantages(np.full((2, 7), reward), name), 0.0)


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_equal_rewards_give_a_gradient_that_is_zero_bitwise(aggregation, drawn):
    lengths, _, logits, targets, _, old, reference = drawn
    objective = PolicyGradientConfig(aggregation=aggregation)
    rewards = np.repeat([0.0, 0.7, 1.0], SIZE)
    given = (targets, lengths, rewards, old, reference)
    gradient = jax.grad(lambda z: loss_of(objective, z, *given))(logits)
    np.testing.assert_array_equal(gradient, 0.0)


def test_cut_tokens_are_those_without_a_gradient():
    rng = np.random.default_rng(1)
    log_ratio = rng.normal(scale=0.5, size=(40, 9)).astype(np.float32)
    advantages = rng.choice([-1.0, 0.5, 2.0], (40, 9)).astype(np.float32)
    objective = PolicyGradientConfig(clip_low=0.1, clip_high=0.3)
    given = TokenGiven(
        weights=jnp.ones((40, 9)),
        extra={"advantages": jnp.asarray(advantages), "old_log_probs": jnp.zeros((40, 9))},
    )
    slopes = jax.grad(lambda nll: jnp.sum(objective.token_loss(nll, given)))(
        -jnp.asarray(log_ratio)
    )
    cut = objective.is_cut(log_ratio, advantages)
    np.testing.assert_array_equal(cut, np.asarray(slopes) == 0.0)
    assert 0.2 < cut.mean() < 0.5
    assert not objective.is_cut(np.zeros((2, 3)), np.ones((2, 3))).any()


MODEL = ModelConfig(vocab_size=VOCAB, num_layers=1, embed_dim=8)


@pytest.fixture(scope="module")
def rows(drawn):
    """A batch, and parameters of a model that reads it."""
    lengths, rewards, _, targets, _, old, _ = drawn
    weights = on_rows(np.ones((ROWS, LONGEST)), lengths)
    batch = Batch(
        tokens=np.asarray(targets),
        targets=np.asarray(targets),
        loss_weights=weights,
        segment_ids=np.ones((ROWS, LENGTH), np.int32),
        extra={
            "advantages": weights * rewards[:, None].astype(np.float32),
            "old_log_probs": on_rows(old, lengths),
        },
    )
    return init_params(MODEL, jax.random.key(0)), jax.tree.map(jnp.asarray, batch)


def gradient_of(params, batch, execution=None):
    execution = execution or ExecutionConfig()
    given = {"objective": PolicyGradientConfig()}

    def loss(params):
        return forward_and_nll(MODEL, execution, params, batch, **given)[0]

    return jax.value_and_grad(loss)(params)


@pytest.mark.slow
def test_in_chunks_the_loss_and_gradient_are_the_same(rows):
    params, batch = rows
    whole = gradient_of(params, batch)
    parts = gradient_of(params, batch, ExecutionConfig(loss_chunk=3))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_log_probs_are_those_that_the_loss_reads(rows):
    params, batch = rows
    objective = PolicyGradientConfig()
    found = token_log_probs(MODEL, ExecutionConfig(), params, batch, objective=objective)
    plain = dataclasses.replace(batch, extra={})
    nll, _ = forward_and_nll(MODEL, ExecutionConfig(), params, plain, objective=objective)
    np.testing.assert_allclose(-np.sum(found * batch.loss_weights), nll, rtol=1e-6)


def test_log_probs_of_micro_batches_are_those_of_the_batch_in_less_memory(rows):
    """One micro-batch of 16 after the other, and the same numbers."""
    params, batch = rows
    micro_rows = batch.tokens.shape[0]
    batch = jax.tree.map(lambda x: jnp.tile(x, (16,) + (1,) * (x.ndim - 1)), batch)

    def log_probs(micro_rows):
        return (
            jax.jit(
                functools.partial(
                    token_log_probs,
                    MODEL,
                    ExecutionConfig(),
                    objective=PolicyGradientConfig(),
                    micro_rows=micro_rows,
                )
            )
            .lower(params, batch)
            .compile()
        )

    whole, parts = log_probs(None), log_probs(micro_rows)
    np.testing.assert_allclose(parts(params, batch), whole(params, batch), rtol=1e-5, atol=1e-5)
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (parts, whole)]
    assert temporaries[0] < 0.25 * temporaries[1]
    with pytest.raises(ValueError, match="micro_rows=7 must divide the batch of"):
        log_probs(7)


@pytest.mark.slow
@pytest.mark.parametrize("form", [RingConfig(), RingConfig(layout="document_zigzag")])
def test_on_rows_cut_over_devices_all_is_that_of_one_device(rows, form):
    params, batch = rows
    batch = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 8 - LENGTH))), batch)
    mesh = MeshConfig(data=2, seq=2)
    execution = ExecutionConfig(mesh=mesh, sequence_parallel=form)
    wanted = gradient_of(params, batch)
    log_probs = jax.jit(
        lambda params, batch, execution: token_log_probs(
            MODEL, execution, params, batch, objective=PolicyGradientConfig()
        ),
        static_argnums=2,
    )
    of_one = log_probs(params, batch, ExecutionConfig())
    current = make_mesh(mesh, jax.devices()[:4])
    table = parameter_table(MODEL, rules=execution.axis_rules)
    params = jax.device_put(params, table.tree(lambda row: NamedSharding(current, row.spec)))
    with jax.set_mesh(current):
        placed = global_batch(jax.tree.map(np.asarray, batch), current)
        cut = jax.jit(lambda params, batch: gradient_of(params, batch, execution))(params, placed)
        of_cut = log_probs(params, placed, execution)
    is_token = np.asarray(batch.segment_ids) != 0
    np.testing.assert_allclose(
        np.asarray(of_cut)[is_token], np.asarray(of_one)[is_token], rtol=1e-5, atol=1e-5
    )
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_divergence_is_never_negative():
    ones = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    near = ones + 1e-4 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert (k3(ones, near) >= 0).all() and (k3(ones, -ones) >= 0).all()
    assert (k3(ones, ones) == 0).all()


def test_settings_out_of_range_are_refused():
    assert OBJECTIVES["policy_gradient"] is PolicyGradientConfig
    wrong: Any = {"clip_low": 0.0, "clip_high": -1.0, "beta": -0.1}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=rf"objective\.{field}={value}"):
            PolicyGradientConfig(**{field: value})


def test_a_step_without_a_signal_changes_nothing_bitwise(rows):
    """Neither balance loss, weight decay, divergence nor the routers' biases; one with does."""
    _, batch = rows
    moe = MoEConfig(num_experts=4, top_k=1, expert_dim=8, **METHODS["loss_free"].parts())
    moe = dataclasses.replace(moe, balancers=(LoadBalanceConfig(coefficient=1.0),))
    model = dataclasses.replace(MODEL, moe=moe)
    optimizer = adamw(1e-2, weight_decay=0.1)
    state = init_state(model, optimizer, jax.random.key(0))
    step = make_train_step(model, optimizer, objective=PolicyGradientConfig(beta=0.1))
    zeros = jnp.zeros_like(batch.extra["advantages"])
    reference = {"reference_log_probs": batch.extra["old_log_probs"] - 1.0}
    empty = dataclasses.replace(batch, extra=batch.extra | reference | {"advantages": zeros})
    before = jax.device_get(jax.tree.map(_plain, state))
    state, metrics = step(state, empty)
    after = jax.device_get(jax.tree.map(_plain, state))
    assert float(metrics.grad_norm) > 0.0 and not metrics.is_skipped
    assert (int(before.step), int(after.step)) == (0, 1)
    same = dataclasses.replace(after, step=before.step)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    state, _ = step(state, dataclasses.replace(empty, extra=batch.extra | reference))
    assert int(state.step) == 2
    moved = jax.device_get(jax.tree.map(_plain, state))
    for part in ("params", "opt_state", "router_state"):
        leaves = zip(*(jax.tree.leaves(getattr(s, part)) for s in (after, moved)), strict=True)
        assert any((np.asarray(a) != np.asarray(b)).any() for a, b in leaves), part


def _plain(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
