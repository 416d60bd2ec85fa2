# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Represents attention over part of the keys as (out, lse), and merges two parts.

    lse = log(exp(a.lse) + exp(b.lse))
    out = exp(a.lse - lse) * a.out + exp(b.lse - lse) * b.out

The merge is associative and commutative, and the state that has seen no key (out 0, lse -inf) is
its identity: parts of the keys may be visited in any order, on any device (Milakov and Gimelshein,
arXiv 1805.02867; the form with lse: Ring Attention, arXiv 2310.01889).

`flash_attention` returns this pair. Merge in float32: every merge rounds the output.

To add a statistic of the softmax: a field of `SoftmaxState` and its line in `merge`, both in
`pallas_kernels/ring/online_softmax.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float


class SoftmaxState(NamedTuple):
    """Attention over some of the keys; a pytree."""

    out: Float[Array, "B S N Hv"]
    lse: Float[Array, "B N S"]


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Return attention over the keys of both states.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.

    Returns:
        The merged state, in the dtypes of `a`. Values and gradients are finite where a query has
        seen no key in one part or in both (out 0, lse -inf).
    """
    top = jnp.maximum(a.lse, b.lse)
    # The maximum cancels. Without stop_gradient the derivative of -inf - -inf would be NaN.
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top)))
    weight_a = jnp.exp(a.lse - top)
    weight_b = jnp.exp(b.lse - top)
    total = weight_a + weight_b
    sees_any = total > 0
    total = jnp.where(sees_any, total, jnp.ones_like(total))
    out_a, out_b = (x.out.astype(total.dtype) for x in (a, b))
    out = _by_query(weight_a / total) * out_a + _by_query(weight_b / total) * out_b
    lse = jnp.where(sees_any, top + jnp.log(total), -jnp.inf)
    return SoftmaxState(out.astype(a.out.dtype), lse.astype(a.lse.dtype))


def _by_query(weights: Float[Array, "B N S"]) -> Float[Array, "B S N 1"]:
    return weights.swapaxes(1, 2)[..., None]
