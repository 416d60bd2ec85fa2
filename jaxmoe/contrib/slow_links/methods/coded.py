# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient coding: the gradient of the whole batch without s of the workers (arXiv 1612.03301).

    message_i = sum over j = i ... i + s of B_ij g_j;      gradient = sum of a_i message_i / n

The batch has n parts, one for each of n workers, and each computes the gradients of s + 1 of them.
Any n - s rows of the cyclic code B span the row of ones: B H^T = 0 for a random H of s rows that
sum to 0. For each set of at most s workers that do not answer, or whose gradients are not finite,
the weights a are computed beforehand. More than s make the result NaN, which the guard refuses.

Nothing is saved in traffic, and the computation is s + 1 times as much. What a run gets for it are
steps that go on without workers whose gradients are not finite. It waits for slow workers: the
exchange is a reduction of one program, which ends when the last of them has sent, and a worker that
is lost ends the program. Who does not answer can only be told to `gradient_step` (`alive`), by a
caller that knows it before the step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.contrib.slow_links.codec import Payload, plain
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.gradient_base import GradientBase
from jaxmoe.contrib.slow_links.gradient_method import Code, GradientMethod, separately

_DRAWS = 8
"""Random codes of which the one with the smallest weights is taken."""
_MOST_SETS = 5000
"""Largest number of sets of absent workers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodedConfig(GradientBase):
    """Computes parts of the batch several times, so that gradients of some workers may be bad."""

    name: ClassVar[str] = "coded"

    absent: int = 1
    """Number of workers whose gradients may be infinite or NaN in a step (s); each worker computes
    s + 1 parts. Slow workers are waited for."""

    def __post_init__(self):
        GradientBase.__post_init__(self)
        if self.absent < 0:
            raise ValueError(f"replicas.absent={self.absent} must be 0 or more")

    def build(self, facts: TrainingFacts) -> GradientMethod:
        """Return the method; see the base class."""
        code = cyclic_code(facts.workers, self.absent)
        leaves = {leaf.path: leaf for leaf in facts.leaves}
        return GradientMethod(
            codec=lambda leaf, setting: plain(),
            exchange=separately(leaves, lambda leaf, setting: decoded_mean(code)),
            code=Code(parts=self.absent + 1, factors=tuple(map(tuple, code.factors.tolist()))),
            may_lose=self.absent,
        )


class CyclicCode(NamedTuple):
    """Factors of the parts in the messages, and of the messages in the gradient."""

    factors: Float[np.ndarray, "n s+1"]
    """Factor of worker i on part (i + k) mod n."""
    alive: Bool[np.ndarray, "sets n"]
    """Workers that answer, for every set of at most s that do not."""
    weights: Float[np.ndarray, "sets n"]
    """Weights of their messages, whose sum is that of all parts' gradients."""


@functools.cache
def cyclic_code(workers: int, absent: int) -> CyclicCode:
    """Return the code of some workers.

    Args:
        workers: Number of workers n, and of parts.
        absent: Number of workers s that may be absent.

    Raises:
        ValueError: s is not below n, or there are too many sets of s workers.
    """
    if absent >= workers:
        raise ValueError(f"replicas.absent={absent} must be below the number of workers, {workers}")
    sets = sum(math.comb(workers, count) for count in range(absent + 1))
    if sets > _MOST_SETS:
        raise ValueError(
            f"replicas.absent={absent} of {workers} workers has {sets} sets of absent workers, at"
            f" most {_MOST_SETS} are possible: choose a smaller replicas.absent"
        )
    draws = 1 if absent == 0 else _DRAWS
    codes = [_draw(workers, absent, seed) for seed in range(draws)]
    return min(codes, key=lambda code: float(np.abs(code.weights).max()))


def _draw(workers: int, absent: int, seed: int) -> CyclicCode:
    """Return one random code with its decoding weights."""
    check = np.random.default_rng(seed).standard_normal((absent, workers))
    check[:, -1] -= check.sum(axis=1)
    factors = np.ones((workers, absent + 1))
    code = np.zeros((workers, workers))
    for worker in range(workers):
        places = (worker + np.arange(absent + 1)) % workers
        first = check[:, places[0]]
        columns = check[:, places[1:]]
        factors[worker, 1:] = -np.linalg.solve(columns, first)
        code[worker, places] = factors[worker]
    alive = []
    weights = []
    for count in range(absent + 1):
        for missing in itertools.combinations(range(workers), count):
            is_present = ~np.isin(np.arange(workers), missing)
            decoding = np.zeros(workers)
            decoding[is_present] = np.linalg.lstsq(
                code[is_present].T, np.ones(workers), rcond=None
            )[0]
            alive.append(is_present)
            weights.append(decoding)
    return CyclicCode(factors, np.stack(alive), np.stack(weights))


def decoded_mean(code: CyclicCode) -> Exchange:
    """Return the exchange whose result is the mean of the parts' gradients.

    Args:
        code: Code of the messages.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        assert setting.alive is not None  # set in every exchange of gradients
        # Too many absent workers are in no row; the caller makes the result NaN.
        row = jnp.argmax(jnp.all(jnp.asarray(code.alive) == setting.alive[None], axis=1))
        weight = jnp.asarray(code.weights, slow.dtype)[row, jax.lax.axis_index(setting.axis)]
        return jax.lax.psum(weight * decode(payload, slow), setting.axis) / setting.workers, state

    return Exchange(init=no_state, mix=mix)
