# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The duals that selection biases descend on, and their exact half-steps.

The balanced assignment is  max sum_ti s_ti x_ti  with K experts for each of n tokens and n K / E
tokens for each expert. With the biases b as multipliers of the experts' constraint alone:

    D(b) = sum_t (sum of the K largest of s_t + b)  -  n K / E  sum_i b_i

convex and piecewise linear, with subgradient loads(b) - n K / E: the loss-free rule steps along it.
With inequalities, x <= 1 and prices p >= 0 of tokens and q = -b >= 0 of experts (BIP):

    D(p, q) = K sum_t p_t + c sum_i q_i + sum_ti max(0, s_ti - p_t - q_i),    c = floor(n K / E)

Each half-step is an order statistic and never raises D:

    p_t = (K+1)-th largest over i of s_ti - q_i        q_i = (c+1)-th largest over t of s_ti - p_t

clipped at 0 for the inequalities, and as they are for the equalities (Quantile Balancing).

Sources: arXiv 2512.03915 (abstract; the statements were derived anew), arXiv 2502.15451 and J. Su's
analysis of it. The paper's own c could not be read: it is taken rounded down, so that no expert
exceeds its share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.scopes import kth_largest, total


def chosen_sum(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"],
    token_mask: Bool[Array, " T"],
    *,
    top_k: int,
) -> Float[Array, ""]:
    """The first term of D(b): additive over tokens, devices and micro-batches.

    Args:
        scores: unbiased and linear, f32.
        bias: the same for all tokens.
        token_mask: False leaves a token out.
        top_k: K.
    """
    best, _ = jax.lax.top_k(scores + bias[None, :], top_k)
    return jnp.sum(best, where=token_mask[:, None])


def dual_objective(
    chosen: Float[Array, ""],
    num_tokens: Float[Array, ""],
    bias: Float[Array, " E"],
    *,
    top_k: int,
) -> Float[Array, ""]:
    """D(b) from the summed `chosen_sum` and number of real tokens; no shift of b changes it."""
    return chosen - num_tokens * top_k * bias.mean()


def bip_objective(
    scores: Float[Array, "T E"],
    p: Float[Array, " T"],
    q: Float[Array, " E"],
    *,
    top_k: int,
    capacity: int,
) -> Float[Array, ""]:
    """D(p, q): at least the value of every assignment that keeps the inequalities.

    Args:
        scores: unbiased and linear, f32.
        p: prices of tokens, not negative.
        q: prices of experts, not negative.
        top_k: K.
        capacity: c.
    """
    surplus = jnp.maximum(scores - p[:, None] - q[None, :], 0.0)
    return top_k * p.sum() + capacity * q.sum() + surplus.sum()


def capacity_of(num_tokens: Array, *, top_k: int, num_experts: int) -> Int[Array, "*G"]:
    """c, the even share of an expert rounded down."""
    return num_tokens.astype(jnp.int32) * top_k // num_experts


def token_prices(biased: Float[Array, "*n E"], *, top_k: int) -> Float[Array, "*n"]:
    """The (K+1)-th largest of each row, which its chosen experts exceed; the least when K is E."""
    rank = min(top_k + 1, biased.shape[-1])
    best, _ = jax.lax.top_k(biased, rank)
    return best[..., rank - 1]


def expert_prices(
    surplus: Float[Array, "G n E"],
    mask: Bool[Array, "G n"],
    num_tokens: Int[Array, " G"],
    *,
    top_k: int,
    axes: tuple[str, ...] = (),
) -> Float[Array, "G E"]:
    """The (c+1)-th largest of each column, exact and the same however the rows are spread.

    Args:
        surplus: scores less token prices, the rows held here.
        mask: False leaves a row out.
        num_tokens: rows of each group on all devices.
        top_k: K.
        axes: mesh axes over which the rows of a group are spread.

    Returns:
        -inf where a group has no more than c rows.
    """
    capacity = capacity_of(num_tokens, top_k=top_k, num_experts=surplus.shape[2])
    return kth_largest(surplus, capacity + 1, mask, axes)


def between(
    surplus: Float[Array, "G n E"],
    mask: Bool[Array, "G n"],
    prices: Float[Array, "G E"],
    num_tokens: Int[Array, " G"],
    *,
    top_k: int,
    axes: tuple[str, ...] = (),
) -> Float[Array, "G E"]:
    """The middle of the c-th and the (c+1)-th largest of each column: the dual is flat there.

    At the (c+1)-th itself a token's two best experts tie once the prices have settled, and rounding
    would say where it goes.

    Args:
        surplus: as in `expert_prices`.
        mask: as there.
        prices: what it returned.
        num_tokens: as there.
        top_k: K.
        axes: as there.

    Returns:
        `prices` where the two are equal, or where c is 0.
    """
    capacity = capacity_of(num_tokens, top_k=top_k, num_experts=surplus.shape[2])
    is_above = (surplus > prices[:, None, :]) & mask[:, :, None]
    number = total(is_above.sum(1, dtype=jnp.int32), axes)
    least = jnp.min(surplus, axis=1, where=is_above, initial=jnp.inf)
    least = jax.lax.pmin(least, axes) if axes else least
    has_room = (number == capacity[:, None]) & (number > 0)
    return jnp.where(has_room, 0.5 * prices + 0.5 * jnp.where(has_room, least, 0.0), prices)
