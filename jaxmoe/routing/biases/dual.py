# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Duals of the balanced assignment that selection biases minimise, and their exact half-steps.

The balanced assignment is  max sum_ti s_ti x_ti  with K experts for each of n tokens and n K / E
tokens for each expert. With the biases b as multipliers of the experts' constraint only:

    D(b) = sum_t (sum of the K largest of s_t + b)  -  n K / E  sum_i b_i

It is convex and piecewise linear, with subgradient loads(b) - n K / E, which the loss-free rule
follows. With inequalities, x <= 1 and prices p >= 0 of tokens and q = -b >= 0 of experts (BIP):

    D(p, q) = K sum_t p_t + c sum_i q_i + sum_ti max(0, s_ti - p_t - q_i),    c = floor(n K / E)

Each half-step is an order statistic and does not increase D:

    p_t = (K+1)-th largest over i of s_ti - q_i        q_i = (c+1)-th largest over t of s_ti - p_t

They are clipped at 0 for the inequalities, and not clipped for the equalities (Quantile Balancing).

Sources: arXiv 2512.03915 (abstract; the statements were derived independently), arXiv 2502.15451
and J. Su's analysis of it. The paper's c was not available: it is rounded down, so that no expert
exceeds its share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.scopes import kth_largest, total


def capacity_of(num_tokens: Array, *, top_k: int, num_experts: int) -> Int[Array, "*G"]:
    """Return c, the even share of an expert, rounded down."""
    return num_tokens.astype(jnp.int32) * top_k // num_experts


def token_prices(biased: Float[Array, "*n E"], *, top_k: int) -> Float[Array, "*n"]:
    """Return the (K+1)-th largest value of each row; the smallest if K = E."""
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
    """Return the (c+1)-th largest value of each column, exact and the same on every mesh.

    Args:
        surplus: Scores less token prices of the rows on this device.
        mask: False excludes a row.
        num_tokens: Rows of each group on all devices.
        top_k: K.
        axes: Mesh axes over which the rows of a group are spread.

    Returns:
        Prices; -inf where a group has no more than c rows.
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
    """Return the mean of the c-th and (c+1)-th largest of each column, between which D is flat.

    At the (c+1)-th largest itself a token's two best experts tie once the prices have converged,
    and rounding would decide between them.

    Args:
        surplus: Scores less token prices of the rows on this device.
        mask: False excludes a row.
        prices: Result of `expert_prices`.
        num_tokens: Rows of each group on all devices.
        top_k: K.
        axes: Mesh axes over which the rows of a group are spread.

    Returns:
        `prices` where the two are equal, or where c is 0.
    """
    capacity = capacity_of(num_tokens, top_k=top_k, num_experts=surplus.shape[2])
    is_above = (surplus > prices[:, None, :]) & mask[:, :, None]
    number = total(is_above.sum(1, dtype=jnp.int32), axes)
    least = jnp.min(surplus, axis=1, where=is_above, initial=jnp.inf)
    least = jax.lax.pmin(least, axes) if axes else least
    is_full = (number == capacity[:, None]) & (number > 0)
    return jnp.where(is_full, 0.5 * prices + 0.5 * jnp.where(is_full, least, 0.0), prices)
