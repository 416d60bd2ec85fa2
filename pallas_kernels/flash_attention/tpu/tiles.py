# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one tile of attention, in values: what a TPU kernel does between two copies.

A tile is r rows, which are queries, against u keys; all statistics of rows are columns [r 1] in
float32. The forward pass folds tiles into a running softmax (FlashAttention-2, arXiv 2307.08691,
section 3.1), whose sums are not divided before the end:

    top' = max(top, max S)    P = exp(S - top')    a = exp(top - top')
    total' = a * total + sum P                     sums' = a * sums + P V
    out = sums / total                             lse = top + log total

The backward pass has, with S and P = exp(S - lse) as in kernels.py, dS = P * (dP - delta), without
the scale, which is left to the end of the sum over tiles.

Nothing here knows of a grid, a block or a reference to memory, so that any kernel may use it: those
of pallas_tpu.py, and those that move keys between devices meanwhile. Products of float32 operands
take the exact passes of the MXU, those of bfloat16 its native one; all add up in float32.

To add a rule that changes logits, put it into `_capped` and into the end of `differentiate_tile`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Float32
from pallas_kernels.flash_attention.mask import Rules

LANES = 128
"""Of a vector register: columns and rows turn into one another in pieces of so many."""


class RunningSoftmax(NamedTuple):
    """Of r rows, over the tiles so far."""

    top: Float32[Array, "r 1"]
    """Largest logit; -inf before the first visible key."""
    total: Float32[Array, "r 1"]
    sums: Float32[Array, "r Hv"]


def nothing_seen(rows: int, width: int) -> RunningSoftmax:
    """The state before the first tile.

    Args:
        rows: r.
        width: of the values.
    """
    column = (rows, 1)
    return RunningSoftmax(
        jnp.full(column, -jnp.inf, jnp.float32),
        jnp.zeros(column, jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def attend_tile(
    state: RunningSoftmax,
    q: Float[Array, "r H"],
    k: Float[Array, "u H"],
    v: Float[Array, "u Hv"],
    is_visible: Bool[Array, "r u"] | None,
    rules: Rules,
) -> RunningSoftmax:
    """Folds one tile into the running softmax.

    Args:
        state: over the tiles before.
        q: queries.
        k: keys.
        v: values.
        is_visible: who sees whom; None where all see all.
        rules: scale and cap are taken from them.
    """
    scores = _capped(dot(q, k, ((1,), (1,))), rules)
    if is_visible is not None:
        scores = jnp.where(is_visible, scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1, keepdims=True))
    # Of a row that has seen nothing, -inf - -inf must not become NaN.
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - base)
    fade = jnp.exp(state.top - base)
    return RunningSoftmax(
        top,
        fade * state.total + jnp.sum(weights, axis=1, keepdims=True),
        fade * state.sums + dot(weights.astype(v.dtype), v, ((1,), (0,))),
    )


def finish(state: RunningSoftmax) -> tuple[Float32[Array, "r Hv"], Float32[Array, "r 1"]]:
    """out and lse of the rows; 0 and -inf where nothing was seen.

    Args:
        state: over all tiles.
    """
    sees_any = state.total > 0.0
    total = jnp.where(sees_any, state.total, 1.0)
    lse = jnp.where(sees_any, state.top + jnp.log(total), -jnp.inf)
    return state.sums / total, lse


def differentiate_tile(
    left: tuple[Float[Array, "a H"], Float[Array, "a Hv"]],
    right: tuple[Float[Array, "c H"], Float[Array, "c Hv"]],
    lse: Float32[Array, "a 1"] | Float32[Array, "1 c"],
    delta: Float32[Array, "a 1"] | Float32[Array, "1 c"],
    is_visible: Bool[Array, "a c"] | None,
    rules: Rules,
) -> tuple[Float32[Array, "a c"], Float32[Array, "a c"]]:
    """The weights P of one tile, and dS without the scale.

    Both as [r u] from (q, d_out) and (k, v), with lse and delta as columns; or turned, as [u r],
    from (k, v) and (q, d_out), with lse and delta as rows: whichever the products that follow can
    take as it lies.

    Args:
        left: what the rows of the result belong to.
        right: what its columns belong to.
        lse: of the whole softmax of the queries, finite.
        delta: see kernels.py.
        is_visible: in the shape of the result; None where all see all.
        rules: scale and cap are taken from them.
    """
    scores = _capped(dot(left[0], right[0], ((1,), (1,))), rules)
    exponents = scores - lse
    if is_visible is not None:
        exponents = jnp.where(is_visible, exponents, -jnp.inf)
    weights = jnp.exp(exponents)
    d_scores = weights * (dot(left[1], right[1], ((1,), (1,))) - delta)
    if rules.softcap is not None:
        d_scores = d_scores * (1.0 - jnp.square(scores / rules.softcap))
    return weights, d_scores


def dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Float32[Array, "a c"]:
    """A product that adds up in float32, exact for operands in float32.

    Args:
        a: matrix.
        b: matrix of the same dtype.
        contracted: which dimension of each.
    """
    is_wide = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if is_wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def column(row: Array) -> Array:
    """[1 r] turned to [r LANES], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(column: Array) -> Array:
    """[r 1] turned to [1 r]."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _capped(products: Array, rules: Rules) -> Array:
    scores = rules.scale * products
    return scores if rules.softcap is None else rules.softcap * jnp.tanh(scores / rules.softcap)
