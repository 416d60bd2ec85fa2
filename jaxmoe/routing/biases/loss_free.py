# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loss-free balancing: each expert's bias follows its load.

    e_i  = mean(counts) - counts_i            real assignments of the whole step, before drops
    b_i += rate_n * rule(e)_i

    sign          sign(e_i)                   the paper's
    proportional  e_i / mean(counts)
    rms           e_i / rms(e)                J. Su's: the norm of sign, the direction of the error

This is a subgradient step on the dual of the balanced assignment (`dual.py`); sign is the step of
SignSGD. rate_n is `rate`, rate / n or rate / sqrt(n) in step n = 1, 2, ...; the last two need a
larger `rate`, since 1e-3 / n is negligible after a few steps. A constant added to all biases has no
effect, and the zero-sum form (torchtitan's) removes that drift by subtracting the mean of the step.

Sources: arXiv 2408.15664, algorithm 1; the schedules, arXiv 2512.03915, of which only the abstract
was available: n is taken to be the optimiser step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Arrays, RouterInputs, RouterStatistics
from jaxmoe.routing.biases.base import BiasTraits, SelectionBias


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossFreeConfig(SelectionBias):
    """A bias per expert that rises while the expert has too few tokens, and falls otherwise."""

    name: ClassVar[str] = "loss_free"

    rate: float = 1e-3
    """Step size of the bias; the default was tuned by the authors for scores in [0, 1]."""
    rule: Literal["sign", "proportional", "rms"] = "sign"
    """Function of the load error: its sign, its ratio to the mean load, or the error divided by its
    root mean square."""
    is_zero_sum: bool = False
    """Whether the mean of each step is subtracted, so that the biases do not drift together."""
    schedule: Literal["constant", "inverse", "inverse_sqrt"] = "constant"
    """Rate in step n: `rate`, `rate` / n, or `rate` / sqrt(n)."""
    stop: int | None = None
    """First step without an update of the biases; None: they are always updated."""
    limit: float | None = None
    """Largest absolute bias; None: no limit."""

    def __post_init__(self):
        if not 0.0 <= self.rate < float("inf"):
            raise ValueError(f"bias.rate={self.rate} must be 0 or above, and finite")
        if self.stop is not None and self.stop < 0:
            raise ValueError(f"bias.stop={self.stop} must be a step from 0 on, or None for never")
        if self.limit is not None and not self.limit > 0.0:
            raise ValueError(f"bias.limit={self.limit} must be above 0, or None for no limit")

    @property
    def traits(self) -> BiasTraits:
        """Looks at no other token; other libraries have it."""
        return BiasTraits(is_score_correction=True)

    def prefer(
        self,
        state: Arrays,
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], Arrays]:
        """Return the scores plus the bias."""
        del inputs, top_k, train
        return jax.lax.stop_gradient(scores) + state["bias"][None, :], {}

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> Arrays:
        """Return the bias after one step towards the even load."""
        del top_k
        delta = self.rate_at(step) * self.direction(statistics.counts)
        if self.is_zero_sum:
            delta = delta - delta.mean()
        bias = state["bias"] + delta
        if self.limit is not None:
            bias = jnp.clip(bias, -self.limit, self.limit)
        return {"bias": bias}

    def rate_at(self, step: Array) -> Float[Array, ""]:
        """Return the rate of a step, counted from 0."""
        number = jnp.asarray(step, jnp.float32) + 1.0
        powers = {"constant": 0.0, "inverse": -1.0, "inverse_sqrt": -0.5}
        rate = self.rate * number ** powers[self.schedule]
        return rate if self.stop is None else jnp.where(step < self.stop, rate, 0.0)

    def direction(self, counts: Float[Array, " E"]) -> Float[Array, " E"]:
        """Return the step by `rule`, before the rate; 0 where the load is even or zero."""
        sign = _sign_of_error(counts)
        if self.rule == "sign":
            return sign
        error = jnp.where(sign == 0.0, 0.0, counts.mean() - counts)
        size = counts.mean() if self.rule == "proportional" else jnp.sqrt(jnp.mean(error**2))
        return error / jnp.where(size > 0.0, size, 1.0)


def _sign_of_error(counts: Float[Array, " E"]) -> Float[Array, " E"]:
    """Return the sign of mean(counts) - counts, compared in integers.

    The rounded mean of equal counts differs from them where E is not a power of two.
    """
    integers = counts.astype(jnp.int32)
    quotient, remainder = jnp.divmod(integers.sum(), jnp.int32(counts.size))
    is_below = (integers < quotient) | ((integers == quotient) & (remainder > 0))
    return is_below.astype(jnp.float32) - (integers > quotient).astype(jnp.float32)
