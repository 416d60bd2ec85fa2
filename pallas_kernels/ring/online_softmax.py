# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over part of the keys as a pair (out, lse), and the merge of two parts.

    lse = log(exp(a.lse) + exp(b.lse))
    out = exp(a.lse - lse) * a.out + exp(b.lse - lse) * b.out

The merge is associative and commutative, and the state that has seen no key (out 0, lse -inf) is
its identity: parts of the keys may be visited in any order, on any device, and merged at the end
(Milakov and Gimelshein, arXiv 1805.02867; in the form with lse: Ring Attention, arXiv 2310.01889).

`flash_attention` returns exactly this pair. Merge in float32: every merge rounds the output.

To add a statistic of the softmax (its entropy, say), give it a field and a line in `merge`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.jax_versions import match_varying


class SoftmaxState(NamedTuple):
    """Attention over some of the keys: a pytree."""

    out: Float[Array, "B S N Hv"]
    lse: Float[Array, "B N S"]


def empty_like(state: SoftmaxState) -> SoftmaxState:
    """The state of queries that have seen no key yet, with the shapes and dtypes of `state`."""
    return SoftmaxState(
        match_varying(jnp.zeros(state.out.shape, state.out.dtype), state.out),
        match_varying(jnp.full(state.lse.shape, -jnp.inf, state.lse.dtype), state.lse),
    )


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Attention over the keys of `a` and of `b` together.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.

    Returns:
        The merged state, in the dtypes of `a`. Values and gradients are finite where a query has
        seen nothing in one part, or in both (out 0, lse -inf).
    """
    top = jnp.maximum(a.lse, b.lse)
    # The maximum cancels. Without stop_gradient the derivative of -inf - -inf would be NaN.
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top)))
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weight_a + weight_b
    sees_any = total > 0
    total = jnp.where(sees_any, total, jnp.ones_like(total))
    out_a, out_b = (x.out.astype(total.dtype) for x in (a, b))
    out = _by_query(weight_a / total) * out_a + _by_query(weight_b / total) * out_b
    lse = jnp.where(sees_any, top + jnp.log(total), -jnp.inf)
    return SoftmaxState(out.astype(a.out.dtype), lse.astype(a.lse.dtype))


def _by_query(weights: Float[Array, "B N S"]) -> Float[Array, "B S N 1"]:
    return weights.swapaxes(1, 2)[..., None]
