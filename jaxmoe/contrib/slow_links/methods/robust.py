# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Robust mean of gradients: the subspace that most workers agree on (Flag, arXiv 2302.05865).

    x_i = g_i / |g_i|;   w = 1
    repeat:  Y = first r left singular vectors of X diag(w);   w_i = (|1 - |Y^T x_i|^2| + 1e-7)^-1/4
    gradient = sum of Y Y^T x_i, with the median of the norms |g_i|

Y = X C, so that the p x p products of the p workers' gradients, over all parameters, determine the
weights: each worker receives its part of all gradients, computes their products, and sends its part
of the weighted sum. These are the bytes of an all-reduce.

A hostile gradient counts as a unit vector whatever its size: of 14 workers, three that send their
gradient reversed and four times as large do not turn the result (cosine above 0.99), and three that
send large noise turn it little (above 0.95), as each can fill one of the r dimensions.

The published code iterates once, here 3 times by default. Unit vectors lose the magnitude: the
result has the median norm of the gradients. Directions whose singular value is rounding alone are
left out of Y, so that equal gradients give that gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.contrib.slow_links.codec import plain
from jaxmoe.contrib.slow_links.exchange import About
from jaxmoe.contrib.slow_links.fragments import Arrays, TrainingFacts
from jaxmoe.contrib.slow_links.gradient_base import GradientBase
from jaxmoe.contrib.slow_links.gradient_method import GradientMethod, JointExchange

_ROUNDING = 1e-6
"""Square of the smallest singular value that is kept, over that of the largest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RobustConfig(GradientBase):
    """Replaces the mean of gradients by one that few hostile workers cannot turn."""

    name: ClassVar[str] = "robust"

    iterations: int = 3
    """Times that the weights of the workers are computed."""
    rank: int = 4
    """Dimensions of the subspace, at most the number of workers."""

    def __post_init__(self):
        GradientBase.__post_init__(self)
        if self.iterations < 1:
            raise ValueError(f"replicas.iterations={self.iterations} must be at least 1")
        if self.rank < 1:
            raise ValueError(f"replicas.rank={self.rank} must be at least 1")

    def build(self, facts: TrainingFacts) -> GradientMethod:
        """Return the method; see the base class."""
        rank = min(self.rank, facts.workers)
        return GradientMethod(
            codec=lambda leaf, setting: plain(), exchange=flag_mean(rank, self.iterations)
        )


def flag_mean(rank: int, iterations: int) -> JointExchange:
    """Return the exchange whose result is the robust mean of all parameters' gradients at once.

    Args:
        rank: Dimensions of the subspace.
        iterations: Times that the weights are computed.
    """

    def mix(payloads: Any, decodes: Any, params: Arrays, abouts: Any, state: Any) -> Any:
        setting: About = next(iter(abouts.values()))
        parts = {path: spread_parts(x, setting) for path, x in payloads.items()}
        # Highest precision: the weights depend on differences of nearly equal products.
        products = [
            abouts[path].total(jnp.einsum("in,jn->ij", x, x, precision="highest"))
            for path, x in parts.items()
        ]
        gram = jax.lax.psum(sum(products[1:], products[0]), setting.axis)
        assert setting.alive is not None  # set in every exchange of gradients
        weights = flag_weights(gram, setting.alive, rank, iterations)
        mixed = {
            path: gather_parts(jnp.sum(weights[:, None] * x, axis=0), params[path], setting)
            for path, x in parts.items()
        }
        return mixed, state

    return JointExchange(init=lambda params: (), mix=mix)


def flag_weights(
    gram: Float[Array, "p p"], alive: Bool[Array, " p"], rank: int, iterations: int
) -> Float[Array, " p"]:
    """Return the weight of each worker's gradient in the robust mean.

    Args:
        gram: Products of the gradients.
        alive: Workers whose gradients count.
        rank: Dimensions of the subspace.
        iterations: Times that the weights are computed.
    """
    norms = jnp.sqrt(jnp.diagonal(gram))
    is_there = alive & (norms > 0.0)
    inverse = jnp.where(is_there, 1.0 / jnp.where(is_there, norms, 1.0), 0.0)
    unit = inverse[:, None] * gram * inverse[None, :]

    def basis(w: Array) -> Array:
        """Return C of Y = X C, [p r]."""
        squares, vectors = jnp.linalg.eigh(w[:, None] * unit * w[None, :])
        squares = squares[::-1][:rank]
        vectors = vectors[:, ::-1][:, :rank]
        is_kept = squares > _ROUNDING * squares[0]
        scale = jnp.where(is_kept, jax.lax.rsqrt(jnp.where(is_kept, squares, 1.0)), 0.0)
        return w[:, None] * vectors * scale[None]

    w = is_there.astype(gram.dtype)
    for _ in range(iterations):
        inside = jnp.sum((basis(w).T @ unit) ** 2, axis=0)
        w = jnp.where(is_there, (jnp.abs(1.0 - inside) + 1e-7) ** -0.25, 0.0)
    c = basis(w)
    chosen = c @ (c.T @ jnp.sum(unit, axis=1))
    length = jnp.sqrt(jnp.maximum(chosen @ unit @ chosen, 0.0))
    median = jnp.nanmedian(jnp.where(alive, norms, jnp.nan))
    return chosen * inverse * median / jnp.where(length > 0.0, length, 1.0)


def spread_parts(x: Array, setting: About) -> Float[Array, "R n"]:
    """Return this worker's part of the arrays of all workers.

    Args:
        x: Array of this worker.
        setting: Axis of the workers.
    """
    flat = jnp.pad(x.ravel(), (0, -x.size % setting.workers))
    parts = flat.reshape(setting.workers, -1)
    return jax.lax.all_to_all(parts, setting.axis, 0, 0, tiled=True)


def gather_parts(part: Float[Array, " n"], like: Array, setting: About) -> Array:
    """Return an array of which each worker holds a part.

    Args:
        part: Part of this worker.
        like: Array of the shape and dtype of the result.
        setting: Axis of the workers.
    """
    gathered = jax.lax.all_gather(part, setting.axis, tiled=True)
    return gathered[: like.size].reshape(like.shape).astype(like.dtype)
