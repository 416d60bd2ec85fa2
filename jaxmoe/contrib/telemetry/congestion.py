# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fits gamma_eff, which measures how strongly a router avoids overloaded experts, to its loads.

In a mean-field congestion game an expert of quality q_i and load share rho_i has cost gamma rho_i -
q_i, and tokens choose by a softmax: the loads are the fixed point

    rho = softmax(q - gamma rho)

gamma = 0 follows quality alone; a large gamma spreads the load. Given a quality (by default the
mean log probability of each expert) and the loads, gamma_eff is the gamma whose fixed point is
nearest in L1. Its interval is a bootstrap over batches.

Source: arXiv 2604.04230, of which only the abstract was available: quality, distance and search are
our reading. A diagnostic in numpy, on the host.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Shaped

EVERY = 10
"""Steps between records of gamma_eff and of the coupling of weights, in detailed telemetry."""
_LARGEST = 1e4
"""Largest gamma of the search; at this value the load is even."""
_NUM_RESAMPLES = 200
"""Resamples of the bootstrap over batches."""
_INTERVAL = (0.025, 0.975)
"""Quantiles of the bootstrap interval."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Congestion:
    """A fitted congestion coefficient."""

    gamma: float
    """Coefficient of all batches together, dimensionless."""
    low: float
    """Lower end of the bootstrap interval."""
    high: float
    """Upper end of the bootstrap interval."""
    distance: float
    """L1 distance of the fixed point from the load, 0 to 2; large if the model does not fit."""


def equilibrium(
    quality: Float[np.ndarray, "*N E"], gamma: Float[np.ndarray, "*N"] | float
) -> Float[np.ndarray, "*N E"]:
    """Compute the fixed point rho = softmax(q - gamma rho), unique for gamma >= 0.

    log rho + gamma rho = q - c, where c makes the shares sum to 1. Their sum is convex in c, so
    that Newton's method from the left converges for every gamma, unlike damped iteration.

    Args:
        quality: Qualities q, nats; invariant under a constant added to all.
        gamma: Coefficient, not negative; one for each row of qualities, or one for all.
    """
    quality = np.asarray(quality, np.float64)
    quality = quality - quality.max(-1, keepdims=True)
    gamma = np.broadcast_to(np.maximum(gamma, 1e-9), quality.shape[:-1])[..., None]
    c = -gamma  # where the best expert alone has share 1
    for _ in range(60):
        shares = _omega(quality - c + np.log(gamma)) / gamma
        step = (shares.sum(-1, keepdims=True) - 1.0) / np.sum(
            shares / (1.0 + gamma * shares), axis=-1, keepdims=True
        )
        c = c + step
        if np.abs(step).max() < 1e-12:
            break
    return shares / shares.sum(-1, keepdims=True)


def fit_congestion(
    load: Shaped[np.ndarray, ...],
    quality: Shaped[np.ndarray, ...],
    *,
    num_resamples: int = _NUM_RESAMPLES,
) -> Congestion:
    """Fit gamma_eff of one layer to several batches.

    Args:
        load: Assignments [N E] of each expert in each of N batches, in any unit.
        quality: Quality [N E] of each expert in each batch, such as `detail_log_prob / num_tokens`.
        num_resamples: Resamples of the bootstrap over batches.

    Raises:
        ValueError: shapes differ, or a batch has no load.
    """
    load = np.asarray(load, np.float64)
    quality = np.asarray(quality, np.float64)
    if load.shape != quality.shape or load.ndim != 2:
        raise ValueError(
            f"load {load.shape} and quality {quality.shape} must both be [batches, experts]"
        )
    if (load < 0.0).any() or not (load.sum(1) > 0.0).all():
        raise ValueError("load must not be negative, and each batch must hold a token")

    draws = np.random.default_rng(0).integers(len(load), size=(num_resamples, len(load)))
    rows = np.concatenate([np.arange(len(load))[None], draws])  # the whole, then resamples
    share = load[rows].sum(1)
    gammas, distances = _nearest(share / share.sum(-1, keepdims=True), quality[rows].mean(1))
    low, high = np.quantile(gammas[1:], _INTERVAL)
    return Congestion(
        gamma=float(gammas[0]), low=float(low), high=float(high), distance=float(distances[0])
    )


def _nearest(share: np.ndarray, quality: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's gamma of least L1 distance, by grid and golden sections, and the
    distance."""

    def distance(gamma: np.ndarray) -> np.ndarray:
        return np.abs(equilibrium(quality, gamma) - share).sum(-1)

    grid = np.concatenate([[0.0], np.geomspace(0.01, _LARGEST, 40)])
    best = np.argmin([distance(np.full(len(share), gamma)) for gamma in grid], axis=0)
    low = grid[np.maximum(best - 1, 0)]
    high = grid[np.minimum(best + 1, len(grid) - 1)]
    ratio = (np.sqrt(5.0) - 1.0) / 2.0
    for _ in range(40):
        lower = high - ratio * (high - low)
        right = low + ratio * (high - low)
        is_left = distance(lower) <= distance(right)
        low = np.where(is_left, low, lower)
        high = np.where(is_left, right, high)
        if (high - low <= 1e-5 * np.maximum(1.0, high)).all():
            break
    gamma = 0.5 * (low + high)
    return gamma, distance(gamma)


def _omega(z: np.ndarray) -> np.ndarray:
    """Return w with w + log w = z (Wright's omega), by Newton's method on log w from above."""
    y = np.minimum(z, np.log1p(np.maximum(z, 0.0)))
    for _ in range(8):
        w = np.exp(y)
        y = y - (y + w - z) / (1.0 + w)
    return np.exp(y)
