# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes one tile of attention on values: the arithmetic of the TPU kernels.

A tile is r rows, which are queries, against u keys; all statistics of rows are columns [r 1] in
float32. The forward pass folds tiles into a running softmax (FlashAttention-2, arXiv 2307.08691,
section 3.1), whose sums are divided at the end:

    top' = max(top, max S)    P = exp(S - top')    a = exp(top - top')
    total' = a * total + sum P                     sums' = a * sums + P V
    out = sums / total                             lse = top + log total

The backward pass has, with S and P = exp(S - lse) as in kernels.py, dS = P * (dP - delta), without
the scale, which is applied at the end of the sum over tiles.

Nothing here depends on a grid, a block or a memory reference: the kernels of this folder and those
of ring/remote_dma/ use it. Products of float32 operands take the exact passes of the MXU, those of
bfloat16 its native one; all sums are float32.

To add a rule that changes logits: `_cap` and the end of `differentiate_tile`, both in
`pallas_kernels/flash_attention/tpu/tiles.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Float32
from pallas_kernels.flash_attention.mask import Rules

LANES = 128
"""Lanes of a vector register: columns and rows are transposed in pieces of this length."""


class RunningSoftmax(NamedTuple):
    """Softmax state of r rows over the tiles so far."""

    top: Float32[Array, "r 1"]
    """Largest logit; -inf before the first visible key."""
    total: Float32[Array, "r 1"]
    sums: Float32[Array, "r Hv"]


def nothing_seen(rows: int, width: int) -> RunningSoftmax:
    """Return the state before the first tile.

    Args:
        rows: Number of rows r.
        width: Width of the values.
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
    """Fold one tile into the running softmax.

    Args:
        state: State over the tiles before.
        q: Queries.
        k: Keys.
        v: Values.
        is_visible: Mask; None where every query sees every key.
        rules: Rules with scale and cap.
    """
    scores = _cap(dot(q, k, ((1,), (1,))), rules)
    if is_visible is not None:
        scores = jnp.where(is_visible, scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1, keepdims=True))
    # A row that has seen no key: -inf - -inf would be NaN.
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - base)
    fade = jnp.exp(state.top - base)
    return RunningSoftmax(
        top,
        fade * state.total + jnp.sum(weights, axis=1, keepdims=True),
        fade * state.sums + dot(weights.astype(v.dtype), v, ((1,), (0,))),
    )


def finish(state: RunningSoftmax) -> tuple[Float32[Array, "r Hv"], Float32[Array, "r 1"]]:
    """Return out and lse of the rows; 0 and -inf where no key was seen.

    Args:
        state: State over all tiles.
    """
    sees_any = state.total > 0.0
    total = jnp.where(sees_any, state.total, 1.0)
    lse = jnp.where(sees_any, state.top + jnp.log(total), -jnp.inf)
    return state.sums / total, lse


def differentiate_tile(
    lhs: tuple[Float[Array, "a H"], Float[Array, "a Hv"]],
    rhs: tuple[Float[Array, "c H"], Float[Array, "c Hv"]],
    lse: Float32[Array, "a 1"] | Float32[Array, "1 c"],
    delta: Float32[Array, "a 1"] | Float32[Array, "1 c"],
    is_visible: Bool[Array, "a c"] | None,
    rules: Rules,
) -> tuple[Float32[Array, "a c"], Float32[Array, "a c"]]:
    """Return the weights P of one tile, and dS without the scale.

    Both are [r u], from (q, d_out) and (k, v) with lse and delta as columns; or transposed, [u r],
    from (k, v) and (q, d_out) with lse and delta as rows: whichever the next products take without
    a transpose.

    Args:
        lhs: Arrays that belong to the rows of the result.
        rhs: Arrays that belong to its columns.
        lse: Log-sum-exp of the whole softmax of the queries, finite.
        delta: Softmax term of the gradient; see kernels.py.
        is_visible: Mask in the shape of the result; None where every query sees every key.
        rules: Rules with scale and cap.
    """
    scores = _cap(dot(lhs[0], rhs[0], ((1,), (1,))), rules)
    exponents = scores - lse
    if is_visible is not None:
        exponents = jnp.where(is_visible, exponents, -jnp.inf)
    weights = jnp.exp(exponents)
    d_scores = weights * (dot(lhs[1], rhs[1], ((1,), (1,))) - delta)
    if rules.softcap is not None:
        d_scores = d_scores * (1.0 - jnp.square(scores / rules.softcap))
    return weights, d_scores


def dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Float32[Array, "a c"]:
    """Return a product with sums in float32, exact for float32 operands.

    Args:
        a: Matrix.
        b: Matrix of the same dtype.
        contracted: Contracted dimension of each.
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
    """Transpose [1 r] to [r LANES], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(column: Array) -> Array:
    """Transpose [r 1] to [1 r]."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _cap(products: Array, rules: Rules) -> Array:
    scores = rules.scale * products
    return scores if rules.softcap is None else rules.softcap * jnp.tanh(scores / rules.softcap)
