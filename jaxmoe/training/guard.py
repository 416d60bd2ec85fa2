# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses steps that are not finite, or whose gradient norm is far too large.

    good  =  loss, gradient norm and new state all finite
             and  norm <= max_norm_ratio * median(norms of the last WINDOW accepted steps)

The norm is that of all gradients but those of embeddings. A norm follows the embedding, so that the
gradient of a token's row is divided by the length of the row, and a token that a run meets for the
first time still has its initial row, which HyperP draws 1e-4 as large as a trained one. A single
such token in a batch of few tokens makes the whole norm a hundred times that of its neighbours, and
changes nothing in the other gradients.

A spike is finite, and clipping keeps the direction that one broken batch or flipped bit chose. The
median is over accepted steps only, so that neither a NaN nor a series of spikes can raise the
bound. There is no bound before FEWEST steps were accepted. The norm of a batch without counted
tokens is not remembered: it is 0, or that of the losses of balancers alone, and enough of them
would make a bound that no other step meets.

The loss is not judged, since batches differ in it more than in the norm of their gradients. Steps
are never scaled.

To add a rule: a term of `is_good` in `jaxmoe/training/step.py`, and a function in
`jaxmoe/training/guard.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.training.host_arrays import global_norm, is_on_host

WINDOW = 16
"""Number of accepted steps whose norms are remembered."""
FEWEST = 3
"""Number of accepted steps before there is a bound, so that one odd batch is not the median."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Steps that are refused, and rollbacks after several of them in a row."""

    max_norm_ratio: float | None = 30.0
    """Largest gradient norm without embeddings, in medians of the last accepted steps; a step above
    it is refused. None refuses only steps that are not finite. The largest in healthy runs was 3
    (next token) and 10 (masked diffusion with small batches)."""
    max_skipped: int = 5
    """Refused steps in a row after which the run rolls back, or ends as diverged."""
    rollbacks: int = 1
    """Total number of rollbacks: after `max_skipped` refused steps a run restores the newest valid
    checkpoint and skips their batches. 0 ends the run as diverged at once."""

    def __post_init__(self):
        check_ratio(self.max_norm_ratio, "training.guard.max_norm_ratio")
        if self.max_skipped < 1:
            raise ValueError(f"training.guard.max_skipped={self.max_skipped} must be at least 1")
        if self.rollbacks < 0:
            raise ValueError(f"training.guard.rollbacks={self.rollbacks} must be 0 or more")


def no_norms() -> Float[Array, " window"]:
    """Return the initial norms of a state: zeros, which stand for no step."""
    return jnp.zeros((WINDOW,), jnp.float32)


def norm_of_judged(
    grads: Any, norm: Float[Array, ""], embeddings: Collection[str]
) -> Float[Array, ""]:
    """Return the norm of the gradients that the guard reads: all but those of embeddings.

    Args:
        grads: Gradients, as nested dicts.
        norm: Their norm; it is returned if no other gradients are there.
        embeddings: Paths of the embeddings, with slashes.
    """
    leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
    judged = [
        leaf
        for path, leaf in leaves
        if jax.tree_util.keystr(path, simple=True, separator="/") not in embeddings
    ]
    return global_norm(judged) if 0 < len(judged) < len(leaves) else norm


def norm_limit(recent: Float[Array, " window"] | None, ratio: float | None) -> Float[Array, ""]:
    """Return the largest gradient norm that is accepted; infinite without a bound.

    Args:
        recent: Norms of the last accepted steps, the newest last; 0 stands for no step.
        ratio: Multiple of their median; None for no bound.

    Raises:
        ValueError: A bound is requested and the state has no norms.
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
    recent: Float[Array, " window"] | None, norm: Float[Array, ""], counts: Bool[Array, ""]
) -> Float[Array, " window"] | None:
    """Return the norms after a step: its own replaces the oldest if it is above 0 and counts.

    Args:
        recent: Norms of the last accepted steps, the newest last; None stays None.
        norm: Norm of the step.
        counts: Whether the step was accepted, and had counted tokens.
    """
    if recent is None:
        return None
    later = jnp.concatenate([recent[1:], norm[None].astype(recent.dtype)])
    return jnp.where(counts & (norm > 0.0), later, recent)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every floating-point number of a tree is finite."""
    # 0 * x is 0, or NaN where x is not finite: a sum is several times as fast as `all(isfinite)`.
    sums = [
        jnp.sum(leaf * jnp.zeros((), leaf.dtype))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not sums:
        return jnp.ones((), bool)
    return jnp.all(jnp.isfinite(jnp.stack([total.astype(jnp.float32) for total in sums])))


def select(is_good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return the new state or, bitwise, the old one; each array stays in its memory."""
    leaves, structure = jax.tree.flatten(new)
    olds = structure.flatten_up_to(old)
    waiting = [place for place, leaf in enumerate(leaves) if is_on_host(leaf)]
    # Never by a product: 0 times NaN is NaN.
    chosen = [
        leaf if place in waiting else jnp.where(is_good, leaf, before)
        for place, (leaf, before) in enumerate(zip(leaves, olds, strict=True))
    ]
    if waiting:  # nothing is computed in host memory
        news, olds = ([tree[place] for place in waiting] for tree in (leaves, olds))
        results = jax.lax.cond(is_good, lambda new, old: new, lambda new, old: old, news, olds)
        for place, leaf in zip(waiting, results, strict=True):
            chosen[place] = leaf
    return structure.unflatten(chosen)


def select_changed(is_good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return `select` of the arrays that are not the same object in both."""
    return jax.tree.map(
        lambda leaf, before: leaf if leaf is before else jnp.where(is_good, leaf, before), new, old
    )


def check_ratio(ratio: float | None, name: str = "max_norm_ratio") -> None:
    """Raise if a ratio would refuse ordinary steps.

    Args:
        ratio: Largest accepted norm over the median.
        name: Name of the argument in the message.

    Raises:
        ValueError: The ratio is not above 1.
    """
    if ratio is not None and not 1 < ratio < math.inf:
        raise ValueError(
            f"{name}={ratio} must be above 1 (jaxmoe pretrain has 30), or None to accept every"
            " finite step"
        )
