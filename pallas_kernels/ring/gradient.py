# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Joins the two passes of a ring to one differentiable function.

Only q, k, v, out and lse are kept from the forward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.array_types import Array, Float


class Passes(NamedTuple):
    """The two passes of one kind of ring; hashable."""

    attend: Callable[..., tuple[Array, Array]]
    """Forward pass: (q, k, v, tokens, ring) to out in the dtype of q and lse [B N S] f32."""
    differentiate: Callable[..., tuple[Array, Array, Array]]
    """Backward pass: (q, k, v, tokens, out, lse, d_out, ring) to d_q, d_k and d_v in float32."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    tokens: Any,
    ring: Any,
    passes: Passes,
) -> Float[Array, "B S N Hv"]:
    """Return attention of this rank's queries to the keys of all ranks.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        tokens: Pytree of positions and segments.
        ring: Static part of the call.
        passes: Both passes.
    """
    return passes.attend(q, k, v, tokens, ring)[0]


def _forward(q, k, v, tokens, ring, passes):
    out, lse = passes.attend(q, k, v, tokens, ring)
    return out, (q, k, v, tokens, out, lse)


def _backward(ring, passes, residuals, d_out):
    q, k, v, tokens, out, lse = residuals
    gradients = passes.differentiate(q, k, v, tokens, out, lse, d_out, ring)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None


attend.defvjp(_forward, _backward)
