# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token: temperature, then the filters top-k, top-p and min-p, in this order.

    top_k   the k largest logits                                       arXiv 1805.04833
    top_p   the smallest set of largest probabilities with sum >= p    arXiv 1904.09751, section 3.1
    min_p   probabilities of at least p times the largest one          arXiv 2407.01082, section 3

Each filter sees the probabilities that the one before has left, renormalised, as in `transformers`
and vLLM. Tokens that are tied with the last one kept are kept as well.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

_COLDEST = 1e-5
"""Smallest temperature above 0."""


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that no logits can be divided by.

    Args:
        temperature: Divisor of the logits; 0 takes the most likely token.

    Raises:
        ValueError: It is negative, infinite, or so small that float32 does not hold the quotients.
    """
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or above")
    if 0.0 < temperature < _COLDEST:
        raise ValueError(
            f"temperature={temperature} must be 0, which takes the most likely token, or at least"
            f" {_COLDEST}: float32 does not hold logits divided by less"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Temperature and filters of the sampling."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to choose from; all when None."""
    top_p: float | None = None
    """Probability that the most likely tokens to choose from have together; all when None."""
    min_p: float | None = None
    """Smallest probability of a token to choose from, divided by the largest; all when None."""

    def __post_init__(self):
        check_temperature(self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or None")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must lie between 0 and 1, or be None")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are left out."""
        limits = (self.top_k, self.top_p, self.min_p)
        return not self.is_greedy and any(value is not None for value in limits)

    def limits(self, vocab_size: int) -> Limits:
        """Return the numbers that a compiled program takes; values that leave out nothing for None.

        Args:
            vocab_size: V.
        """
        return Limits(
            temperature=np.float32(self.temperature),
            top_k=np.int32(min(self.top_k or vocab_size, vocab_size)),
            top_p=np.float32(1.0 if self.top_p is None else self.top_p),
            min_p=np.float32(self.min_p or 0.0),
        )


class Limits(NamedTuple):
    """Numbers of a `SamplingConfig`, as arrays: another value needs no other program.

    For rows that are sampled apart each is an array over the rows.
    """

    temperature: Float[Array | np.ndarray, "*B"] | np.float32
    top_k: Int[Array | np.ndarray, "*B"] | np.int32
    top_p: Float[Array | np.ndarray, "*B"] | np.float32
    min_p: Float[Array | np.ndarray, "*B"] | np.float32


def filter_logits(logits: Float[Array, "B V"], limits: Limits) -> Float[Array, "B V"]:
    """Return the logits with -inf for the tokens that the filters leave out; at least one is kept.

    Args:
        logits: Logits, divided by the temperature.
        limits: Filters.
    """
    ranked = -jnp.sort(-logits, axis=-1)
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    among_top_k = jnp.where(place < limits.top_k, ranked, -jnp.inf)
    probs = jax.nn.softmax(among_top_k, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # Rounded sums may exceed 1: top_p = 1 leaves out nothing.
    is_kept = (before < limits.top_p) | (limits.top_p >= 1.0)
    is_kept &= jnp.isfinite(among_top_k) & (
        among_top_k - among_top_k[:, :1] >= jnp.log(limits.min_p)
    )
    last = jnp.max(jnp.where(is_kept, place, 0), axis=-1, keepdims=True)
    least = jnp.take_along_axis(ranked, last, axis=-1)
    return jnp.where(logits >= least, logits, -jnp.inf)


def choose(
    logits: Float[Array, "B V"],
    key: Key[Array, ""],
    limits: Limits,
    *,
    is_greedy: bool,
    has_filters: bool,
) -> Int[Array, " B"]:
    """Return the next token of each row.

    Args:
        logits: Logits of the next token.
        key: PRNG key of this token.
        limits: Temperature and filters.
        is_greedy: Whether the most likely token is taken.
        has_filters: Whether the filters are applied.
    """
    if is_greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / limits.temperature
    if has_filters:
        logits = filter_logits(logits, limits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def choose_each(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], limits: Limits
) -> Int[Array, " B"]:
    """Return the next token of each row, with a key, a temperature and filters of its own.

    A row's token equals that of `choose` for the row alone.

    Args:
        logits: Logits of the next token.
        keys: PRNG key of each row.
        limits: Temperatures and filters [B]; temperature 0 takes the most likely token.
    """
    is_greedy = limits.temperature == 0.0
    scaled = logits / jnp.where(is_greedy, 1.0, limits.temperature)[:, None]
    filters = (limits.top_k < logits.shape[-1]) | (limits.top_p < 1.0) | (limits.min_p > 0.0)

    def filter_rows(scaled: Array) -> Array:
        return jax.vmap(lambda row, row_limits: filter_logits(row[None], row_limits)[0])(
            scaled, limits
        )

    needs_filters = jnp.any(filters & ~is_greedy)
    scaled = jax.lax.cond(needs_filters, filter_rows, lambda scaled: scaled, scaled)
    drawn = jax.vmap(lambda key, row: jax.random.categorical(key, row))(keys, scaled)
    return jnp.where(is_greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
