# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Uneven scores, one optimiser step of a selection bias on them, and the duals it lowers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.routing import Extent, RouterInputs, SoftmaxTopKConfig


def skewed(tokens, experts, seed=0, law="softmax"):
    """Return scores in [0, 1] of a router that prefers the last experts."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) + np.linspace(0.0, 3.0, experts)
    scores = jax.nn.softmax if law == "softmax" else jax.nn.sigmoid
    return scores(jnp.asarray(logits, jnp.float32))


def inputs_for(scores, mask=None, extent=None):
    tokens = scores.shape[0]
    return RouterInputs(
        x=scores,
        token_mask=jnp.ones(tokens, bool) if mask is None else jnp.asarray(mask),
        segment_ids=jnp.ones(tokens, jnp.int32),
        extent=extent or Extent(),
    )


def loads(preference, top_k, mask=None):
    _, ids = jax.lax.top_k(preference, top_k)
    chosen = jax.nn.one_hot(ids, preference.shape[1]).sum(1)
    return chosen.sum(0) if mask is None else chosen[mask].sum(0)


def violation(counts):
    return float(counts.max() / counts.mean() - 1.0)


@functools.partial(jax.jit, static_argnames=("config", "top_k", "train"))
def one_step(config, state, scores, mask, step, *, top_k, train=True):
    """Return (preference, new state, RouterOutput) of one optimiser step on these scores."""
    router = SoftmaxTopKConfig(bias=config).build(
        num_experts=scores.shape[1], top_k=top_k, embed_dim=scores.shape[1]
    )
    inputs = inputs_for(jnp.log(scores), mask)
    weight = {"weight": jnp.eye(scores.shape[1])}  # softmax(log s) is s where its rows sum to 1
    output = router.route(weight, state, inputs, train=train, key=None)
    preference, _ = config.prefer(state, scores, inputs, top_k=top_k, train=train)
    return preference, router.update(state, output.statistics, step), output


def chosen_sum(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"],
    token_mask: Bool[Array, " T"],
    *,
    top_k: int,
) -> Float[Array, ""]:
    """First term of D(b) of `jaxmoe/routing/biases/dual.py`: additive over tokens."""
    best, _ = jax.lax.top_k(scores + bias[None, :], top_k)
    return jnp.sum(best, where=token_mask[:, None])


def dual_objective(
    chosen: Float[Array, ""],
    num_tokens: Float[Array, ""],
    bias: Float[Array, " E"],
    *,
    top_k: int,
) -> Float[Array, ""]:
    """D(b) from the summed `chosen_sum`; invariant under a shift of b."""
    return chosen - num_tokens * top_k * bias.mean()


def bip_objective(
    scores: Float[Array, "T E"],
    p: Float[Array, " T"],
    q: Float[Array, " E"],
    *,
    top_k: int,
    capacity: int,
) -> Float[Array, ""]:
    """D(p, q): an upper bound of every assignment that keeps the inequalities."""
    surplus = jnp.maximum(scores - p[:, None] - q[None, :], 0.0)
    return top_k * p.sum() + capacity * q.sum() + surplus.sum()
