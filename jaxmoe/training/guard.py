# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which steps are refused: those that are not finite, and those whose gradient is far too large.

    good  =  loss, gradient norm and new state all finite
             and  norm <= max_norm_ratio * median(norms of the last WINDOW accepted steps)

A spike is finite, and a clipped one is still a step in a direction that one broken batch or one
flipped bit chose. The median is of accepted steps alone: what was refused never moves the bound, so
that neither a NaN nor a series of spikes can lift it. There is no bound before FEWEST steps were
accepted. A norm of 0 (a batch in which nothing counts) is accepted and not remembered: enough of
them would make the bound 0 for ever.

It does not judge the loss, which batches differ in more than in their gradients' norm, and does not
scale anything: a step is taken as it is or not at all.

To add a rule: a term of `is_good` in `jaxmoe.training.step`, from what the state remembers.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

WINDOW = 16
"""Accepted steps whose norms are remembered."""
FEWEST = 3
"""Accepted steps from which on there is a bound: the median is then not one odd batch's."""


def no_norms() -> Float[Array, " window"]:
    """What a state remembers before its first step: zeros, which stand for nothing."""
    return jnp.zeros((WINDOW,), jnp.float32)


def norm_limit(recent: Float[Array, " window"] | None, ratio: float | None) -> Float[Array, ""]:
    """The largest gradient norm that is accepted; infinite where there is no bound.

    Args:
        recent: norms of the last accepted steps, the newest last; 0: no step.
        ratio: times their median; None: no bound.

    Raises:
        ValueError: a bound is wanted of a state that remembers nothing.
    """
    if ratio is None:
        return jnp.full((), jnp.inf, jnp.float32)
    if recent is None:
        raise ValueError(
            f"max_norm_ratio={ratio} needs state.recent_norms, which is None: make the state with"
            " jaxmoe.training.state.init_state, or give it jaxmoe.training.guard.no_norms()"
        )
    count = jnp.sum(recent > 0.0)
    # Sorted, the zeros come first; of an even number the lower of the two in the middle.
    place = jnp.clip(WINDOW - count + (count - 1) // 2, 0, WINDOW - 1)
    median = jnp.sort(recent)[place]
    return jnp.where(count >= FEWEST, ratio * median, jnp.inf)


def remember(
    recent: Float[Array, " window"], norm: Float[Array, ""], is_good: Bool[Array, ""]
) -> Float[Array, " window"]:
    """The norms after a step: with its own if it was accepted, in place of the oldest."""
    later = jnp.concatenate([recent[1:], norm[None].astype(recent.dtype)])
    return jnp.where(is_good & (norm > 0.0), later, recent)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every floating-point number of a tree is finite."""
    # 0 * x is 0, or NaN where x is not finite: a sum is several times as fast as `all(isfinite)`.
    sums = [
        jnp.sum(leaf * jnp.zeros((), leaf.dtype))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.all(jnp.isfinite(jnp.stack([total.astype(jnp.float32) for total in sums])))


def select(is_good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The new state or, bit for bit, the old one."""
    # Never by a product: 0 times NaN is NaN.
    return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def check_ratio(ratio: float | None, name: str = "max_norm_ratio") -> None:
    """Refuses a ratio that would refuse ordinary steps.

    Args:
        ratio: of the largest accepted norm to the median.
        name: as the caller calls it.

    Raises:
        ValueError: it is not above 1.
    """
    if ratio is not None and not 1 < ratio < math.inf:
        raise ValueError(
            f"{name}={ratio} must be above 1 (experiments.pretrain has 30), or None to accept every"
            " finite step"
        )
